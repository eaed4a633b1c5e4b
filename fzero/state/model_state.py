"""What becomes of model state (buffers) that ranks have changed each in its own way: one rule.

[Note: one model state] After an update every rank has the same model state. Floating and complex
values are the mean over ranks: for a statistic that moves towards the mean of a batch (BatchNorm's
running mean, a codebook's average) that is what one process with the whole batch would have.
Anything else (counters, flags, indices) is the first rank's, as under DDP. A value on which all
ranks agree keeps every bit.

The last sentence is why nothing here is added up in its own dtype: x / 3 + x / 3 + x / 3 is not
always x. Values travel as columns of float64 with at most 32 significant bits, whose sums over up
to 2**21 ranks are exact; so is the division of n * x by n.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LOW_BITS = 27  # of a float64's 52: what is above has 26 significant bits, what is below at most 27


def columns(x: Tensor, *, world: int, first: bool) -> Tensor:
    """A leaf as what ranks add up.

    Args:
        x: of any dtype.
        world: how many ranks there are.
        first: whether this is the first rank.

    Returns:
        (columns, numel) float64.
    """
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    x = x.reshape(-1)
    if x.dtype == torch.float64:
        # scaled, so that sums of the largest numbers don't overflow
        scaled = x * 0.5 ** _doublings(world)
        mask = -(1 << _LOW_BITS)
        high = (scaled.view(torch.int64) & mask).view(torch.float64)
        # infinity less itself is NaN
        low = torch.where(torch.isfinite(x), scaled - high, 0.0)
        return torch.stack([high, low])
    if x.is_floating_point():
        return x.double().unsqueeze(0)
    if not first:
        # zeros from all others: the sum is the first rank's
        return x.new_zeros((_width(x.dtype), x.numel()), dtype=torch.float64)
    if _width(x.dtype) == 1:
        return x.double().unsqueeze(0)
    x = x.view(torch.int64)
    # 64 bits don't fit into a float64, two halves do
    return torch.stack([x >> 32, x & 0xFFFFFFFF]).double()


def joined(total: Tensor, like: Tensor, *, world: int) -> Tensor:
    """A leaf from the sum of all ranks' columns.

    Args:
        total: (columns, numel) float64.
        like: has the shape and dtype.
        world: as for `columns`.

    >>> x = torch.tensor([0.1, 5.0, -torch.inf])
    >>> torch.equal(joined(columns(x, world=3, first=True) * 3, x, world=3), x)
    True
    """
    dtype = like.dtype
    if dtype.is_complex:
        dtype = torch.view_as_real(like).dtype
    if dtype == torch.float64:
        # Divided apart, which is exact: their sum would be rounded before.
        flat = (total[0] / world + total[1] / world) * 2.0 ** _doublings(world)
    elif dtype.is_floating_point:
        flat = (total[0] / world).to(dtype)
    elif _width(dtype) == 1:
        flat = total[0].to(dtype)
    else:
        high, low = total.to(torch.int64).unbind()
        flat = ((high << 32) + low).view(dtype)
    if like.dtype.is_complex:
        return torch.view_as_complex(flat.view(*like.shape, 2))
    return flat.view(like.shape)


def split(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The columns of each leaf, from those of all laid end to end."""
    widths = [_columns_of(x) for x in leaves]
    sizes = [width * _numel(x) for width, x in zip(widths, leaves, strict=True)]
    parts = total.split(sizes)
    return [part.view(width, -1) for part, width in zip(parts, widths, strict=True)]


def _columns_of(x: Tensor) -> int:
    dtype = torch.view_as_real(x).dtype if x.is_complex() else x.dtype
    return 2 if dtype == torch.float64 else 1 if dtype.is_floating_point else _width(dtype)


def _numel(x: Tensor) -> int:
    return x.numel() * (2 if x.is_complex() else 1)


def _width(dtype: torch.dtype) -> int:
    return 2 if dtype in (torch.int64, torch.uint64) else 1


def _doublings(world: int) -> int:
    return math.ceil(math.log2(world))
