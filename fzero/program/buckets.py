"""Buckets: several leaves in one collective, and the copies in and out of its buffer.

[Note: a bucket's buffer] Every rank's part is laid end to end, the leaves one after another inside
a part, each padded to the same rows on every rank:

    rank 0: [leaf a, padded rows of rank 0][leaf b, ...] | rank 1: [leaf a, ...][leaf b, ...] | ...

A single leaf that is split evenly along dim 0 is laid out so already; it travels without a copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.collectives import as_wire, pad_rows
from fzero.layout import LeafLayout

GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"


@dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that share one collective over one axis."""

    kind: str
    leaves: tuple[LeafLayout, ...]
    dtype: torch.dtype
    world: int
    group: str
    rank: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the full side, without padding."""
        return sum(leaf.numel for leaf in self.leaves) * self.dtype.itemsize

    @property
    def wire_bytes(self) -> int:
        """Bytes that each rank sends in a ring: what bandwidth-optimal collectives move."""
        hops = 2 if self.kind == ALL_REDUCE else 1
        return hops * self.nbytes * (self.world - 1) // self.world

    def __repr__(self) -> str:
        first = self.leaves[0].name
        more = f" +{len(self.leaves) - 1}" if len(self.leaves) > 1 else ""
        return f"{self.kind}[{first}{more}]"

    @property
    def is_plain(self) -> bool:
        """Whether the leaf's own memory is the buffer."""
        (leaf, *more) = self.leaves
        return not more and leaf.dim == 0 and leaf.shape[0] % self.world == 0


def pack_shards(shards: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """This rank's part of the buffer, in a dtype that travels."""
    if bucket.is_plain:
        return as_wire(shards[0])
    parts = []
    for shard, leaf in zip(shards, bucket.leaves, strict=True):
        assert leaf.dim is not None
        parts.append(pad_rows(shard.movedim(leaf.dim, 0), leaf.padded_rows).reshape(-1))
    return as_wire(torch.cat(parts))


def unpack_full(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """The full leaves from the gathered buffer, each contiguous."""
    buffer = buffer.view(bucket.dtype)
    if bucket.is_plain:
        return [buffer.view(bucket.leaves[0].shape)]
    sizes = [math.prod(leaf.padded_shape) for leaf in bucket.leaves]
    table = buffer.view(bucket.world, -1)
    columns = torch.split_with_sizes_copy(table, sizes, dim=1) if len(sizes) > 1 else [table]
    full = []
    for column, leaf in zip(columns, bucket.leaves, strict=True):
        assert leaf.dim is not None
        rows, *rest = leaf.padded_shape
        x = column.view(rows * bucket.world, *rest)
        if rows * bucket.world != leaf.shape[leaf.dim]:
            x = x.narrow(0, 0, leaf.shape[leaf.dim])
        full.append(x.movedim(0, leaf.dim).contiguous() if leaf.dim else x)
    return full


def pack_full(grads: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """The buffer to reduce and scatter, from full gradients."""
    if bucket.is_plain:
        return grads[0].contiguous()
    fronts = [
        grad.movedim(leaf.dim, 0) if leaf.dim else grad
        for grad, leaf in zip(grads, bucket.leaves, strict=True)
    ]
    return torch._chunk_cat(fronts, 0, bucket.world).view(-1)


def unpack_shards(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """This rank's gradient shards, as views of the reduced buffer."""
    buffer = buffer.view(-1)
    sizes = [math.prod(leaf.padded_shape) for leaf in bucket.leaves]
    shards = []
    for part, leaf in zip(buffer.split(sizes), bucket.leaves, strict=True):
        assert leaf.dim is not None
        start, stop = leaf.bounds(bucket.rank)
        x = part.view(leaf.padded_shape)
        x = x if stop - start == leaf.padded_rows else x.narrow(0, 0, stop - start)
        shards.append(x.movedim(0, leaf.dim))
    return shards


def pack_flat(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Whole tensors end to end, for an all-reduce."""
    if len(tensors) == 1:
        return tensors[0].contiguous()
    return torch.cat([x.reshape(-1) for x in tensors])


def unpack_flat(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """The inverse of `pack_flat`, as views."""
    if len(bucket.leaves) == 1:
        return [buffer.view(bucket.leaves[0].shape)]
    parts = buffer.split([leaf.numel for leaf in bucket.leaves])
    return [x.view(leaf.shape) for x, leaf in zip(parts, bucket.leaves, strict=True)]
