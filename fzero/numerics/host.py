"""Tensors as bytes of the host's memory.

A conjugate (`z.conj()`) shares the memory of its base and differs from it by a bit of the tensor
alone, as does a negation (`z.conj().imag`): what reads or writes bytes must have neither.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# what safetensors calls a dtype; others are bytes there
# https://huggingface.co/docs/safetensors/index#format
ST_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


def on_host(x: Tensor) -> Tensor:
    """The values of a strided tensor, outside of autograd, row by row in the host's memory.

    Where they lie so already it is that memory.

    >>> import torch
    >>> z = torch.tensor([1 + 2j])
    >>> z.conj().is_contiguous(), torch.view_as_real(on_host(z.conj()))
    (True, tensor([[ 1., -2.]]))
    """
    return x.detach().cpu().contiguous().resolve_conj().resolve_neg()


def is_on_host(x: Tensor) -> bool:
    """Whether its bytes in the host's memory, row by row, are its values.

    >>> import torch
    >>> z = torch.tensor([1 + 2j])
    >>> is_on_host(z), is_on_host(z.conj()), is_on_host(z.conj().imag), is_on_host(z.expand(2))
    (True, False, False, False)
    """
    lazy = x.is_conj() or x.is_neg()
    return x.device.type == "cpu" and x.is_contiguous() and not lazy


def strided_parts(x: Tensor) -> list[Tensor]:
    """The strided tensors in which the values of a strided, sparse or nested one lie.

    With its shape they say what it is: indices and values of a sparse one, the rows of a nested
    one; outside of autograd. A tensor of meta has no values, and none of them.

    >>> import torch
    >>> strided_parts(torch.tensor([0.0, 5.0]).to_sparse())
    [tensor([[1]]), tensor([5.])]
    >>> strided_parts(torch.ones(2, device="meta"))
    []
    """
    x = x.detach()
    if x.is_meta:
        return []
    if is_traceable_wrapper_subclass(x):
        names, _ = x.__tensor_flatten__()
        return [part for name in names for part in strided_parts(getattr(x, name))]
    if x.layout == torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    if x.is_nested:
        return list(x.unbind())
    return [x]
