"""The step function from outside: what it takes, what it gives, what it keeps."""

import pytest
import torch

from fzero.step import _checksum


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.randn(4, 3, 2).transpose(0, 2),
        torch.randn(5, dtype=torch.complex128),
        torch.randn(3, 3).to(torch.float8_e4m3fn),
        torch.randn(3, 3).bfloat16(),
    ],
    ids=lambda x: str(x.dtype),
)
def test_a_checksum_is_of_any_leaf(x: torch.Tensor) -> None:
    assert _checksum(x) == _checksum(x.clone())
    if x.numel() > 1:
        assert _checksum(x.flip(0)) != _checksum(x)
