"""Memory layout of the values of a Program.

[Note: strides are part of a value] While a function is recorded, Python code asks fake tensors how
they lie in memory, and what it does then depends on the answer: `.contiguous()` on a dense tensor
leaves nothing in the graph, `.view()` is recorded where a copy was not needed, a kernel that reads
memory in order is called without one. So the strides that a value had while recording are a promise
to all that reads it. Whoever puts another value in its place keeps the promise, with a copy if need
be.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from fzero.operators import define


def agree(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two tuples of strides put every element of a tensor of `shape` at the same place.

    >>> agree((3, 1), (1, 1), (1, 7)), agree((3, 2), (2, 1), (1, 3)), agree((0, 5), (1, 1), (5, 1))
    (True, False, True)
    """
    if tuple(a) == tuple(b) or 0 in shape:
        return True
    # along a dim of one element there is no next one: its stride is of no account
    return all(i == j for size, i, j in zip(shape, a, b, strict=True) if size > 1)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and place for every element."""
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    return a.layout != torch.strided or agree(a.shape, a.stride(), b.stride())


def layout_of(x: Tensor) -> tuple[int, ...] | None:
    """What tells apart how two tensors of one shape lie in memory; None of a dense one.

    A slice of one row is dense whatever its stride along that dim. Of images, where all strides
    count, even those tell which memory format a convolution chooses.

    >>> layout_of(torch.ones(2, 9)[:1, :4]), layout_of(torch.ones(3, 2).t())
    (None, (1, 2))
    >>> image = torch.ones(2, 1, 5, 5)
    >>> layout_of(image), layout_of(image.to(memory_format=torch.channels_last))
    (None, (25, 1, 5, 1))
    """
    if not x.is_contiguous() or (x.dim() > 3 and x.stride() != _dense(x.shape)):
        return x.stride()
    return None


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives a new tensor of this shape."""
    # a dim without elements counts as one of a single element
    sizes = [max(size, 1) for size in shape[:0:-1]]
    return tuple(accumulate(sizes, mul, initial=1))[::-1]


def shown(x: Tensor) -> str:
    """Shape, dtype and strides, for messages."""
    text = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return f"{text} with strides {x.stride()}" if x.layout == torch.strided else text


def restored(x: Tensor, strides: Sequence[int]) -> Tensor:
    """`x` with these strides: itself if it has them, or a copy.

    >>> restored(torch.ones(3, 2).t(), (3, 1)).stride()
    (3, 1)
    """
    if agree(x.shape, x.stride(), strides):
        return x
    return _copied(x, strides)


def _copied(x: Tensor, strides: Sequence[int]) -> Tensor:
    # where elements share memory, which nobody may write to all at once, there is one of them
    once = x[tuple(slice(None) if stride else slice(0, 1) for stride in strides)]
    copy = torch.empty_strided(once.shape, strides, dtype=x.dtype, device=x.device)
    return copy.copy_(once).expand(x.shape)


def _like(x: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


# a copy with these strides, as an operator that a graph can hold
define("restored(Tensor x, int[] strides) -> Tensor", _copied, _like)
