"""Stochastic rounding: a number goes up or down with probabilities that make the mean exact.

To nearest, a bfloat16 weight forgets every update below a 512th of itself; rounded stochastically
it takes part of them, and on average all. The random bits are a hash of (seed, step, leaf, element)
and come from no generator: the same wherever the element lives, however the leaf is sharded.

References: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551, sec. 3;
for bfloat16 weights: Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192. The
hash of 32 bits is the one that Wellons found by search and published as lowbias32 (2018).
"""

import hashlib
import struct

import torch
from torch import Tensor

from fzero.layout import LeafLayout


def stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """`x` in bfloat16, one of the two neighbours of each element.

    Args:
        x: float32, any shape.
        bits: int32, the same shape; the lower 16 bits decide, uniform ones without a bias.

    Returns:
        bfloat16. What bfloat16 holds exactly, infinities and NaN included, is as it was.

    Examples:
        >>> x = torch.full((4,), 1.0 + 2**-8)  # in the middle between 1 and 1 + 2**-7
        >>> stochastically(x, torch.tensor([0, 2**15 - 1, 2**15, 2**16 - 1], dtype=torch.int32))
        tensor([1.0000, 1.0000, 1.0078, 1.0078], dtype=torch.bfloat16)
    """
    # bfloat16 is the upper half of float32: what is added below carries into it, or does not
    raised = x.view(torch.int32) + (bits & _HALF)
    # a NaN could become infinite or carry over into a number
    return torch.where(x.isfinite(), (raised & ~_HALF).view(torch.float32), x).bfloat16()


def random_bits(
    seed: int, step: Tensor, leaf: LeafLayout, part: Tensor, rank: int | None
) -> Tensor:
    """32 bits for each element of a part of a leaf.

    Args:
        seed: of the run.
        step: 0-d int64.
        leaf: which leaf; by its name and shape.
        part: shows the part's shape and device: a shard, or the whole leaf.
        rank: whose shard it is; None for the whole leaf.

    Returns:
        int32, shaped as `part`.

    Examples:
        >>> leaf = LeafLayout("w", (4, 3), torch.bfloat16, dim=0, world=2)
        >>> step, full = torch.tensor(7), torch.empty(4, 3)
        >>> whole = random_bits(0, step, leaf, full, None)
        >>> halves = [random_bits(0, step, leaf, leaf.split(full, rank), rank) for rank in (0, 1)]
        >>> torch.equal(whole, leaf.join(halves))
        True
    """
    digest = hashlib.blake2b(f"{seed} {leaf.name}".encode(), digest_size=8).digest()
    first, second = struct.unpack("<ii", digest)
    step = step.to(part.device).to(torch.int32)
    key = _mixed(_mixed(step ^ first) ^ second)
    # The key twice: after one xor alone, leaves would share their numbers in another order.
    return _mixed(_mixed(_elements(leaf, part, rank) ^ key) + key)


def _elements(leaf: LeafLayout, part: Tensor, rank: int | None) -> Tensor:
    """The number of each element in the full leaf, row-major; int32 that wraps around."""
    elements = torch.zeros((), dtype=torch.int32, device=part.device)
    stride = 1
    for dim in reversed(range(part.dim())):
        sharded = rank is not None and dim == leaf.dim
        start = leaf.bounds(rank)[0] if sharded and rank is not None else 0
        rows = torch.arange(start, start + part.shape[dim], device=part.device) * stride
        elements = elements + rows.to(torch.int32).view(-1, *[1] * (part.dim() - 1 - dim))
        stride *= leaf.shape[dim]
    return elements.expand(part.shape)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every bit of the result depends on every bit of `x`."""
    x = (x ^ _shifted(x, 16)) * 0x7FEB352D
    # less 2**32: the same bits as an int32, in which products wrap around
    x = (x ^ _shifted(x, 15)) * (0x846CA68B - 2**32)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & (2 ** (32 - by) - 1)  # the sign bit is a bit like any other


_HALF = 0xFFFF
