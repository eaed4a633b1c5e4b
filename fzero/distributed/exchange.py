"""Bytes that all ranks tell each other at a station, whatever a rank elsewhere sends meanwhile.

[Note: kinds of operations] Gloo pairs the n-th operation of a group with the others' n-th, if it is
of one kind with them. Of two kinds, all wait, and who waits looks where the others are; but where
kinds are the same and sizes are not, it aborts the process. So bytes travel by kinds that nothing
else here uses, a gather to the first rank and a broadcast from it, and begin with a header of one
size, which says at which station a rank is.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fzero.distributed import works
from fzero.distributed.mesh import backends_of
from fzero.distributed.whereabouts import Circle

_LENGTH = 8  # bytes of a number in a header
_HEADER = 4 + _LENGTH


def exchange(data: bytes, groups: Sequence[ProcessGroup], circle: Circle) -> list[bytes]:
    """Every rank's bytes, in the order of a mesh; all of the circle's ranks must be at one station.

    Two rounds: what a collective takes is of one length, and nobody knows the others'.

    Args:
        data: this rank's.
        groups: along the axes of the mesh, the outer ones first; none of one rank.
        circle: the ranks.

    Raises:
        RankMismatchError: a rank is elsewhere, gone, or late beyond the limit.
    """
    where = zlib.crc32(circle.here.text.encode()).to_bytes(_HEADER - _LENGTH, "big")
    headers = _rounds(where + len(data).to_bytes(_LENGTH, "big"), groups, circle)
    if {header[:-_LENGTH] for header in headers} != {where}:
        circle.part()
    lengths = [int.from_bytes(header[-_LENGTH:], "big") for header in headers]
    padded = _rounds(data.ljust(max(lengths), b"\0"), groups, circle)
    return [text[:length] for text, length in zip(padded, lengths, strict=True)]


def _rounds(data: bytes, groups: Sequence[ProcessGroup], circle: Circle) -> list[bytes]:
    if not data:
        return [data] * len(circle.ranks)
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    # the last axis first: what comes out is then in the mesh's row-by-row order
    for group in reversed(groups):
        row = _gather(row.to(_device(group)), group, circle)
    flat = bytes(row.tolist())
    return [flat[i : i + len(data)] for i in range(0, len(flat), len(data))]


def _gather(x: Tensor, group: ProcessGroup, circle: Circle) -> Tensor:
    """Every rank's tensor, end to end: see [Note: kinds of operations]."""
    out = x.new_empty((group.size(), *x.shape))
    if "gloo" in backends_of(group):
        works.to_first(out, x, group, circle)
        works.from_first(out, group, circle)
    else:
        works.collect(list(out.unbind()), x, group, circle)
    return out.flatten()


def _device(group: ProcessGroup) -> torch.device:
    # "cpu:gloo,cuda:nccl", "gloo", "nccl"
    if "gloo" in backends_of(group) or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
