"""`torch.nn.functional.grouped_mm`, which mixtures of experts call, in every dtype it has.

Torch's fake kernel of it wants bfloat16, where its kernels for a CPU take float32 and float16, too.
So what is recorded in another one calls an operator of this package: the same kernel, with a fake
one that tells the same shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fzero.functional.remat import is_recording
from fzero.operators import define


def recordable(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch._grouped_mm`, which a recording can hold in other dtypes than bfloat16."""

    def grouped_mm(
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        ours = a.dtype == b.dtype != torch.bfloat16 and bias is None
        if not ours or not is_recording() or out_dtype not in (None, a.dtype):
            return original(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
        return _Grouped.apply(a, b, offs)  # pyright: ignore[reportReturnType]

    return grouped_mm


class _Grouped(Function):
    """The derivatives are such products again, whichever of the two has a dimension of groups."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
        return torch.ops.fzero.grouped_mm(a, b, offs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b, offs = ctx.saved_tensors
        # without a gradient of an expanded scalar, whose strides the kernel refuses
        grad = grad.contiguous()
        return (
            _Grouped.apply(grad, b.transpose(-2, -1), offs),
            _Grouped.apply(a.transpose(-2, -1), grad, offs),
            None,
        )


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    # its rows are padded to 16 bytes, in memory that is the kernel's own
    return torch.ops.aten._grouped_mm(a, b, offs).contiguous()


def _fake(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    groups: tuple[int, ...] = ()
    if a.dim() == b.dim():  # of two matrices the inner dim is divided
        groups = (a.shape[0],) if offs is None or a.dim() == 3 else (offs.shape[0],)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


define("grouped_mm(Tensor a, Tensor b, Tensor? offs) -> Tensor", _grouped_mm, _fake)
