"""Collectives as transposed pairs of differentiable functions.

Each function is linear, and its backward is its transpose:

    forward          backward
    all_gather       reduce_scatter (sum)
    reduce_scatter   all_gather
    all_reduce       all_reduce
    replicate        sum                (identity forward: the same value is used by every rank)
    as_whole         a share            (identity forward: ranks have computed the same value)

A *whole* value, which is one and the same on every rank, has one cotangent too: the transpose of
summing the uses of a whole value is to replicate, not to sum once more. `all_reduce` takes and
gives each rank's own values.

They work eagerly, under `torch.func.grad`/`vjp`/`jvp`, nested (second order), and under `make_fx`.
Every one is recorded as a single operator of the `fzero` namespace that carries the leaf's name, so
that a Program's passes find collectives by what they are, never by shape or position.

Unlike `torch.distributed._functional_collectives`, whose differentiable forms refuse `torch.func`
("must override setup_context") and give a zero tangent under `jvp`.
"""

# What autograd passes to backward and jvp depends on forward; torch types them for no argument.
# pyright: reportIncompatibleMethodOverride=false

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fzero.distributed import works
from fzero.distributed.mesh import Axis
from fzero.layout import Home, LeafLayout
from fzero.operators import define


def all_gather(shard: Tensor, leaf: LeafLayout, axis: Axis) -> Tensor:
    """The full leaf from every rank's shard; its gradient is summed and scattered back.

    Args:
        shard: this rank's part, `leaf.shard_shape(axis.rank)`, in `leaf.dtype`.
        leaf: how the leaf is split. A leaf that is kept whole is only replicated.
        axis: the ranks it is split over.

    Returns:
        `leaf.shape`, in the compute dtype; never a view of `shard` if `axis.size > 1`.

    Examples:
        >>> leaf = LeafLayout("w", (4, 2), torch.float32, dim=0)
        >>> all_gather(torch.ones(4, 2), leaf, Axis()).shape
        torch.Size([4, 2])
    """
    return _AllGather.apply(shard, leaf, axis)


def reduce_scatter(full: Tensor, leaf: LeafLayout, axis: Axis) -> Tensor:
    """This rank's shard of the sum of `full` over the axis.

    Args:
        full: `leaf.shape`, any floating dtype; reduced in `leaf.reduce` if that is set.

    Returns:
        `leaf.shard_shape(axis.rank)`, in the dtype it was reduced in.
    """
    return _ReduceScatter.apply(full, leaf, axis)


def all_reduce(x: Tensor, axis: Axis, name: str = "") -> Tensor:
    """The sum of `x` over the axis, on every rank. Its own transpose."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis, name)


def replicate(x: Tensor, axis: Axis, name: str = "") -> Tensor:
    """`x`, which every rank of the axis holds and uses: gradients of the uses are summed."""
    return x if axis.size == 1 else _Replicate.apply(x, axis, name)


def as_whole(x: Tensor, axis: Axis) -> Tensor:
    """`x`, which every rank of the axis has computed alike, as one whole value.

    The mean of equal values, without a message; its transpose gives each rank an equal share.
    """
    return x if axis.size == 1 else _AsWhole.apply(x, axis)


def exchange(
    x: Tensor,
    receives: Sequence[int],
    sends: Sequence[int],
    axis: Axis,
    names: Sequence[str],
    numel: int,
) -> Tensor:
    """A part of `x` for each rank of the axis, and one from each. It has no derivative.

    Args:
        x: one dim; `sends[i]` elements for rank i, one part after another.
        receives: elements that come from each rank.
        sends: elements that go to each rank.
        axis: of more than one rank.
        names: leaves whose parts travel, for listings; the same on every rank.
        numel: elements of these leaves, the same on every rank.

    Returns:
        One dim: what came, by rank.
    """
    return torch.ops.fzero.exchange(
        x, list(receives), list(sends), axis.size, axis.group, ", ".join(names), axis.rank, numel
    )


def _linear(forward: Callable[..., Tensor], transpose: Callable[..., Tensor]) -> type[Function]:
    """A linear function of its first argument, as a Function: its jvp is itself.

    Args:
        forward: the function; what follows its first argument is no tensor.
        transpose: what backward makes of a cotangent, with the same further arguments.
    """

    class Linear(Function):
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.rest = inputs[1:]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return (transpose(grad, *ctx.rest), *(None for _ in ctx.rest))

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
            return Linear.apply(tangent, *ctx.rest)

    Linear.forward = staticmethod(forward)  # pyright: ignore[reportAttributeAccessIssue]
    Linear.__name__ = Linear.__qualname__ = forward.__name__  # that of its node in autograd's graph
    return Linear


def _all_gather(shard: Tensor, leaf: LeafLayout, axis: Axis) -> Tensor:
    low = shard.to(leaf.compute) if leaf.compute else shard
    if leaf.dim is None or axis.size == 1:
        # a Function that gives its argument back must give another tensor
        return low.view_as(low)
    return gather_leaf(low, leaf, axis)


def dense(grad: Tensor) -> Tensor:
    """A gradient that collectives and sums take; that of `Embedding(sparse=True)` is not dense.

    >>> dense(torch.ones(2).to_sparse())
    tensor([1., 1.])
    """
    return grad if grad.layout == torch.strided else grad.to_dense()


def _scattered(full: Tensor, leaf: LeafLayout, axis: Axis) -> Tensor:
    full = dense(full)
    high = full.to(leaf.reduce) if leaf.reduce else full
    if axis.size == 1:
        return high.view_as(high)
    if leaf.dim is None:
        return torch.ops.fzero.all_reduce(high, axis.size, axis.group, leaf.name)
    return torch.ops.fzero.reduce_scatter(high, *_op_args(leaf, axis))


def _summed(x: Tensor, axis: Axis, name: str) -> Tensor:
    return torch.ops.fzero.all_reduce(x, axis.size, axis.group, name)


def _same(x: Tensor, *_: object) -> Tensor:
    return x.view_as(x)


_AllGather = _linear(
    _all_gather,
    # summed in `leaf.reduce`: only the sum is rounded to the shard's own dtype
    lambda grad, leaf, axis: _ReduceScatter.apply(grad, leaf, axis).to(leaf.dtype),
)
_ReduceScatter = _linear(_scattered, lambda grad, *rest: _AllGather.apply(grad, *rest))
_AllReduce = _linear(_summed, lambda grad, *rest: _AllReduce.apply(grad, *rest))
# not _AllReduce: the sum is a whole value, whose transpose must not sum once more
_Replicate = _linear(_same, lambda grad, *rest: _SumOfUses.apply(grad, *rest))
_SumOfUses = _linear(_summed, lambda grad, *rest: _Replicate.apply(grad, *rest))
# not the division alone: every rank uses the cotangent, which is one whole value itself
_AsWhole = _linear(_same, lambda grad, axis: _Replicate.apply(grad, axis, "") / axis.size)


# ---------------------------------------------------------------------------------- operators
_TOLD: ContextVar[Callable[[str], None] | None] = ContextVar("fzero_told", default=None)


@contextlib.contextmanager
def told_to(hear: Callable[[str], None]) -> Iterator[None]:
    """Tell of each collective inside that runs by itself, just before it does.

    Args:
        hear: returns once all ranks are known to run it next, or raises: gloo ends the process
            where ranks come with buffers of other sizes.
    """
    token = _TOLD.set(hear)
    try:
        yield
    finally:
        _TOLD.reset(token)


def _tell(kind: str, leaf: str) -> None:
    if hear := _TOLD.get():
        hear(f"{kind} of {leaf}")


def _op_args(leaf: LeafLayout, axis: Axis) -> tuple[list[int], int, int, str, str, int, list[int]]:
    assert leaf.dim is not None
    home = list(leaf.home or ())
    return list(leaf.shape), leaf.dim, axis.size, axis.group, leaf.name, axis.rank, home


def leaf_of(
    x: Tensor, shape: Sequence[int], dim: int, world: int, leaf: str, home: Sequence[int]
) -> LeafLayout:
    """The leaf that an operator of one leaf is about, from its arguments."""
    return LeafLayout(leaf, tuple(shape), x.dtype, dim, world, home=Home(*home) if home else None)


def gather_leaf(shard: Tensor, leaf: LeafLayout, axis: Axis) -> Tensor:
    """All ranks' shards of a leaf that is split, as one operator; it has no derivative."""
    return torch.ops.fzero.gather(shard, *_op_args(leaf, axis))


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """`x` filled up with zero rows (dim 0) to `rows`; `x` itself if it has them."""
    return x if x.shape[0] == rows else torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def as_wire(x: Tensor) -> Tensor:
    """A contiguous view in a dtype that all backends move (gloo knows no bool, complex or fp8)."""
    x = x.contiguous()
    if x.dtype in _WIRE_DTYPES:
        return x
    # a dim of one row is contiguous with any stride, and a view in bytes takes no stride but 1
    dense = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, dense).view(torch.uint8)


_WIRE_DTYPES = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    + [torch.int8, torch.uint8, torch.int32, torch.int64]
)


def _gather(
    shard: Tensor,
    shape: list[int],
    dim: int,
    world: int,
    group: str,
    leaf: str,
    rank: int,
    home: list[int],
) -> Tensor:
    _tell("all_gather", leaf)
    layout = leaf_of(shard, shape, dim, world, leaf, home)
    rows = layout.padded_rows
    send = pad_rows(shard.movedim(dim, 0), rows).contiguous()
    full = works.wait(works.all_gather_into_tensor(as_wire(send), world, group)).view(send.dtype)
    if home:  # any rank may have fewer rows than the rest
        parts = full.view(world, rows, *shape[1:])
        ends = map(layout.bounds, range(world))
        return torch.cat([x[: stop - start] for x, (start, stop) in zip(parts, ends, strict=True)])
    full = full.narrow(0, 0, shape[dim]).movedim(0, dim)
    # as `_fake_gather` says: see [Note: strides are part of a value]
    return full.contiguous()


def _reduce_scatter(
    full: Tensor,
    shape: list[int],
    dim: int,
    world: int,
    group: str,
    leaf: str,
    rank: int,
    home: list[int],
) -> Tensor:
    _tell("reduce_scatter", leaf)
    layout = leaf_of(full, shape, dim, world, leaf, home)
    rows, front = layout.padded_rows, full.movedim(dim, 0)
    if home:
        send = torch.cat([pad_rows(layout.split(front, i), rows) for i in range(world)])
    else:
        send = pad_rows(front, rows * world).contiguous()
    padded = works.wait(works.reduce_scatter_tensor(send, "sum", world, group))
    start, stop = layout.bounds(rank)
    return padded.narrow(0, 0, stop - start).movedim(0, dim).contiguous()


def _all_reduce(x: Tensor, world: int, group: str, leaf: str) -> Tensor:
    _tell("all_reduce", leaf)
    return works.wait(works.all_reduce(x.contiguous(), "sum", group))


def _exchange(
    x: Tensor,
    receives: list[int],
    sends: list[int],
    world: int,
    group: str,
    leaves: str,
    rank: int,
    numel: int,
) -> Tensor:
    _tell("all_to_all", leaves)
    parts = works.all_to_all_single(x.contiguous(), list(receives), list(sends), group)
    return works.wait(parts)


def _boundary(loss: Tensor) -> Tensor:
    # a copy: an operator whose schema tells of no alias must not return its argument
    return loss.clone()


def _phase(name: str) -> None:
    return None


def _fake_gather(shard: Tensor, shape: list[int], *_: object) -> Tensor:
    return shard.new_empty(shape)


def _gather_in_place(buffer: Tensor, world: int, rank: int, group: str) -> Tensor:
    # in new memory: an operator whose schema tells of no alias must not return its argument
    own = buffer.view(world, -1)[rank]
    return works.wait(works.all_gather_into_tensor(own, world, group))


def _reduce_apart(buffer: Tensor, op: str, world: int, group: str, exchanged: bool) -> Tensor:
    """In the group itself: its own one is for who runs a Program; see `works`."""
    c10d = torch.ops._c10d_functional
    if not exchanged:
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(buffer, op, world, group))
    parts = [buffer.numel() // world] * world
    return c10d.wait_tensor(c10d.all_to_all_single(buffer, parts, parts, group))


def _fake_reduce_apart(buffer: Tensor, op: str, world: int, group: str, exchanged: bool) -> Tensor:
    return buffer.new_empty(buffer.numel() if exchanged else buffer.numel() // world)


def _fake_gather_in_place(buffer: Tensor, *_: object) -> Tensor:
    # what comes is written around what is there: the walk over memory counts one buffer
    return buffer.view(-1)


def _fake_reduce_scatter(
    full: Tensor,
    shape: list[int],
    dim: int,
    world: int,
    group: str,
    leaf: str,
    rank: int,
    home: list[int],
) -> Tensor:
    return full.new_empty(leaf_of(full, shape, dim, world, leaf, home).shard_shape(rank))


def _fake_same(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_exchange(x: Tensor, receives: list[int], *_: object) -> Tensor:
    return x.new_empty(sum(receives))


# home: as `layout.Home` has it, or empty
_LEAF = "int[] shape, int dim, int world, str group, str leaf, int rank, int[] home"
define(f"gather(Tensor shard, {_LEAF}) -> Tensor", _gather, _fake_gather)
define(f"reduce_scatter(Tensor full, {_LEAF}) -> Tensor", _reduce_scatter, _fake_reduce_scatter)
define("all_reduce(Tensor x, int world, str group, str leaf) -> Tensor", _all_reduce, _fake_same)
# of a bucket: a buffer in which this rank's own part lies where it belongs
define(
    "gather_in_place(Tensor buffer, int world, int rank, str group) -> Tensor",
    _gather_in_place,
    _fake_gather_in_place,
)
# of a bucket: what carries its sums, or the parts that are still to be summed
define(
    "reduce_apart(Tensor buffer, str op, int world, str group, bool exchanged) -> Tensor",
    _reduce_apart,
    _fake_reduce_apart,
)
# parts of several leaves, of other sizes for every pair of ranks
define(
    "exchange(Tensor x, int[] receives, int[] sends, int world, str group, str leaves, "
    "int rank, int numel) -> Tensor",
    _exchange,
    _fake_exchange,
)
# where forward ends: an identity that survives every retrace of a graph
define("boundary(Tensor loss) -> Tensor", _boundary, _fake_same)
# what begins here; a Program's runner leaves it out
define("phase(str name) -> ()", _phase, _phase)


class _Boundary(Function):
    @staticmethod
    def forward(loss: Tensor) -> Tensor:
        return torch.ops.fzero.boundary(loss)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def boundary(loss: Tensor) -> Tensor:
    """`loss`; what a Program runs after this point is its backward."""
    return _Boundary.apply(loss)


def phase(name: str) -> None:
    """What a Program runs after this point is its "forward" or its "update"."""
    torch.ops.fzero.phase(name)
