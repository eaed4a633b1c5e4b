"""What is taken for bytes is the values, whatever torch puts off."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fzero.numerics.host import is_on_host, on_host, strided_parts

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


DENSE = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
LAYOUTS = {
    "strided": lambda x: x,
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((1, 1)),
    "bsc": lambda x: x.to_sparse_bsc((1, 1)),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :1]], layout=torch.jagged),
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_strided_and_hold_the_values(layout: str) -> None:
    make = LAYOUTS[layout]
    one, same = strided_parts(make(DENSE.clone())), strided_parts(make(DENSE.clone()))
    assert one
    assert all(type(x) is Tensor and x.layout == torch.strided for x in one)
    assert not any(x.requires_grad for x in one)
    assert all(map(torch.equal, one, same))
    for other in (DENSE * 3, DENSE.flip(0)):  # of a sparse one the second has other indices
        found = strided_parts(make(other))
        assert len(found) != len(one) or not all(map(torch.equal, one, found))
