"""Which kinds of modules a parameter belongs to, told by the parameter itself.

A model function takes a tree of tensors and says nothing of modules. `fzero.functionalize` knows
them, and notes on each tensor that it returns the classes of the modules that hold it; whoever
plans which dtype a parameter travels in reads the note. There is no table on the side: the note
lives and dies with the tensor. Names are noted, not classes, so that a tensor with a note can be
saved and loaded without running any code.
"""

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

T = TypeVar("T", bound=Tensor)

Owners = tuple[str, ...] | None
"""Dotted names of classes, sorted; None for a tensor that nobody has made a note on."""

STATISTICS = "statistics"
"""One more name, where a module that holds the parameter keeps statistics as precise as it is."""

_NOTE, _UNTRAINED = "fzero_owners", "fzero_untrained"


def noted(x: T, owners: Iterable[str] | None) -> T:
    """`x` itself, with a note of its owners; None makes none.

    Examples:
        >>> import torch
        >>> owners_of(noted(torch.ones(2), ["torch.nn.modules.linear.Linear"]))
        ('torch.nn.modules.linear.Linear',)
    """
    if owners is not None:
        setattr(x, _NOTE, tuple(sorted(owners)))
    return x


def owners_of(x: Tensor) -> Owners:
    """The note on `x`, or None."""
    return getattr(x, _NOTE, None)


def noted_untrained(x: T, param: Tensor) -> T:
    """`x` itself, with a note if its module's parameter asks for no gradient."""
    if not param.requires_grad:
        setattr(x, _UNTRAINED, True)
    return x


def is_untrained(x: Tensor) -> bool:
    """Whether it comes from a module's parameter that asks for no gradient.

    Examples:
        >>> import torch
        >>> plain = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
        >>> [is_untrained(noted_untrained(x.detach(), x)) for x in plain]
        [False, True]
    """
    return getattr(x, _UNTRAINED, False)


def keeps_dtype(owners: Owners) -> bool:
    """Whether a parameter is computed with as it is, whatever low dtype others are cast to.

    Torch's batch norm takes weights and running statistics of one dtype, and so PyTorch's own
    `MixedPrecision` of FSDP leaves such modules out.

    Examples:
        >>> keeps_dtype(("torch.nn.modules.batchnorm.BatchNorm2d", STATISTICS)), keeps_dtype(None)
        (True, False)
    """
    return owners is not None and STATISTICS in owners


def noted_like(x: T, other: Tensor) -> T:
    """`x` itself, with the note that `other` has, if any."""
    return noted(x, owners_of(other))
