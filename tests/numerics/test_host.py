"""What is taken for bytes is the values, whatever torch puts off."""

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from fzero.numerics.host import is_on_host, on_host

VIEWS = {
    "itself": lambda x: x,
    "conjugate": Tensor.conj,
    "real part": lambda x: x.conj().real,
    "imaginary part": lambda x: x.conj().imag,
    "negation": torch._neg_view,
    "transposed": lambda x: x.mT,
    "adjoint": lambda x: x.mH,
    "row": lambda x: x[0],
    "one": lambda x: x.conj().imag[0, 0],
    "expanded": lambda x: x[:1].expand(3, -1),
}


@given(view=st.sampled_from(list(VIEWS)), again=st.sampled_from(["itself", "negation"]))
def test_bytes_on_the_host_are_the_values(view: str, again: str) -> None:
    x = torch.complex(torch.randn(3, 3), torch.randn(3, 3)).requires_grad_()
    y = VIEWS[again](VIEWS[view](x))
    found = on_host(y)
    assert torch.equal(found, y)
    assert is_on_host(found)
    assert not found.requires_grad
    # by what reads bytes and knows of nothing else
    wanted = torch.empty(y.shape, dtype=y.dtype).copy_(y.detach())
    assert bytes(found.flatten().view(torch.uint8).numpy()) == bytes(
        wanted.flatten().view(torch.uint8).numpy()
    )
    # what is there already is not copied
    assert is_on_host(y) == (found.data_ptr() == y.data_ptr())
