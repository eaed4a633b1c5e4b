"""Trees as flat dicts of tensors: `{"params.block.0.weight": tensor}`, and the way back.

[Note: canonical values] A parameter is stored once, under its own name, in the highest precision
that there is: at stages 1 and 2 with a low `Precision.param` that is the master, and the parameters
that the model computes with are its rounded copy, or what somebody wrote there since, which counts
(see [Note: masters follow]). So a checkpoint looks the same whichever stage wrote it, and every
stage reads it back without loss. So it is with each state in a tree of several, those of a GAN's
two engines: its masters are of the parameters at its own place.
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
from fzero.errors import CheckpointError, FzeroError
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
        buffers: keys of model state.
        rebuild: from scalars by key to `(params, opt_state)` with these very tensors.
    """

    tensors: dict[str, Tensor]
    rounded: dict[str, Tensor]
    scalars: dict[str, Scalar]
    buffers: frozenset[str]
    rebuild: Callable[[Mapping[str, Scalar]], tuple[PyTree, PyTree]]


def flatten(params: PyTree, opt_state: PyTree) -> Flat:
    """All leaves of a checkpoint, by key. Metrics are none: the next step makes new ones.

    Args:
        params: pytree of tensors, or None.
        opt_state: an `OptState`, any other pytree, which may have some in it, or None.

    Raises:
        CheckpointError: leaves that are neither tensors nor plain Python values; all are named.
            Or the keys of two leaves are the same.

    >>> list(flatten({"w": torch.ones(2)}, {"mu": [torch.zeros(2)], "lr": 0.1}).tensors)
    ['params.w', 'opt_state.mu.0']
    """
    leaves: dict[str, Any] = {}
    # a master goes by its parameter's key: a checkpoint has one value for both
    high = tree.map_nodes(OptState, lambda state: state.master, opt_state, alone=True)
    pairs = zip(keys("params", high), tree.leaves(high), strict=True)
    masters = dict(zip(tree.paths(high), pairs, strict=True))
    rest = without_masters(opt_state)
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
    if twice := [key for key, _ in masters.values() if key in leaves]:
        raise CheckpointError(_TWICE.format("params and their masters", twice[0]))
    leaves |= dict(masters.values())  # where there are no params the masters stand for them
    leaves |= dict(zip(state_keys, state_leaves, strict=True))
    tensors = {key: x for key, x in leaves.items() if isinstance(x, Tensor)}
    scalars = {key: x for key, x in leaves.items() if isinstance(x, Scalar)}
    _check_types(leaves, tensors, scalars)

    def rebuild(new: Mapping[str, Scalar]) -> tuple[PyTree, PyTree]:
        def of(keys: list[str], old: list[Any], spec: tree.Spec) -> PyTree:
            return tree.unflatten(spec, [new.get(key, x) for key, x in zip(keys, old, strict=True)])

        state = of(state_keys, state_leaves, state_spec)
        # masters were filled in place, under the keys of the parameters
        state = tree.map_nodes(OptState, _with_masters, state, opt_state)
        return of(param_keys, param_leaves, param_spec), state

    return Flat(tensors, rounded, scalars, _buffers(rest), rebuild)


def without_masters(opt_state: PyTree) -> PyTree:
    """What of a state has keys of its own: no masters, and no metrics."""
    return tree.map_nodes(OptState, lambda x: x._replace(master=None, metrics={}), opt_state)


def _with_masters(state: OptState, old: OptState) -> OptState:
    return state._replace(master=old.master)


def _buffers(opt_state: PyTree) -> frozenset[str]:
    def alone(state: OptState) -> PyTree:
        return state._replace(step=None, inner=None, loss_scale=None)  # pyright: ignore

    return frozenset(keys("opt_state", tree.map_nodes(OptState, alone, opt_state, alone=True)))


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
        raise CheckpointError(_TWICE.format(prefix, twice[0]))
    return found


_TWICE = (
    "several leaves of {} have the key {!r}; a checkpoint needs one key per leaf. Rename one of "
    "the dict keys or fields that lead there."
)


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
    except (RuntimeError, FzeroError):  # there is none
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
            "of the tree. Of an engine: save(path, *engine.state), and engine.state = load(path, "
            "*engine.state). Of a module: the params of fzero.functionalize(module)."
        )
