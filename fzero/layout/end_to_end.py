"""Small leaves that lie end to end in memory, so that one kernel takes many of them.

[Note: end to end] To start a kernel, and to wake the threads that share its work, takes some
microseconds: of a leaf of a few thousand numbers that is most of what an update takes. A rank that
has whole leaves to itself has them as they come: each in memory of its own. So `init` lays small
parameters and their optimizer state in *slabs* that hold many, all in the same order; a Program
lays the gradients so (`program.passes.lay`); and what updates them, or sums their squares, takes
what lies together as one: see `program.joined`, `numerics.norms`. It is a matter of where tensors
are, not of what they are: results are the same, to the last bit on one thread, and leaves that lie
elsewhere, such as a user's own copies, are taken one by one.

A leaf of a slab is no view, and has a storage of its own, which begins and ends where the leaf
does: a write to it is none to its neighbours, and what copies it, or saves it, takes it alone. It
has one size for good (`resize_` is refused by torch).
Torch can neither copy nor pickle a DTensor that begins elsewhere than its storage does.
"""

import ctypes
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
    >>> leaves[0].sum(), leaves[1].data_ptr() - leaves[0].data_ptr()
    (tensor(16.), 64)
    """
    for slab in slabs(leaves, names):
        memory = leaves[slab[0]].new_empty(sum(leaves[i].numel() for i in slab))
        if isinstance(memory, FakeTensor):  # of which nothing is anywhere
            return
        start = memory.data_ptr()
        for i in slab:
            x = leaves[i]
            storage = _at(start, x.numel(), x.dtype, memory).untyped_storage()
            leaves[i] = x.new_empty(0).set_(storage, 0, x.shape, x.stride()).copy_(x)
            start += x.nbytes


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
    follow = [size > 0 and size % multiple == 0 for size in sizes[:-1]]
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
    return [[order[place] for place in run] for run in found]


def one_of(leaves: Sequence[Tensor]) -> Tensor:
    """All numbers of leaves that lie one after the other, as one tensor in their memory.

    >>> one_of(torch.arange(6).split([2, 4]))
    tensor([0, 1, 2, 3, 4, 5])
    """
    if len(leaves) == 1:
        return leaves[0]
    first = leaves[0]
    return _at(first.data_ptr(), sum(map(Tensor.numel, leaves)), first.dtype, leaves)


def _at(address: int, numel: int, dtype: torch.dtype, owner: object) -> Tensor:
    """The numbers that begin at an address, in memory that `owner` has and is kept for."""
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    memory.owner = owner  # pyright: ignore
    return torch.frombuffer(memory, dtype=dtype)
