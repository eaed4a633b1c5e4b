"""Results that are computed straight into the buffer of the collective that takes them away.

[Note: placed results] What fills a buffer reads gradients and copies them. Where a gradient's last
operator can be told where to put its result, `buckets.buffer_of` makes the buffer before it runs,
`placed` runs it on its part, and the function that fills the buffer is left with the others. A node
of `placed` has the promise of the operator that it runs, and is asked for it by `operator_of`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

LAID = "laid"
"""What a node that fills memory which travels nowhere has in `meta`: its bucket. See `lay`."""

Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and first element in a buffer."""


def placed(buffer: Tensor, place: Place, operator: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What an operator of `INTO` returns, computed into its place in a buffer."""
    result = buffer.as_strided(*place)
    INTO[operator](*args, **kwargs, out=result)
    return result


def _cast_into(x: Tensor, *, out: Tensor, **_: Any) -> None:
    out.copy_(x)


_aten = torch.ops.aten
INTO: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.mm.default: torch.mm,
        _aten.addmm.default: torch.addmm,
        _aten.bmm.default: torch.bmm,
        _aten.sum.dim_IntList: torch.sum,
        _aten.add.Tensor: torch.add,
        _aten.mul.Tensor: torch.mul,
        _aten.div.Tensor: torch.div,
        _aten._to_copy.default: _cast_into,
    }
)
"""Operators whose kernels write where they are told, and how they are told. Most others have such a
form as well, which makes a result of its own and copies it. Torch's own functions, as an overload's
takes a microsecond more: see `bindings`."""


def operator_of(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The operator that a node runs, and its positional arguments."""
    if node.target is placed:
        return node.args[2], node.args[3:]
    return node.target, node.args


def is_placed_cast(node: fx.Node) -> bool:
    """Whether a node casts a value into its place."""
    return operator_of(node)[0] is _CAST and node.target is placed


_CAST = _aten._to_copy.default
