"""Trees as flat dicts of tensors: `{"params.block.0.weight": tensor}`, and the way back.

[Note: canonical values] A parameter is stored once, under its own name, in the highest precision
that there is: at stages 1 and 2 with a low `Precision.param` that is the master, and the parameters
that the model computes with are its rounded copy, or what somebody wrote there since, which counts
(see [Note: masters follow]). So a checkpoint looks the same whichever stage wrote it, and every
stage reads it back without loss.
"""

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.distributed.dtensor import local_tensor
from fzero.errors import CheckpointError
from fzero.state.opt_state import OptState
from fzero.tree import PyTree

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Flat:
    """The leaves of params and an optimizer's state.

    Args:
        tensors: canonical values, `DTensor`s or plain tensors, by key.
        rounded: by the same keys, the low-precision copies of some of them.
        scalars: leaves that are plain Python values.
        rebuild: from scalars by key to `(params, opt_state)` with these very tensors.
    """

    tensors: dict[str, Tensor]
    rounded: dict[str, Tensor]
    scalars: dict[str, Scalar]
    rebuild: Callable[[Mapping[str, Scalar]], tuple[PyTree, PyTree]]


def flatten(params: PyTree, opt_state: PyTree) -> Flat:
    """All leaves of a checkpoint, by key. Metrics are none: the next step makes new ones.

    Args:
        params: pytree of tensors, or None.
        opt_state: an `OptState`, any other pytree, or None.

    Raises:
        CheckpointError: leaves that are neither tensors nor plain Python values; all are named.

    >>> list(flatten({"w": torch.ones(2)}, {"mu": [torch.zeros(2)], "lr": 0.1}).tensors)
    ['params.w', 'opt_state.mu.0']
    """
    leaves: dict[str, Any] = {}
    masters: dict[str, tuple[str, Tensor]] = {}
    rest = opt_state
    if isinstance(opt_state, OptState):
        high = opt_state.master
        pairs = zip(keys("params", high), tree.leaves(high), strict=True)
        masters = dict(zip(tree.paths(high), pairs, strict=True))
        # a master goes by its parameter's key: a checkpoint has one value for both
        rest = opt_state._replace(master=None, metrics={})
    param_keys, state_keys = keys("params", params), keys("opt_state", rest)
    param_leaves, param_spec = tree.flatten(params)
    state_leaves, state_spec = tree.flatten(rest)
    rounded: dict[str, Tensor] = {}
    for key, path, leaf in zip(param_keys, tree.paths(params), param_leaves, strict=True):
        _, master = masters.pop(path, (key, None))
        # the master has all the digits, and the parameter is its cast
        leaves[key] = leaf if master is None else master
        if master is not None:
            rounded[key] = leaf
    leaves |= dict(masters.values())  # where there are no params the masters stand for them
    leaves |= dict(zip(state_keys, state_leaves, strict=True))
    tensors = {key: x for key, x in leaves.items() if isinstance(x, Tensor)}
    scalars = {key: x for key, x in leaves.items() if isinstance(x, Scalar)}
    _check_types(leaves, tensors, scalars)

    def rebuild(new: Mapping[str, Scalar]) -> tuple[PyTree, PyTree]:
        def of(keys: list[str], old: list[Any], spec: tree.Spec) -> PyTree:
            return tree.unflatten(spec, [new.get(key, x) for key, x in zip(keys, old, strict=True)])

        state = of(state_keys, state_leaves, state_spec)
        if isinstance(opt_state, OptState):
            # they were filled in place, under the keys of the parameters
            state = state._replace(master=opt_state.master, metrics={})
        return of(param_keys, param_leaves, param_spec), state

    return Flat(tensors, rounded, scalars, rebuild)


def keys(prefix: str, of: PyTree) -> list[str]:
    """One key per leaf: its dotted label, or its path where two leaves share a name.

    >>> keys("params", {"a.b": 1, "c": 2}), keys("params", {"a.b": 1, "a": {"b": 2}})
    (['params.a.b', 'params.c'], ["params['a']['b']", "params['a.b']"])
    """
    names = [f"{prefix}.{name}" if name else prefix for name in tree.labels(of)]
    many = {name for name, count in collections.Counter(names).items() if count > 1}
    # a path tells a key with a dot in it from two keys; names alone don't
    paths = tree.paths(of)
    found = [
        prefix + path if name in many else name for name, path in zip(names, paths, strict=True)
    ]
    if len(set(found)) < len(found):
        twice = [key for key, count in collections.Counter(found).items() if count > 1]
        raise CheckpointError(
            f"several leaves of {prefix} have the key {twice[0]!r}; a checkpoint needs one key per "
            "leaf. Rename one of the dict keys or fields that lead there."
        )
    return found


def placement_of(tensor: Tensor) -> str:
    """How a tensor's values lie on the ranks, for comparing them."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, DTensor):
        return f"{dtype} {shape} whole"
    mesh = tensor.device_mesh.mesh
    return f"{dtype} {shape} {tensor.placements} {tuple(mesh.shape)} {mesh.flatten().tolist()}"


def has_memory(x: Tensor) -> bool:
    """Whether there are values behind a tensor: an engine's parameters at stage 3 have none.

    >>> has_memory(torch.ones(2)), has_memory(torch.ones(0))
    (True, True)
    """
    x = local_tensor(x)
    try:
        return not x.numel() or x.device.type == "meta" or x.untyped_storage().data_ptr() != 0
    except RuntimeError:  # of a storage that torch knows to be none
        return False


def _check_types(
    leaves: Mapping[str, Any], tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]
) -> None:
    bad = [
        f"{key} is a {type(x).__name__}"
        for key, x in leaves.items()
        if key not in tensors and key not in scalars
    ]
    for key, x in tensors.items():
        if x.layout != torch.strided or x.is_quantized or local_tensor(x).device.type == "meta":
            bad.append(f"{key} is a {x.layout} tensor on {local_tensor(x).device}")
        elif not has_memory(x):
            bad.append(f"{key} is a {type(x).__name__} without memory of its own")
    if bad:
        more = f" (and {len(bad) - 8} more)" if len(bad) > 8 else ""
        raise CheckpointError(
            f"{'; '.join(bad[:8])}{more}. A checkpoint holds dense tensors with memory and plain "
            "bool, int, float and str; nothing is pickled. Convert these leaves, or keep them out "
            "of the tree; of an engine save(path, *engine.state), or engine.full_params()."
        )
