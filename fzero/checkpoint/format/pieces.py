"""Tensors as streams of bytes, a bounded piece at a time, whatever their shape and strides."""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.format.disk import bytes_of
from fzero.checkpoint.format.manifest import BLOCK
from fzero.numerics.host import on_host

PIECE = 4 * BLOCK


class Piece(NamedTuple):
    """Part of a tensor whose bytes follow each other in row-major order.

    Args:
        cuts: what to narrow the tensor by: `(dim, start, length)`, outer dims first.
        start: its first byte, counted in the whole tensor.
        nbytes: its bytes.
    """

    cuts: tuple[tuple[int, int, int], ...]
    start: int
    nbytes: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part, as a view."""
        for dim, start, length in self.cuts:
            tensor = tensor.narrow(dim, start, length)
        return tensor


def pieces(shape: tuple[int, ...], itemsize: int, limit: int = PIECE) -> Iterator[Piece]:
    """A tensor cut into pieces of at most `limit` bytes, in row-major order.

    >>> [piece.nbytes for piece in pieces((3, 4), 4, limit=40)]
    [32, 16]
    >>> [piece.cuts for piece in pieces((2, 3), 4, limit=8)][:2]
    [((0, 0, 1), (1, 0, 2)), ((0, 0, 1), (1, 2, 1))]
    """
    nbytes = torch.Size(shape).numel() * itemsize
    if nbytes:
        yield from _cut(shape, itemsize, limit, 0, (), 0, nbytes)


def stream(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a strided tensor's values, wherever they lie, row by row, a piece at a time.

    A piece may be looked at until the next one is asked for.
    """
    for piece in pieces(tuple(tensor.shape), tensor.element_size()):
        part = on_host(piece.of(tensor))  # keeps the memory while we wait
        yield bytes_of(part)


class Checks:
    """CRC-32 of every block of a stream.

    >>> checks = Checks()
    >>> checks.add(memoryview(b"abc"))
    >>> [f"{check:08x}" for check in checks.done()]
    ['352441c2']
    """

    def __init__(self) -> None:
        self._done: list[int] = []
        self._now, self._filled = 0, 0

    def add(self, data: memoryview) -> None:
        """The next bytes of the stream."""
        while data:
            # pieces and blocks need not end together: a box's blocks are counted from its own start
            part = data[: BLOCK - self._filled]
            self._now = zlib.crc32(part, self._now)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK:
                self._done.append(self._now)
                self._now, self._filled = 0, 0

    def done(self) -> tuple[int, ...]:
        """One number per block, the last one short."""
        # a stream that ends with a block has no short one after it
        return (*self._done, self._now) if self._filled else tuple(self._done)


def _cut(
    shape: tuple[int, ...],
    itemsize: int,
    limit: int,
    dim: int,
    outer: tuple[tuple[int, int, int], ...],
    start: int,
    nbytes: int,
) -> Iterator[Piece]:
    if nbytes <= limit or dim == len(shape):
        yield Piece(outer, start, nbytes)
        return
    # as many whole rows as fit; one that is too large by itself is cut along the next dim
    row = nbytes // shape[dim]
    rows = max(limit // row, 1)
    for first in range(0, shape[dim], rows):
        count = min(rows, shape[dim] - first)
        index = (*outer, (dim, first, count))
        yield from _cut(shape, itemsize, limit, dim + 1, index, start + first * row, count * row)
