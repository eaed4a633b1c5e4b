"""Norms of trees against norms of one long vector."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fzero.optim import tree_global_norm, tree_norm

powers = st.sampled_from([0.5, 1.0, 2.0, 3.0, 17.0, 200.0, math.inf])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=50)
@given(
    p=powers,
    leaves=st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=2), dtypes), min_size=1, max_size=4
    ),
    size=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_a_tree_is_one_long_vector(p: float, leaves: list, size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [(torch.randn(s, generator=generator) * size).to(d) for s, d in leaves]
    norm = tree_norm(tensors, p)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(_norm(tensors, p), rel=1e-4)
    if p == 2:
        assert torch.equal(norm, tree_global_norm(tensors))


def _norm(tensors: list[Tensor], p: float) -> float:
    """In Python's own numbers, scaled so that no power over- or underflows."""
    values = [abs(x) for tensor in tensors for x in tensor.double().flatten().tolist()]
    largest = max(values, default=0.0)
    if not largest or p == math.inf:
        return largest
    return largest * math.fsum((x / largest) ** p for x in values) ** (1 / p)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 7.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_no_finite_norm(p: float, bad: float) -> None:
    assert not tree_norm([torch.ones(3), torch.tensor([0.0, bad])], p).isfinite()


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 7.0, math.inf])
def test_nothing_and_zeros_have_norm_zero(p: float) -> None:
    assert tree_norm({}, p).item() == 0.0
    assert tree_norm([torch.zeros(0, 3), torch.zeros(2)], p).item() == 0.0
