"""Collectives of many leaves at once, outside of autograd: launched now, waited for when needed.

What `collectives` does leaf by leaf and differentiably, these do for lists of leaves, one bucket at
a time. A bucket is filled in the order of the list, so the same list always travels in the same
way. The Engine lets autograd go on meanwhile. The eager executor has nothing to do until the
results are there: its transport waits at once, and holds one bucket's buffers at a time.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.distributed import works
from fzero.distributed.buckets import (
    ALL_REDUCE,
    GATHER,
    KINDS,
    REDUCE_SCATTER,
    Bucket,
    bucket_of,
    cut_shards,
    goes_alone,
    launch,
    summed,
)
from fzero.distributed.collectives import dense
from fzero.distributed.journal import Journal
from fzero.distributed.mesh import Axes, Axis, Mesh
from fzero.distributed.whereabouts import circle_of
from fzero.layout import LeafLayout
from fzero.layout.flats import Claims

Finish = Callable[[], list[Tensor]]


class Handle:
    """Results that are on their way.

    Args:
        results: those that need no waiting; others stand in for what comes.
        at_once: whether to wait for each part before the next one is launched.
    """

    def __init__(self, results: list[Any], *, at_once: bool = False) -> None:
        self.results, self.at_once = results, at_once
        self.parts: list[tuple[list[int], Finish]] = []

    def take(self, indices: list[int]) -> list[Tensor]:
        """What goes into a bucket, which from then on is held by whoever sends it alone."""
        taken = [self.results[i] for i in indices]
        for i in indices:
            self.results[i] = None  # or its memory would be held until the results come
        return taken

    def add(self, indices: list[int], finish: Finish) -> None:
        """A part is under way; `finish` waits for it and gives the tensors of these indices."""
        self.parts.append((indices, finish))
        if self.at_once:
            self.wait()

    def wait(self) -> list[Tensor]:
        """All results, in the order of what was sent."""
        while self.parts:
            indices, finish = self.parts.pop(0)  # its closure holds the buffer
            for index, tensor in zip(indices, finish(), strict=True):
                self.results[index] = tensor
        return self.results


class Transport:
    """The collectives of one engine or eager step.

    Args:
        mesh: its ranks.
        axes: the same, as the transforms take it.
        journal: told of every collective before it starts.
        limit: most bytes of full leaves in a bucket, of which each is waited for at once; None: who
            calls has made the buckets, and waits when it needs them.
        gathers: whether leaves are gathered while others are reduced.
    """

    def __init__(
        self,
        mesh: Mesh,
        axes: Axes,
        journal: Journal,
        *,
        limit: int | None = None,
        gathers: bool = False,
    ) -> None:
        self.axes, self.journal, self.limit = axes, journal, limit
        self.circle = circle_of(mesh)
        # the same leaves travel together step after step, and a bucket remembers where they lie
        planned = functools.partial(_planned, axes=axes, limit=limit, gathers=gathers)
        self._planned = functools.lru_cache(_PLANS)(planned)

    def gather(self, shards: Sequence[Tensor], leaves: Sequence[LeafLayout]) -> Handle:
        """Full leaves in their compute dtypes, from every rank's shards.

        Args:
            shards: this rank's part of each leaf, in `leaf.dtype`.
            leaves: how they are split.

        Returns:
            One tensor a leaf. What needs no collective shares the shard's memory.
        """
        # before it travels, not after: half the bytes, and rounded as `collectives.all_gather`
        # rounds
        dtypes = [leaf.compute or leaf.dtype for leaf in leaves]
        low = [_in(shard.detach(), dtype) for shard, dtype in zip(shards, dtypes, strict=True)]
        handle = self._handle(low)
        for bucket, indices in self._buckets(GATHER, dtypes, leaves):
            send = KINDS[GATHER].pack(handle.take(indices), bucket)
            flying = launch(bucket, send, self.circle)
            handle.add(indices, self._gathered(flying, bucket))
        return handle

    def reduce(
        self,
        grads: list[Tensor],
        leaves: Sequence[LeafLayout],
        *,
        scatter: bool,
        before: float = 1,
        after: float = 1,
        over: bool = True,
    ) -> Handle:
        """Gradients summed over all ranks, in the dtypes that they are reduced in.

        Args:
            grads: full; of floating or complex leaves. The list is emptied: each is gone once it is
                in its bucket, unless somebody else has it.
            leaves: how they are split.
            scatter: return this rank's shards only.
            before, after: factors on the gradients and on their sums.
            over: whether their memory may be written to.
        """
        dtypes = [leaf.reduce or grad.dtype for grad, leaf in zip(grads, leaves, strict=True)]
        high = [_in(dense(grad), dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
        grads.clear()
        handle = self._handle(high)
        if self.axes.world == 1:
            assert before == after == 1, "nobody to reduce with"
            return handle
        for bucket, indices in self._buckets(REDUCE_SCATTER, dtypes, leaves, scatter):
            send = _times(_real(KINDS[REDUCE_SCATTER].pack(handle.take(indices), bucket)), before)
            flying = launch(bucket, send, self.circle)
            handle.add(indices, self._scattered(flying, bucket, after))
        # a whole leaf, or a shard of an axis of one rank, has only been left out so far
        for bucket, indices in self._buckets(ALL_REDUCE, dtypes, leaves, scatter):
            buffer = _times(_real(KINDS[ALL_REDUCE].pack(handle.take(indices), bucket)), before)
            handle.add(indices, self._summed(buffer, bucket, after, over=over))
        return handle

    def sum(self, x: Tensor) -> Tensor:
        """`x` summed over all ranks."""
        total = x.clone()
        for axis in self.axes:
            total = self._sum(total, axis)
        return total

    def chosen(self, x: Tensor, *, mine: bool) -> Tensor:
        """The `x` of the one rank that says `mine`, on every rank, in new memory, bit for bit.

        Args:
            x: of one shape and dtype on every rank.
            mine: whether this rank's counts.
        """
        # added up as bytes: 0 + -0.0 is not -0.0, and NaNs have bits
        if not x.numel():
            return x.detach().clone()
        bits = x.detach().reshape(-1).view(torch.uint8)
        total = self.sum(bits if mine else torch.zeros_like(bits))
        return total.view(x.dtype).view(x.shape)

    def whole(self, shard: Tensor, leaf: LeafLayout) -> Tensor:
        """A full leaf from its shards, in the dtype that they have."""
        return self.gather([shard], [replace(leaf, compute=shard.dtype)]).wait()[0]

    def _handle(self, tensors: list[Any]) -> Handle:
        return Handle(tensors, at_once=self.limit is not None)

    def _buckets(
        self,
        kind: str,
        dtypes: Sequence[torch.dtype],
        leaves: Sequence[LeafLayout],
        scatter: bool = True,
    ) -> Iterator[tuple[Bucket, list[int]]]:
        """Buckets of what this kind carries, each announced when asked for, just before it goes.

        A generator: who launches one before asking for the next has the ranks told in the order in
        which the collectives start.
        """
        leaves = leaves if isinstance(leaves, tuple) else tuple(leaves)
        for bucket, indices in self._planned(kind, tuple(dtypes), leaves, scatter):
            self.journal.announce(bucket)
            yield bucket, indices

    def _gathered(self, flying: Any, bucket: Bucket) -> Finish:
        return lambda: KINDS[GATHER].unpack(works.wait(flying), bucket)

    def _scattered(self, flying: Any, bucket: Bucket, after: float) -> Finish:
        def finish() -> list[Tensor]:
            # summed over this axis first: one shard, not one a rank, travels over the other
            part = summed(works.wait(flying), bucket)
            # the factor last, as it is of the whole sum: scaled down before, low dtypes would lose
            # digits
            part = _times(self._sum(part, self.axes.replicate), after)
            return cut_shards(part.view(bucket.dtype).view(-1), bucket)

        return finish

    def _summed(self, buffer: Tensor, bucket: Bucket, after: float, *, over: bool) -> Finish:
        """Launch a sum over the bucket's axis; the other axis's follows when this one is there."""
        flying = launch(bucket, buffer, self.circle, over=over)

        def finish() -> list[Tensor]:
            total = works.wait(flying)
            if self.axes.shard.size > 1:  # else the replicate axis was the bucket's
                total = self._sum(total, self.axes.replicate)
            return KINDS[ALL_REDUCE].unpack(_times(total, after).view(bucket.dtype), bucket)

        return finish

    def _sum(self, x: Tensor, axis: Axis) -> Tensor:
        """The sum over one axis, written over `x`."""
        if axis.size == 1:
            return x
        return works.wait(works.all_reduce_(x, "sum", axis.group, self.circle))


def _planned(
    kind: str,
    dtypes: tuple[torch.dtype, ...],
    leaves: tuple[LeafLayout, ...],
    scatter: bool,
    *,
    axes: Axes,
    limit: int | None,
    gathers: bool,
) -> list[tuple[Bucket, list[int]]]:
    """Which of the tensors that this kind carries travel together, with their indices.

    Args:
        scatter: whether leaves are split that have a part on every rank of the shard axis; what is
            not split is summed by an all-reduce.
    """
    axis = axes.shard
    split = [scatter and axis.size > 1 and leaf.dim is not None for leaf in leaves]
    wanted = [not there for there in split] if kind == ALL_REDUCE else split
    if kind == ALL_REDUCE and axis.size == 1:
        # whole leaves are summed over both axes: where one has a single rank, the other carries
        axis = axes.replicate
    # one dtype a bucket: its buffer has one, and a sum in another would be another sum
    alone = [
        kind != ALL_REDUCE and want and goes_alone(leaf, leaf.numel * dtype.itemsize, axis)
        for leaf, dtype, want in zip(leaves, dtypes, wanted, strict=True)
    ]
    found = []
    for indices in _filled(dtypes, leaves, wanted, alone, limit):
        own = [leaves[i] for i in indices]
        bucket = bucket_of(kind, own, dtypes[indices[0]], axis, gathers=gathers)
        found.append((bucket, indices))
    return found


# Plans of a transport that are kept: an eager step may gather other leaves together in each.
_PLANS = 4096


def _filled(
    dtypes: Sequence[torch.dtype],
    leaves: Sequence[LeafLayout],
    wanted: Sequence[bool],
    alone: Sequence[bool],
    limit: int | None,
) -> Iterator[list[int]]:
    """The indices that share a bucket: of one dtype, up to `limit` bytes or one leaf.

    >>> leaves = [LeafLayout(name, (4,), torch.float32) for name in "abc"]
    >>> list(_filled([torch.float32] * 3, leaves, [True] * 3, [False] * 3, limit=32))
    [[0, 1], [2]]
    """
    open_: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    claims: dict[Any, Claims] = {}
    for i, (dtype, leaf, want) in enumerate(zip(dtypes, leaves, wanted, strict=True)):
        if not want:
            continue
        if alone[i]:
            yield [i]
            continue
        nbytes = leaf.numel * dtype.itemsize
        # a flat travels as a whole, whatever of it is asked for
        key = dtype, leaf.home and leaf.home[:2]
        full = leaf.home is None and limit is not None and filled.get(key, 0) + nbytes > limit
        if key in open_ and (full or not claims[key].claim(leaf)):
            yield open_.pop(key)
        if key not in open_:
            open_[key], filled[key], claims[key] = [], 0, Claims()
            claims[key].claim(leaf)
        filled[key] += nbytes
        open_[key].append(i)
    # in the order in which leaves opened them: the same on every rank
    yield from open_.values()


def _in(x: Tensor, dtype: torch.dtype) -> Tensor:
    # a call of `to` that has nothing to do costs more than to ask
    return x if x.dtype == dtype else x.to(dtype)


def _times(buffer: Tensor, factor: float) -> Tensor:
    return buffer if factor == 1 else buffer.mul_(factor)


def _real(buffer: Tensor) -> Tensor:
    """A flat view that backends can add up: they know no complex numbers."""
    # a view of what was packed, which is contiguous: factors and sums are written into it
    flat = buffer.reshape(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
