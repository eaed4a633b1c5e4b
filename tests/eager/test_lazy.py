"""A view of a lazy parameter is what the same view of the full parameter is, each time anew."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.eager.lazy import LazyParameter
from fzero.layout import LeafLayout, plan_layout

# those of nothing else, whose geometry is remembered, and those of arguments
VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.t(),
    lambda x: x.detach(),
    lambda x: x.conj(),
    lambda x: x.mT,
    lambda x: x[1:],
    lambda x: x[:, 1:],
    lambda x: x.unbind()[1].unsqueeze(1),
    lambda x: x.unbind(1)[0].unsqueeze(0),
    lambda x: x.view(-1, 1),
]


class Brought:
    """A source of one parameter that counts how often it is asked."""

    leaves: Sequence[LeafLayout]

    def __init__(self, full: Tensor) -> None:
        self.value, self.asked = full, 0
        self.leaves, self.device = plan_layout(["w"], [full], 2).leaves, full.device

    def full(self, index: int, /) -> Tensor:
        self.asked += 1
        return self.value

    def is_writable(self, index: int, /) -> bool:
        return False


def _viewed(x: Tensor, views: list[Callable[[Tensor], Tensor]]) -> Tensor | str:
    try:
        for view in views:
            x = view(x)
    except (RuntimeError, IndexError) as error:
        return type(error).__name__
    return x


@given(st.lists(st.sampled_from(VIEWS), min_size=1, max_size=4), st.booleans())
def test_views_of_views_are_those_of_the_full_parameter(views: Any, complexes: bool) -> None:
    dtype = torch.complex64 if complexes else torch.float32
    source = Brought(torch.randn(4, 6, dtype=dtype))
    lazy = LazyParameter(source, 0)
    for _ in range(3):
        source.value = torch.randn(4, 6, dtype=dtype)  # after a step
        here, there = _viewed(lazy, views), _viewed(source.value, views)
        if isinstance(there, str):
            assert here == there
            continue
        assert type(here) is LazyParameter
        for fact in (Tensor.size, Tensor.stride, Tensor.storage_offset):
            assert fact(here) == fact(there)
        torch.testing.assert_close(here * 1, there * 1, rtol=0, atol=0)


def test_a_view_that_was_made_before_asks_for_no_parameter() -> None:
    source = Brought(torch.randn(4, 6))
    lazy = LazyParameter(source, 0, None, True)
    for asked in (3, 1, 1):  # two views and the product; the product alone
        source.asked = 0
        torch.ones(3, 4).mm(lazy.t().t())
        assert source.asked == asked
