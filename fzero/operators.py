"""Operators of the library's own: each is one node of a graph, whatever its kernel does."""

from collections.abc import Callable
from typing import Any

import torch

# torch's registry: an operator is there as long as this object
_LIBRARY = torch.library.Library("fzero", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Make an operator, `torch.ops.fzero.<its name>`, and return its one overload.

    Args:
        schema: its name, arguments and results, as torch writes them.
        kernel: of every device. It has no derivative; a `torch.autograd.Function` around it may.
        fake: what it makes of tensors without values.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fzero::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.fzero, name).default
