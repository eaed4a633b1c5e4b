"""Tensors as bytes of the host's memory.

A conjugate (`z.conj()`) shares the memory of its base and differs from it by a bit of the tensor
alone, as does a negation (`z.conj().imag`): what reads or writes bytes must have neither.
"""

from torch import Tensor


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
