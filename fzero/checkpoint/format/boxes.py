"""Which rank writes which part of which leaf: decided alike on every rank, without talking.

[Note: boxes] A *box* is a part of a leaf, `(offsets, sizes)` in elements along each dim. What a
rank holds of a leaf is one box; ranks that hold the same box are replicas of each other.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fzero.distributed.ragged import Rows
from fzero.errors import CheckpointError


class Box(NamedTuple):
    """A part of a leaf, in elements.

    >>> Box((2, 0), (2, 3)).numel
    6
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)


def are_disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no element is in two of these boxes of one leaf.

    >>> are_disjoint([Box((0,), (2,)), Box((2,), (1,))])
    True
    >>> are_disjoint([Box((0,), (2,)), Box((1,), (2,))])
    False
    """
    if not boxes:
        return True
    dims = range(len(boxes[0].offsets))
    one = boxes[0]
    split = [
        d
        for d in dims
        if any((b.offsets[d], b.sizes[d]) != (one.offsets[d], one.sizes[d]) for b in boxes)
    ]
    if len(split) <= 1:  # as shards are: along one dim; sorted, only neighbours can meet
        dim = split[0] if split else 0
        if not dims:
            return len(boxes) == 1
        rows = sorted((b.offsets[dim], b.offsets[dim] + b.sizes[dim]) for b in boxes)
        return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(rows))
    return not any(_meet(a, b) for a, b in itertools.combinations(boxes, 2))


def _meet(a: Box, b: Box) -> bool:
    sides = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(i < j + n and j < i + m for i, m, j, n in sides)


class Chunk(NamedTuple):
    """A box of a leaf, and which of the ranks writes it.

    Args:
        key: the leaf's.
        box: the part.
        rank: index in the list of ranks that save together.
    """

    key: str
    box: Box
    rank: int


def plan_save(tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> list[Chunk]:
    """Every box of every leaf once, each with the least busy of the ranks that hold it.

    Args:
        tensors: leaves by key; a plain tensor is the same on all ranks.
        ranks: the global ranks that save together.

    Raises:
        CheckpointError: a DTensor on other ranks, or with placements that hold no box.

    Examples:
        >>> import torch
        >>> plan_save({"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(1)}, [0, 1])
        ... # doctest: +ELLIPSIS
        [Chunk(key='a', ..., rank=0), Chunk(key='b', ..., rank=1), Chunk(key='c', ..., rank=1)]
    """
    index_of = {rank: index for index, rank in enumerate(ranks)}
    everyone = list(range(len(ranks)))
    load = [0] * len(ranks)
    chunks = []
    for key, tensor in tensors.items():
        holders: dict[Box, list[int]] = {}
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh.mesh
            # of all ranks, not only this one: each makes the plan of the whole job
            for coordinate in _coordinates(tuple(mesh.shape)):
                rank = int(mesh[coordinate])
                if rank not in index_of:
                    raise CheckpointError(
                        f"{key} lives on ranks {mesh.flatten().tolist()}, and ranks {list(ranks)} "
                        "save together. Save trees of other meshes one at a time."
                    )
                box = box_at(key, tensor.shape, tensor.placements, tuple(mesh.shape), coordinate)
                holders.setdefault(box, []).append(index_of[rank])
        else:
            # the same on all ranks, so any may write it, and the least busy one does
            holders[Box((0,) * tensor.dim(), tuple(tensor.shape))] = everyone
        for box, who in holders.items():
            # an empty shard has no bytes, and a manifest no empty boxes
            if box.numel:
                # of equals the first: every rank makes the same plan
                least = min(who, key=load.__getitem__)
                load[least] += box.numel * tensor.element_size()
                chunks.append(Chunk(key, box, least))
    return chunks


def box_at(
    key: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Box:
    """What the rank at a coordinate of the mesh holds of a DTensor.

    Args:
        key: the leaf's, for the message.
        shape: of the full tensor.
        placements: one per axis of the mesh; later axes split what earlier ones left.
        mesh_shape: ranks along each axis.
        coordinate: the rank's number along each axis.

    >>> box_at("w", (7, 3), (Shard(0),), (4,), (3,))
    Box(offsets=(6, 0), sizes=(1, 3))
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for placement, world, number in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Rows):
            start, stop = placement.of(number)
            offsets[0], sizes[0] = start, stop - start
        elif type(placement) is Shard:
            dim = placement.dim
            rows = -(-sizes[dim] // world)
            # as torch.chunk: the last ranks may have fewer rows, or none
            start = min(number * rows, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(rows, sizes[dim] - start)
        elif not isinstance(placement, Replicate):
            raise CheckpointError(
                f"{key} has the placement {placement}, and a checkpoint takes Shard, Rows and "
                "Replicate: each rank must hold one box of the leaf. Call redistribute on it first."
            )
    return Box(tuple(offsets), tuple(sizes))


def _coordinates(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for size in shape:
        found = [(*start, i) for start in found for i in range(size)]
    return found
