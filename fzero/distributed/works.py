"""Collectives over gloo that are waited for with open eyes.

An operation of gloo ends when all ranks have come, or not before its time limit: nothing frees a
thread that waits inside. So these launch as `torch.ops._c10d_functional` does, and keep the work;
whoever waits looks up every second, to see whether the others can still come. Groups of other
backends, and made-up ones, go to torch's own operators.

[Note: whose circle] Several circles may share a process group: a mesh of two axes, and a mesh of
one of them. Who waits must look where its own ranks are, so a caller that knows its circle passes
it; generated code, which knows the group's name alone, waits with the first one.
"""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions

from fzero.distributed import whereabouts
from fzero.distributed.lanes import beside, gloo_lane
from fzero.distributed.mesh import group_of
from fzero.distributed.whereabouts import Circle, circle_on


class Flying(NamedTuple):
    """A result that is on its way.

    Args:
        out: what is there once the work is done.
        work: of the process group.
        circle: the ranks that are waited for.
        own: this rank's part of a sum, which is added to what came.
        came: what comes in memory of its own, and is copied into `out`.
    """

    out: Tensor
    work: Any
    circle: Circle
    own: Tensor | None = None
    came: Tensor | None = None


def all_reduce(x: Tensor, op: str, group: str, circle: Circle | None = None) -> Any:
    """The sum over the group, in new memory; to be given to `wait`."""
    # options are left at torch's defaults, which are those of a sum
    met = _watched(group, circle) if op == "sum" else None
    if met is None:
        return torch.ops._c10d_functional.all_reduce(x, op, group)
    out = x.clone(memory_format=torch.contiguous_format)
    return Flying(out, reduce_in_place(out, *met), met[1])


def all_reduce_(x: Tensor, op: str, group: str, circle: Circle | None = None) -> Any:
    """The sum over the group, written over `x`."""
    met = _watched(group, circle) if op == "sum" else None
    if met is None:
        return torch.ops._c10d_functional.all_reduce_(x, op, group)
    return Flying(x, reduce_in_place(x, *met), met[1])


def all_to_all_single(
    x: Tensor, receives: list[int], sends: list[int], group: str, circle: Circle | None = None
) -> Any:
    """One part to each rank, one from each; `receives` and `sends` are their rows."""
    met = _watched(group, circle)
    if met is None:
        return torch.ops._c10d_functional.all_to_all_single(x, receives, sends, group)
    out = x.new_empty((sum(receives), *x.shape[1:]))
    return Flying(out, exchange_into(out, x, *met, receives, sends), met[1])


def all_gather_into_tensor(x: Tensor, world: int, group: str, circle: Circle | None = None) -> Any:
    """Every rank's tensor, end to end."""
    met = _watched(group, circle)
    if met is None:
        return torch.ops._c10d_functional.all_gather_into_tensor(x, world, group)
    out = x.new_empty((x.shape[0] * world, *x.shape[1:]))
    pg, circle = met
    circle.sent += 1
    return Flying(out, pg._allgather_base(out, x, _timed(AllgatherOptions(), circle)), circle)


def reduce_scatter_tensor(
    x: Tensor, op: str, world: int, group: str, circle: Circle | None = None
) -> Any:
    """This rank's part of the sum.

    Gloo's own is this too, an all-reduce whose rest is thrown away, but torch's work of it waits
    without an end, whatever time it is told.
    """
    met = _watched(group, circle) if op == "sum" else None
    if met is None:
        return torch.ops._c10d_functional.reduce_scatter_tensor(x, op, world, group)
    whole = x.clone(memory_format=torch.contiguous_format)
    out = x.new_empty((x.shape[0] // world, *x.shape[1:]))
    part = whole.view(world, *out.shape)[met[0].rank()]
    return Flying(out, reduce_in_place(whole, *met), met[1], came=part)


def _gather_bucket(x: Tensor, world: int, group: str, circle: Circle | None = None) -> Any:
    """`all_gather_into_tensor`; of two ranks, each sends its own to where the other wants it.

    For buckets alone: gloo tells an all-to-all from an all-gather, and so a rank that has gone
    another way, to an `unshard` say, from one that has come. It aborts where sizes of one kind
    differ.
    """
    met = _watched(group, circle) if world == 2 else None
    if met is None:
        return all_gather_into_tensor(x, world, group, circle)
    out = x.new_empty((x.shape[0] * world, *x.shape[1:]))
    rank = met[0].rank()
    out.view(2, -1)[rank].copy_(x.view(-1))
    return _gather_in_place(out, world, rank, group, circle)


def _gather_in_place(
    buffer: Tensor, world: int, rank: int, group: str, circle: Circle | None = None
) -> Any:
    """The other ranks' parts, written around this rank's own, which is there already.

    Args:
        buffer: dense.
        rank: this rank's number, at whose place its part is.
    """
    parts = buffer.view(world, -1)
    met = _watched(group, circle)
    if met is None:
        gather = torch.ops._c10d_functional.all_gather_into_tensor_out
        return gather(parts[rank], world, group, out=buffer.view(-1))
    pg, circle = met
    if world == 2:
        return Flying(buffer, _swap(parts[1 - rank], parts[rank], pg, circle), circle)
    circle.sent += 1
    options = _timed(AllgatherOptions(), circle)
    return Flying(buffer, pg._allgather_base(buffer, parts[rank], options), circle)


def _reduce_bucket(x: Tensor, op: str, world: int, group: str, circle: Circle | None = None) -> Any:
    """`reduce_scatter_tensor`; of two ranks, each gets the other's part of its own sum."""
    met = _watched(group, circle) if world == 2 and op == "sum" else None
    if met is None:
        return reduce_scatter_tensor(x, op, world, group, circle)
    return _reduce_by_swap(x, *met)


def _reduce_by_swap(x: Tensor, group: ProcessGroup, circle: Circle) -> Flying:
    """Of two ranks, each sends the other its part."""
    out = x.new_empty((x.shape[0] // 2, *x.shape[1:]))
    parts = x.view(2, *out.shape)
    own, others = parts[group.rank()], parts[1 - group.rank()]
    return Flying(out, _swap(out, others, group, circle), circle, own)


def _reduce_apart(
    x: Tensor, op: str, world: int, group: str, exchanged: bool, circle: Circle | None = None
) -> Any:
    """A bucket's reduction beside gathers: see [Note: two lanes].

    Args:
        exchanged: send parts, which are still to be summed.
    """

    def gather(number: int) -> list[int]:
        mine = torch.tensor([number], device=x.device)
        return wait(all_gather_into_tensor(mine, world, group, circle)).tolist()

    met = _watched(group, circle)
    if met is None:
        lane = beside(group, x.device, gather)
        if not exchanged:
            return reduce_scatter_tensor(x, op, world, lane)
        parts = [x.numel() // world] * world
        return all_to_all_single(x, parts, parts, lane)
    if not exchanged and world > 2:  # gloo's own would be an all-reduce: see `buckets`
        return reduce_scatter_tensor(x, op, world, group, circle)
    lane = gloo_lane(*met, gather)
    if exchanged:
        out = torch.empty_like(x)
        return Flying(out, exchange_into(out, x, lane, met[1]), met[1])
    return _reduce_by_swap(x, lane, met[1])


LAUNCHES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_c10d_functional::all_reduce": all_reduce,
        "_c10d_functional::all_to_all_single": all_to_all_single,
        "_c10d_functional::all_gather_into_tensor": _gather_bucket,
        "fzero::gather_in_place": _gather_in_place,
        "_c10d_functional::reduce_scatter_tensor": _reduce_bucket,
        "fzero::reduce_apart": _reduce_apart,
    }
)
"""What launches a bucket, by the name of torch's operator that carries it."""


def wait(flying: Any) -> Tensor:
    """The result of one of the above.

    Raises:
        RankMismatchError: a rank is gone, elsewhere, or late beyond the limit.
    """
    if not isinstance(flying, Flying):
        return torch.ops._c10d_functional.wait_tensor(flying)
    finish(flying.work, flying.circle)
    if flying.came is not None:
        flying.out.copy_(flying.came)
    if flying.own is not None:
        flying.out.add_(flying.own)
    return flying.out


def finish(work: Any, circle: Circle) -> None:
    """Return once `work` is done.

    That a wait timed out says nothing: the work may have ended since. Only the work is asked.
    """
    if circle.alone:
        work.wait()
        return
    seconds, started = whereabouts.PATIENCE, time.monotonic()
    while True:
        try:
            work.wait(timedelta(seconds=seconds))
            return
        except RuntimeError:  # the wait's own end, or the work's: torch has one class for both
            if work.is_completed():
                with circle.explained(certain=True):
                    work.wait()  # with the error that it ended with, if it did
                return
        circle.look(time.monotonic() - started)
        seconds = circle.pause()


def reduce_in_place(x: Tensor, group: ProcessGroup, circle: Circle) -> Any:
    """Launch a sum over the group; the work."""
    circle.sent += 1  # before it starts: what fails half-way counts, too
    return group.allreduce([x], _timed(dist.AllreduceOptions(), circle))


def exchange_into(
    out: Tensor,
    x: Tensor,
    group: ProcessGroup,
    circle: Circle,
    receives: list[int] | None = None,
    sends: list[int] | None = None,
) -> Any:
    """Launch an all-to-all; the work."""
    circle.sent += 1
    options = _timed(dist.AllToAllOptions(), circle)
    return group.alltoall_base(out, x, receives or [], sends or [], options)


def _swap(out: Tensor, x: Tensor, group: ProcessGroup, circle: Circle) -> Any:
    """Launch sending `x` to the other of two ranks, and receiving what it sends; the work."""
    rows = [0, 0]
    rows[1 - group.rank()] = out.shape[0]
    return exchange_into(out, x, group, circle, rows, rows)


def to_first(out: Tensor, x: Tensor, group: ProcessGroup, circle: Circle) -> None:
    """On the group's first rank, fill the rows of `out` with every rank's `x`; over gloo."""
    circle.sent += 1
    rows = [list(out.unbind())] if group.rank() == 0 else []
    finish(group.gather(rows, [x], _timed(dist.GatherOptions(), circle)), circle)


def from_first(x: Tensor, group: ProcessGroup, circle: Circle) -> None:
    """Overwrite `x` with what the group's first rank holds there; over gloo."""
    circle.sent += 1
    finish(group.broadcast([x], _timed(dist.BroadcastOptions(), circle)), circle)


def collect(parts: list[Tensor], mine: Tensor, group: ProcessGroup, circle: Circle) -> None:
    """Fill `parts` with every rank's tensor."""
    circle.sent += 1
    work = group.allgather([parts], [mine], _timed(AllgatherOptions(), circle))
    settle(work, mine, circle)


def settle(work: Any, x: Tensor, circle: Circle) -> None:
    """`finish` for a work on the host; of one on a device a stream waits, not the host."""
    if x.device.type == "cpu":
        finish(work, circle)
    else:
        work.wait()


def _watched(group: str, own: Circle | None) -> tuple[ProcessGroup, Circle] | None:
    """The group of this name, and the circle to wait with; None unless gloo carries it."""
    pg = group_of(group)
    first = circle_on(pg)
    # None also for gloo groups that no circle was made on: torch's own operators wait for those
    return None if first is None else (pg, own or first)


def _timed(options: Any, circle: Circle) -> Any:
    # Gloo's thread gives up by itself at this time, also where nobody waits for the work. A group's
    # own time won't do: that of a mesh's is half an hour, whatever init_process_group was told.
    options.timeout = timedelta(seconds=circle.time_limit)
    return options
