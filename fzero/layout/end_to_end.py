"""Small leaves that lie end to end in memory, so that one kernel takes many of them.

[Note: end to end] To start a kernel, and to wake the threads that share its work, takes some
microseconds: of a leaf of a few thousand numbers that is most of what an update takes. A rank that
has whole leaves to itself has them as they come: each in memory of its own. So at stage 0, where
they are plain tensors, `init` lays small parameters and their optimizer state in *slabs* that hold
many, all in the same order; a Program lays the gradients so (`program.passes.lay`); and what
updates them, or sums their squares, takes what lies together as one: see `program.joined`,
`numerics.norms`. It is a matter of where tensors are, not of what they are: results are the same,
to the last bit on one thread, and leaves that lie elsewhere, such as a user's own copies, are taken
one by one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero.layout.modules import natural_order

# Numbers from which a leaf is worth a kernel by itself, and that a slab may have.
_LARGE, _SLAB = 2**18, 2**19
# Numbers that kernels take at a time, at most: behind leaves of a multiple, the next begins where
# it would if it were alone.
_AT_A_TIME = 16


def slabs(leaves: Sequence[Any], names: Sequence[str]) -> list[list[int]]:
    """Indices of leaves that belong into one slab, as they lie there; at least two each.

    Args:
        leaves: of any shapes. None of a device has a slab: its kernels take whole lists as they
            are. Nor has any of another dtype than float32 and float64, in which updates are made,
            nor a number, or a tensor of another class.
        names: dotted; layers that follow each other are together.

    >>> slabs([torch.zeros(4, 4), torch.zeros(32), torch.zeros(3), torch.zeros(16)], "adcb")
    [[0, 3, 1]]
    """
    found: dict[torch.dtype, list[list[int]]] = {}
    room: dict[torch.dtype, int] = {}
    for i in natural_order(names):
        x = leaves[i]
        if type(x) not in (Tensor, FakeTensor) or x.device.type != "cpu":
            continue
        dtype, size = x.dtype, x.numel()
        if dtype not in (torch.float32, torch.float64):
            continue
        if not 0 < size < _LARGE or size % _AT_A_TIME or not x.is_contiguous():
            continue
        if room.get(dtype, 0) < size:
            found.setdefault(dtype, []).append([])
            room[dtype] = _SLAB
        found[dtype][-1].append(i)
        room[dtype] -= size
    return [slab for of in found.values() for slab in of if len(slab) > 1]


@torch.no_grad()
def lay(leaves: list[Any], names: Sequence[str]) -> None:
    """Replace the leaves of each of `slabs` by copies that lie end to end.

    >>> leaves = [torch.ones(4, 4), torch.zeros(32)]
    >>> lay(leaves, "ab")
    >>> leaves[0].sum(), leaves[1].storage_offset()
    (tensor(16.), 16)
    """
    for slab in slabs(leaves, names):
        memory = leaves[slab[0]].new_empty(sum(leaves[i].numel() for i in slab))
        start = 0
        for i in slab:
            x = leaves[i]
            # no view: a write to one leaf would count as one to all of them
            part = memory.new_empty(0).set_(memory.untyped_storage(), start, x.shape, x.stride())
            leaves[i] = part.copy_(x)
            start += x.numel()


def runs(*columns: Sequence[Tensor], multiple: int = _AT_A_TIME) -> list[list[int]]:
    """Indices of leaves that lie one after the other in memory, and can be taken as one.

    Args:
        columns: lists of dense tensors, those at one place of one size: gradients, say, and the
            parameters they are of. A run is one in all of them.
        multiple: numbers of which only the last leaf of a run may have another multiple.

    >>> a, b, c = torch.zeros(64).split([16, 16, 32])
    >>> runs([c, a, b]), runs([a, b, c], [b, c, a])
    ([[1, 2, 0]], [[0, 1], [2]])
    """
    order = sorted(range(len(columns[0])), key=list(map(Tensor.data_ptr, columns[0])).__getitem__)
    columns = tuple(list(map(column.__getitem__, order)) for column in columns)
    sizes = list(map(Tensor.numel, columns[0]))
    follow = [size % multiple == 0 for size in sizes[:-1]]
    for column in columns if True in follow else ():
        at, itemsize = list(map(Tensor.data_ptr, column)), column[0].itemsize
        pairs = zip(follow, at, sizes, at[1:], strict=False)
        follow = [known and a + size * itemsize == b for known, a, size, b in pairs]
    found: list[list[int]] = []
    for place, follows in enumerate([False, *follow] if order else ()):
        if follows:
            found[-1].append(place)
        else:
            found.append([place])
    parts = [part for run in found for part in _in_one_storage(columns, sizes, run)]
    return [[order[place] for place in part] for part in parts]


def _in_one_storage(
    columns: Sequence[Sequence[Tensor]], sizes: Sequence[int], run: list[int]
) -> list[list[int]]:
    """A run; its leaves one by one where they lie so by chance, in memory of several owners."""
    numel = sum(sizes[place] for place in run)
    for first in (column[run[0]] for column in columns) if len(run) > 1 else ():
        if first.untyped_storage().nbytes() < (first.storage_offset() + numel) * first.itemsize:
            return [[place] for place in run]
    return [run]


def one_of(leaves: Sequence[Tensor]) -> Tensor:
    """All numbers of leaves that lie one after the other, as one tensor in their memory.

    >>> one_of(torch.arange(6).split([2, 4]))
    tensor([0, 1, 2, 3, 4, 5])
    """
    if len(leaves) == 1:
        return leaves[0]
    return leaves[0].as_strided((sum(map(Tensor.numel, leaves)),), (1,))
