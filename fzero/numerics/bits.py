"""Tensors as their bits, for which NaN is NaN and 0.0 is not -0.0."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor as integers of its width, in its memory.

    Args:
        x: of any dtype; complex numbers are pairs, in one dim more.

    >>> bits(torch.tensor([0.0, -0.0], dtype=torch.float16))
    tensor([     0, -32768], dtype=torch.int16)
    """
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.resolve_neg().view(_INTEGERS[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits.

    >>> same_bits(torch.tensor(torch.nan), torch.tensor(torch.nan))
    True
    >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    False
    """
    return a.dtype == b.dtype and torch.equal(bits(a.detach()), bits(b.detach()))
