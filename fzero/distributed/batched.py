"""Collectives of many leaves at once, run eagerly and outside of autograd: one per bucket.

What `collectives` does leaf by leaf and differentiably, these do for lists of leaves. A bucket is
filled in the order of the list, so the same list always travels in the same way.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
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
from fzero.distributed.mesh import Axes, Axis, is_gloo
from fzero.layout import LeafLayout

Announce = Callable[[Bucket], None]
"""Told of each bucket just before it travels."""


def gather_leaves(
    shards: Sequence[Tensor],
    leaves: Sequence[LeafLayout],
    axes: Axes,
    limit: int,
    announce: Announce = lambda bucket: None,
) -> list[Tensor]:
    """Full leaves, in their compute dtypes, from every rank's shards.

    Args:
        shards: this rank's part of each leaf, in `leaf.dtype`.
        leaves: how they are split.
        axes: the mesh; `axes.shard` is gathered over.
        limit: most bytes of full leaves in a bucket.

    Returns:
        One tensor a leaf. What needs no collective shares the shard's memory.
    """
    low = [
        shard.detach().to(leaf.compute or leaf.dtype)
        for shard, leaf in zip(shards, leaves, strict=True)
    ]
    travels = [axes.shard.size > 1 and leaf.dim is not None for leaf in leaves]

    def run(buffers: list[Tensor], bucket: Bucket) -> list[Tensor]:
        announce(bucket)
        send = pack_shards(buffers, bucket)
        if bucket.exchanged:
            full = _exchange(send, bucket)
        else:
            full = works.all_gather_into_tensor(send, bucket.world, bucket.group)
        return unpack_full(works.wait(full), bucket)

    return _in_buckets(GATHER, low, leaves, travels, axes.shard, limit, run)


def scatter_gradients(
    grads: Sequence[Tensor],
    leaves: Sequence[LeafLayout],
    axes: Axes,
    limit: int,
    announce: Announce = lambda bucket: None,
) -> list[Tensor]:
    """This rank's gradient shards, summed over all ranks, in the dtypes that they are reduced in.

    Args:
        grads: full gradients of floating or complex leaves.
        limit: most bytes of them in a bucket.
    """
    high = _in_reduce_dtype(grads, leaves)

    def run(buffers: list[Tensor], bucket: Bucket) -> list[Tensor]:
        announce(bucket)
        send = _real(pack_full(buffers, bucket))
        if bucket.exchanged:
            parts = works.wait(_exchange(send, bucket))
            part = parts.view(bucket.world, -1).sum(0)
        else:
            part = works.reduce_scatter_tensor(send, "sum", bucket.world, bucket.group)
            part = works.wait(part)
        part = _sum(part, axes.replicate).view(bucket.dtype)
        return unpack_shards(part, replace(bucket, exchanged=False))

    travels = [axes.shard.size > 1 and leaf.dim is not None for leaf in leaves]
    shards = _in_buckets(REDUCE_SCATTER, high, leaves, travels, axes.shard, limit, run)
    # a whole leaf, or a shard of an axis of one rank, has only been left out so far
    rest = [not travelled for travelled in travels]
    return _sums(shards, leaves, rest, axes, limit, announce)


def sum_gradients(
    grads: Sequence[Tensor],
    leaves: Sequence[LeafLayout],
    axes: Axes,
    limit: int,
    announce: Announce = lambda bucket: None,
) -> list[Tensor]:
    """Full gradients, summed over all ranks, in the dtypes that they are reduced in."""
    high = _in_reduce_dtype(grads, leaves)
    return _sums(high, leaves, [True] * len(high), axes, limit, announce)


def _sums(
    tensors: Sequence[Tensor],
    leaves: Sequence[LeafLayout],
    wanted: Sequence[bool],
    axes: Axes,
    limit: int,
    announce: Announce,
) -> list[Tensor]:
    """The wanted ones summed over both axes."""
    axis = next((axis for axis in axes if axis.size > 1), None)
    if axis is None:
        return list(tensors)

    def run(buffers: list[Tensor], bucket: Bucket) -> list[Tensor]:
        announce(bucket)
        buffer = pack_flat(buffers, bucket)
        total = _real(buffer)
        for axis in axes:
            total = _sum(total, axis)
        return unpack_flat(total.view(bucket.dtype), bucket)

    return _in_buckets(ALL_REDUCE, tensors, leaves, wanted, axis, limit, run)


def _in_buckets(
    kind: str,
    tensors: Sequence[Tensor],
    leaves: Sequence[LeafLayout],
    wanted: Iterable[bool],
    axis: Axis,
    limit: int,
    run: Callable[[list[Tensor], Bucket], list[Tensor]],
) -> list[Tensor]:
    """`tensors`, the wanted ones replaced by what `run` makes of them, bucket by bucket."""
    results = list(tensors)
    held: dict[torch.dtype, list[int]] = {}
    filled: dict[torch.dtype, int] = {}

    def flush(indices: list[int]) -> None:
        bucket = Bucket(
            kind,
            tuple(leaves[i] for i in indices),
            tensors[indices[0]].dtype,
            axis.size,
            axis.group,
            axis.rank,
            exchanged=kind != ALL_REDUCE and is_gloo(axis.group),
        )
        for i, result in zip(indices, run([tensors[i] for i in indices], bucket), strict=True):
            results[i] = result

    for i, want in enumerate(wanted):
        if not want:
            continue
        dtype, nbytes = tensors[i].dtype, leaves[i].numel * tensors[i].dtype.itemsize
        if held.get(dtype) and filled[dtype] + nbytes > limit:
            flush(held.pop(dtype))
        held.setdefault(dtype, []).append(i)
        filled[dtype] = nbytes + (filled[dtype] if len(held[dtype]) > 1 else 0)
    for indices in held.values():
        flush(indices)
    return results


def _in_reduce_dtype(grads: Sequence[Tensor], leaves: Sequence[LeafLayout]) -> list[Tensor]:
    dense = [g if g.layout == torch.strided else g.to_dense() for g in grads]
    return [g.to(leaf.reduce or g.dtype) for g, leaf in zip(dense, leaves, strict=True)]


def _exchange(send: Tensor, bucket: Bucket) -> Any:
    parts = [send.numel() // bucket.world] * bucket.world
    return works.all_to_all_single(send, parts, parts, bucket.group)


def _sum(buffer: Tensor, axis: Axis) -> Tensor:
    if axis.size == 1:
        return buffer
    return works.wait(works.all_reduce(buffer, "sum", axis.group))


def _real(buffer: Tensor) -> Tensor:
    """A flat view that backends can add up: they know no complex numbers."""
    flat = buffer.reshape(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
