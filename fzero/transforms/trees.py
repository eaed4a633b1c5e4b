"""Arithmetic on trees of shards: each number as if the leaves were whole."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero.config import Config
from fzero.distributed.collectives import all_reduce, replicate
from fzero.distributed.dtensor import from_local_like, local_tensor, settled, whole_tensor
from fzero.distributed.mesh import Mesh
from fzero.distributed.ragged import rows_of
from fzero.errors import ConfigError, ShardError, shown
from fzero.functional.uncompiled import never_compiled, not_compiled_alone
from fzero.layout import LeafLayout
from fzero.numerics.rounding import random_bits
from fzero.optim.foreach import by_group, cast_like
from fzero.transforms.parts import Part, mesh_of, opened
from fzero.transforms.whole import WholeLeaves
from fzero.tree import PyTree


@never_compiled
def tree_map(fn: Callable[..., Any], values: PyTree, *rest: PyTree) -> PyTree:
    """`fn` on every leaf, and on the leaves of `rest` at the same places.

    Leaves that are shards are `DTensor`s: what `fn` computes is that of the whole leaf, and so is
    what it reads (`float(x.sum())`), which every rank must do.

    Raises:
        ConfigError: `fn` is no function.
        ShardError: one of `rest` has another structure.

    Examples:
        >>> import fzero
        >>> ema, params = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> fzero.tree_map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)
        {'w': tensor([0.1000, 0.1000])}
    """
    if not callable(fn):
        raise ConfigError(
            f"tree_map(fn, tree, ...): the function comes first, and is a {type(fn).__name__} here."
        )
    leaves, spec = tree.flatten(values)
    try:
        columns = [spec.flatten_up_to(other) for other in rest]
    except ValueError:
        found = " and ".join(str(tree.paths(x)[:5]) for x in (values, *rest))
        raise ShardError(
            f"tree_map: the trees have the leaves {found}; those behind the first must have its "
            "structure. Where one has more, take its part of the other's: {name: more[name] for "
            "name in fewer}."
        ) from None
    with ReadWhole(), WholeLeaves() as whole:
        made = whole.renewed(tree.unflatten(spec, list(map(fn, leaves, *columns))))
    # of what is staged out sums are added before they travel, and settled where they are needed
    return made if get_proxy_mode() is not None else tree.map(settled, made)


@never_compiled
def tree_vdot(a: PyTree, b: PyTree) -> Tensor:
    """The inner product of two trees, as if each were one vector.

    Args:
        a, b: trees of floating tensors of one structure, which live alike: shards of shards.
            Leaves that every rank holds whole count once.

    Returns:
        0-d, the same on every rank: float64 if any leaf is, float32 otherwise. Of leaves that an
        outer function has gathered: this rank's own.

    Raises:
        ShardError: the trees differ in structure, shapes, or in how they live.

    Examples:
        >>> import fzero
        >>> a = fzero.shard({"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)})
        >>> fzero.tree_vdot(a, a)
        tensor(14.)
    """
    left, right = _flat("a", a), _flat("b", b)
    if left[1] != right[1]:
        raise ShardError(
            f"tree_vdot: a has the leaves {tree.paths(a)[:5]} and b {tree.paths(b)[:5]}; both "
            "must have one structure."
        )
    whole: list[Tensor] = []
    split: list[Tensor] = []
    mesh: Mesh | None = None
    dtypes = set()
    for x, y, path in zip(left[0], right[0], tree.paths(a), strict=True):
        one, other = _own(x), _own(y)
        if one.shape != other.shape or _place(x) != _place(y):
            raise ShardError(
                f"tree_vdot: a{path} and b{path} live in different ways ({_told(x)}, {_told(y)}); "
                "fzero.shard(tree, cfg) puts both where they belong."
            )
        dtypes |= {one.dtype, other.dtype}
        # in double: a sum of many small products loses nothing that float32 could show
        product = (one.conj().to(_wide(one)) * other.to(_wide(other))).sum()
        if _split(x) is None:
            whole.append(product)
        else:
            split.append(product)
            mesh = mesh or _mesh(x)
    found = torch.stack(whole).sum() if whole else None
    if split:
        assert mesh is not None
        shares = all_reduce(torch.stack(split).sum(), mesh.axes.shard, "vdot")
        found = shares if found is None else shares + found
    if found is None:
        return torch.zeros((), device="cpu")
    if found.is_complex():
        return found
    return found if torch.float64 in dtypes else found.float()


@never_compiled
def tree_norm(values: PyTree) -> Tensor:
    """The 2-norm of a tree, as if it were one vector; as `tree_vdot`.

    Examples:
        >>> import fzero
        >>> fzero.tree_norm({"w": torch.tensor([3.0]), "b": torch.tensor(4.0)})
        tensor(5.)
    """
    return tree_vdot(values, values).real.sqrt()


@never_compiled
def tree_random_like(values: PyTree, seed: int | Tensor, distribution: str = "normal") -> PyTree:
    """A tree of random numbers that lives as `values` does.

    The numbers are a hash of (seed, name of the leaf, element of the whole leaf): the same at every
    world and stage, on every rank that holds the element.

    Args:
        values: tree of floating tensors, shards or whole.
        seed: of the whole tree; a 0-d int64 tensor where each call of a staged-out function is to
            have another one.
        distribution: "normal", "uniform" in (0, 1), or "rademacher": 1 or -1.

    Raises:
        ConfigError: another distribution, or another seed.
        ShardError: a leaf is no floating tensor.

    Examples:
        >>> import fzero
        >>> full = {"w": torch.zeros(4)}
        >>> a, b = fzero.tree_random_like(full, 0), fzero.tree_random_like(fzero.shard(full), 0)
        >>> torch.equal(a["w"], b["w"].full_tensor())
        True

    References:
        Box and Muller, A Note on the Generation of Random Normal Deviates, 1958.
    """
    if distribution not in _DISTRIBUTIONS:
        raise ConfigError(
            f"tree_random_like: distribution={distribution!r}; one of {sorted(_DISTRIBUTIONS)}."
        )
    counter = _counter(seed)
    values = tree.map(settled, values)
    found = opened(values, Config(), "values")
    rank = found.mesh.shard_rank
    drawn = []
    for x, leaf, path in zip(found.values, found.layout, found.paths, strict=True):
        if not x.is_floating_point():
            raise ShardError(f"tree_random_like: values{path} is {x.dtype}; it must be floating.")
        numbers = _numbers(distribution, counter, leaf, x, None if leaf.dim is None else rank)
        drawn.append(numbers.to(x.dtype))
    leaves = [
        Part(x, old.leaf, old.spec, old.mesh) if isinstance(old, Part) else from_local_like(x, old)
        for x, old in zip(drawn, tree.leaves(values), strict=True)
    ]
    return tree.unflatten(found.spec, leaves)


def _counter(seed: Any) -> Tensor:
    """A seed as a tensor."""
    kind = shown(seed)
    if isinstance(seed, Tensor):
        if seed.dim() == 0 and seed.dtype == torch.int64:
            return seed
        kind = f"a {seed.dtype} tensor of shape {tuple(seed.shape)}"
    elif (
        not isinstance(seed, bool)
        and hasattr(seed, "__index__")
        and -(2**63) <= (number := operator.index(seed)) < 2**63
    ):
        return torch.tensor(number, device="cpu")
    raise ConfigError(
        f"tree_random_like: seed is {kind}; it must be an int of 64 bits or a 0-d int64 tensor. "
        "Pass the number of the step, opt_state.step, or a constant."
    )


@never_compiled
def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """`params + updates`, leaf by leaf, in the params' dtypes; None in `updates` changes nothing.

    Args:
        params: tree of tensors, shards or whole.
        updates: from an optimizer's `update`.

    Raises:
        ShardError: an update has no parameter, or another shape than its parameter.

    Examples:
        >>> import fzero
        >>> fzero.apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -0.5])})
        {'w': tensor([1.5000, 0.5000])}
    """
    params, updates = tree.map(settled, params), tree.map(settled, updates)
    leaves, spec = tree.flatten(params)
    paths = tree.paths(params)
    by_path = dict(zip(tree.paths(updates), tree.leaves(updates), strict=True))
    if extra := [path for path in by_path if path not in set(paths)]:
        raise ShardError(
            f"apply_updates: updates{extra[0]} has no parameter; updates have the structure of the "
            "parameters that they were made for."
        )
    rows = [i for i, path in enumerate(paths) if path in by_path]
    for i in rows:
        if by_path[paths[i]].shape != leaves[i].shape:
            raise ShardError(
                f"apply_updates: updates{paths[i]} has shape {tuple(by_path[paths[i]].shape)} and "
                f"its parameter {tuple(leaves[i].shape)}."
            )

    def kernel(ours: list[Tensor], changes: list[Tensor]) -> tuple[list[Tensor]]:
        return (list(torch._foreach_add(ours, cast_like(changes, ours))),)

    (new,) = by_group(
        kernel, [leaves[i] for i in rows], [by_path[paths[i]] for i in rows], outputs=1
    )
    for i, x in zip(rows, new, strict=True):
        leaves[i] = x
    return tree.unflatten(spec, leaves)


class ReadWhole(TorchFunctionMode):
    """What Python reads of a DTensor while it is on is the whole value, the same on every rank.

    A sum that DTensor has left open would be read as this rank's share of it.
    """

    @not_compiled_alone
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS:
            args = tree.map(whole_tensor, args)
        return func(*args, **(kwargs or {}))


# Not `__repr__`: a rank may print alone.
_READS = frozenset(
    (
        *("item", "tolist", "is_nonzero", "allclose", "__contains__"),
        *("__float__", "__int__", "__bool__", "__index__", "__complex__"),
    )
)
_DISTRIBUTIONS = ("normal", "uniform", "rademacher")


def _numbers(
    distribution: str, seed: Tensor, leaf: LeafLayout, x: Tensor, rank: int | None
) -> Tensor:
    first = random_bits(0, seed, leaf, x, rank)
    if distribution == "rademacher":
        return 1.0 - 2.0 * (first & 1)
    # in the middle of its interval: neither 0 nor 1
    unit = (first.double() + (2**31 + 0.5)) / 2**32
    if distribution == "uniform":
        return unit
    angle = (random_bits(1, seed, leaf, x, rank).double() + (2**31 + 0.5)) / 2**32
    return (-2.0 * unit.log()).sqrt() * (2.0 * math.pi * angle).cos()


def _flat(what: str, values: PyTree) -> tuple[list[Any], tree.Spec]:
    leaves, spec = tree.flatten(values)
    for x, path in zip(leaves, tree.paths(values), strict=True):
        if not isinstance(x, (Tensor, Part)):
            raise ShardError(
                f"tree_vdot, tree_norm: {what}{path} is a {type(x).__name__}; pass tensors."
            )
    return [_split_or_whole(x) for x in leaves], spec


def _split_or_whole(x: Any) -> Any:
    """A leaf of which each rank has its own rows, as a layout deals them out, or all of it."""
    if not isinstance(x, DTensor) or rows_of(x) is not None:
        return x
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def _own(x: Any) -> Tensor:
    """A leaf as this rank's own value; see [Note: whose value]."""
    if not isinstance(x, Part):
        return local_tensor(x)
    axes = x.mesh.axes
    value = replicate(x.value, axes.replicate, x.leaf.name)
    return replicate(value, axes.shard, x.leaf.name) if x.leaf.dim is None else value


def _split(x: Any) -> int | None:
    """Along which dim a leaf is split; None: whole."""
    return _place(x)[0]


def _place(x: Any) -> tuple[int | None, Any]:
    """The dim that a leaf is split along, and where in a flat its rows are, if they are in one."""
    if isinstance(x, Part):
        return x.leaf.dim, x.leaf.home and x.leaf.home[1:]
    found = rows_of(x) if isinstance(x, DTensor) else None
    if found is None:
        return None, None
    dim, home = found
    return dim, home and home[1:]


def _mesh(x: Any) -> Mesh:
    return x.mesh if isinstance(x, Part) else mesh_of([x], Config())


def _told(x: Any) -> str:
    return f"{tuple(_own(x).shape)} on this rank, split along dim {_split(x)}"


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64
