import pytest
import torch
from torch import Tensor

from fzero.numerics.bits import bits, same_bits

INF, NAN = torch.inf, torch.nan
FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16]
FLOATS += [torch.float32, torch.float64]


def _numbers(dtype: torch.dtype) -> list[Tensor]:
    info = torch.finfo(dtype)
    found = [torch.tensor(x, dtype=torch.float64).to(dtype) for x in (0.0, -0.0, 1.0, NAN)]
    return [*found, torch.tensor(info.max, dtype=torch.float64).to(dtype)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_same_numbers_alone_have_the_same_bits(dtype: torch.dtype) -> None:
    numbers = _numbers(dtype)
    if dtype != torch.float8_e4m3fn:  # which has no infinity
        numbers.append(torch.tensor(INF, dtype=dtype))
    found = [[same_bits(a, b.clone()) for b in numbers] for a in numbers]
    assert found == [[i == j for j in range(len(numbers))] for i in range(len(numbers))]


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_lazy_bits_of_complex_numbers_count(dtype: torch.dtype) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j], dtype=dtype)
    assert same_bits(x.conj(), x.conj().resolve_conj())
    assert not same_bits(x.conj(), x)
    assert same_bits(x.conj().imag, -x.imag)
    assert bits(x).shape == (2, 2)


def test_any_strides_and_dtypes_are_compared() -> None:
    x = torch.arange(6).view(2, 3)
    assert same_bits(x.T, x.T.contiguous())
    assert not same_bits(x, x.int())
    assert not same_bits(x, x.T)
    assert same_bits(torch.tensor([True]), torch.tensor([True]))
    assert same_bits(torch.nn.Parameter(torch.ones(2)), torch.ones(2))
