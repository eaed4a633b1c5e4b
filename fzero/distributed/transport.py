"""Collectives that run while autograd goes on: launched now, waited for when they are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.distributed import works
from fzero.distributed.buckets import (
    ALL_REDUCE,
    GATHER,
    REDUCE_SCATTER,
    Bucket,
    pack_flat,
    pack_full,
    pack_shards,
    unpack_flat,
    unpack_full,
    unpack_shards,
)
from fzero.distributed.journal import Journal
from fzero.distributed.mesh import Axes, Mesh, is_gloo
from fzero.distributed.whereabouts import circle_of
from fzero.layout import LeafLayout


@dataclass
class Flight:
    """Results that are on their way.

    Args:
        parts: for some indices each, what gives their tensors once it is called; it waits.
        results: those that need no waiting; None where a part brings them.
    """

    parts: list[tuple[list[int], Callable[[], list[Tensor]]]]
    results: list[Any]

    def wait(self) -> list[Tensor]:
        """All results, in the order of what was sent."""
        while self.parts:
            indices, finish = self.parts.pop(0)
            for index, tensor in zip(indices, finish(), strict=True):
                self.results[index] = tensor
        return self.results


class Transport:
    """The collectives of one engine.

    Args:
        mesh: its ranks.
        axes: the same, as the transforms take it.
        journal: told of every collective before it starts.
    """

    def __init__(self, mesh: Mesh, axes: Axes, journal: Journal) -> None:
        self.mesh, self.axes, self.journal = mesh, axes, journal
        self.circle = circle_of(mesh.device_mesh)

    def gather(self, shards: Sequence[Tensor], leaves: Sequence[LeafLayout]) -> Flight:
        """Full leaves in their compute dtypes, from every rank's shards."""
        low: list[Any] = [
            shard.detach().to(leaf.compute or leaf.dtype)
            for shard, leaf in zip(shards, leaves, strict=True)
        ]
        flight = Flight([], low)
        axis = self.axes.shard
        if axis.size == 1:
            return flight
        for indices in _by_dtype(low, [leaf.dim is not None for leaf in leaves]):
            bucket = self._bucket(GATHER, [leaves[i] for i in indices], low[indices[0]].dtype)
            send = pack_shards([low[i] for i in indices], bucket)
            for i in indices:
                low[i] = None
            receive = self._exchange(send, bucket)
            flight.parts.append((indices, lambda r=receive, b=bucket: unpack_full(r(), b)))
        return flight

    def reduce(
        self,
        grads: Sequence[Tensor],
        leaves: Sequence[LeafLayout],
        *,
        scatter: bool,
        before: float,
        after: float,
    ) -> Flight:
        """Gradients summed over all ranks, in the dtypes that they are reduced in.

        Args:
            grads: full; their memory may be written to.
            scatter: return this rank's shards only.
            before, after: factors on the gradients and on their sums.
        """
        pairs = zip(grads, leaves, strict=True)
        high: list[Any] = [grad.to(leaf.reduce or grad.dtype) for grad, leaf in pairs]
        flight = Flight([], high)
        travels = [scatter and self.axes.shard.size > 1 and x.dim is not None for x in leaves]
        for indices in _by_dtype(high, travels):
            bucket = self._bucket(
                REDUCE_SCATTER, [leaves[i] for i in indices], high[indices[0]].dtype
            )
            send = pack_full([high[i] for i in indices], bucket)
            for i in indices:
                high[i] = None
            receive = self._exchange(send if before == 1 else send.mul_(before), bucket)
            flight.parts.append((indices, self._scattered(receive, bucket, after)))
        for indices in _by_dtype(high, [not travel for travel in travels]):
            bucket = self._bucket(ALL_REDUCE, [leaves[i] for i in indices], high[indices[0]].dtype)
            buffer = pack_flat([high[i] for i in indices], bucket)
            for i in indices:
                high[i] = None
            flight.parts.append((indices, self._summed(buffer, bucket, before, after)))
        return flight

    def sum(self, x: Tensor) -> Tensor:
        """`x` summed over all ranks."""
        total = x.clone()
        for i, axis in enumerate(self.axes):
            if axis.size > 1:
                self._wait(self._sum(total, i))
        return total

    def whole(self, shard: Tensor, leaf: LeafLayout) -> Tensor:
        """A full leaf from its shards, in the dtype that they have."""
        return self.gather([shard], [replace(leaf, compute=shard.dtype)]).wait()[0]

    def _bucket(self, kind: str, leaves: list[LeafLayout], dtype: torch.dtype) -> Bucket:
        axis = self.axes.shard
        if kind == ALL_REDUCE and axis.size == 1:
            axis = self.axes.replicate
        exchanged = kind != ALL_REDUCE and is_gloo(axis.group)
        bucket = Bucket(
            kind, tuple(leaves), dtype, axis.size, axis.group, axis.rank, exchanged=exchanged
        )
        self.journal.announce(bucket)
        return bucket

    def _exchange(self, send: Tensor, bucket: Bucket) -> Callable[[], Tensor]:
        """Launch a gather or a reduce-scatter; what waits for its buffer."""
        if not bucket.exchanged:
            if bucket.kind == GATHER:
                flying = works.all_gather_into_tensor(send, bucket.world, bucket.group)
            else:
                flying = works.reduce_scatter_tensor(send, "sum", bucket.world, bucket.group)
            return lambda: works.wait(flying)
        received = torch.empty_like(send)
        work = works.exchange_into(received, send, self._group(0), self.circle)

        def finish() -> Tensor:
            self._wait(work)
            return received

        return finish

    def _scattered(
        self, receive: Callable[[], Tensor], bucket: Bucket, after: float
    ) -> Callable[[], list[Tensor]]:
        def finish() -> list[Tensor]:
            part = receive()
            if bucket.exchanged:
                part = part.view(bucket.world, -1).sum(0)
            if self.axes.replicate.size > 1:
                self._wait(self._sum(part, 1))
            part = part if after == 1 else part.mul_(after)
            return unpack_shards(part, replace(bucket, exchanged=False))

        return finish

    def _summed(
        self, buffer: Tensor, bucket: Bucket, before: float, after: float
    ) -> Callable[[], list[Tensor]]:
        """Launch an all-reduce over the first axis; the second one's follows when waited for."""
        if before != 1:
            buffer.mul_(before)
        axes = [i for i, axis in enumerate(self.axes) if axis.size > 1]
        launched = [self._sum(buffer, i) for i in axes[:1]]

        def finish() -> list[Tensor]:
            for work in launched:
                self._wait(work)
            for i in axes[1:]:
                self._wait(self._sum(buffer, i))
            return unpack_flat(buffer if after == 1 else buffer.mul_(after), bucket)

        return finish

    def _group(self, axis: int) -> dist.ProcessGroup:
        """The group of the shard axis (0) or of the replicate axis (1)."""
        mesh = self.mesh.device_mesh
        return mesh.get_group(mesh.ndim - 1 - axis)

    def _sum(self, x: Tensor, axis: int) -> Any:
        """Launch a sum over one axis, in place."""
        return works.reduce_in_place(x, self._group(axis), self.circle)

    def _wait(self, work: Any) -> None:
        if self.circle.counted:
            works.finish(work, self.circle)
        else:
            work.wait()  # a stream waits, not the host


def _by_dtype(tensors: Sequence[Any], wanted: Sequence[bool]) -> list[list[int]]:
    """Places of the wanted tensors, those of one dtype together."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, (tensor, want) in enumerate(zip(tensors, wanted, strict=True)):
        if want:
            groups.setdefault(tensor.dtype, []).append(i)
    return list(groups.values())
