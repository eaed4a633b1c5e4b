"""A view of a lazy parameter is what the same view of the full parameter is, each time anew."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.eager.lazy import LazyParameter
from fzero.layout import LeafLayout, plan_layout
from tests.ranks import run_ranks

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


class _Keeps(torch.autograd.Function):
    """A user's function, which keeps a view that its backward made."""

    kept: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        _Keeps.kept.append(ctx.weight.t())
        return grad @ ctx.weight, None


@pytest.mark.parametrize("graph", [False, True])
def test_autograds_own_nodes_make_no_lazy_view_in_a_backward_that_records_nothing(
    graph: bool,
) -> None:
    source = Brought(torch.randn(4, 6))
    lazy = LazyParameter(source, 0, None, True)
    x = torch.randn(3, 6, requires_grad=True)
    loss = torch.nn.functional.linear(x, lazy).square().sum()
    with mock.patch("fzero.eager.lazy._view", side_effect=AssertionError):
        if graph:  # what it computes with may be differentiated again, so it is lazy
            with pytest.raises(AssertionError):
                torch.autograd.grad(loss, x, create_graph=True)
            return
        (grad,) = torch.autograd.grad(loss, x)
    full = source.value
    torch.testing.assert_close(grad, 2 * x.detach() @ full.t() @ full)


def test_a_view_that_a_users_backward_or_hook_makes_is_lazy() -> None:
    source = Brought(torch.randn(4, 6))
    lazy = LazyParameter(source, 0, None, True)
    x = torch.randn(3, 6, requires_grad=True)
    y = _Keeps.apply(x, lazy)
    y.register_hook(lambda grad: _Keeps.kept.append(lazy.t()))  # pyright: ignore
    y.sum().backward()
    assert [type(view) for view in _Keeps.kept] == [LazyParameter, LazyParameter]
    _Keeps.kept.clear()


WAYS: list[Callable[[Tensor], Tensor]] = [
    lambda w: w.t(),
    lambda w: w.view(-1),
    lambda w: w.t().contiguous(),
    lambda w: w.t().reshape(-1),
    lambda w: w * 2,
]


def _under_inference_mode_inside() -> list[bool]:
    cfg, right = fzero.Config(stage=3, executor="eager"), list[bool]()
    w, x = torch.arange(12.0).view(4, 3), torch.ones(2)
    for how in WAYS:

        def fn(params: Any, x: Tensor, how: Callable[[Tensor], Tensor] = how) -> Tensor:
            with torch.inference_mode():
                teacher = how(params["w"]).sum()
            return how(params["w"]).square().sum() + teacher.clone() * x.sum()

        found = fzero.sharded(fn, cfg)(fzero.shard({"w": w}, cfg), x)
        right.append(torch.equal(found, fn({"w": w}, x)))
    return right


def test_leaves_are_read_under_inference_mode_inside_a_function() -> None:
    """What is gathered there is read outside of it, too."""
    assert run_ranks(2, _under_inference_mode_inside) == [[True] * len(WAYS)] * 2


def _dtype_under_autocast() -> torch.dtype:
    def fn(params: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            return torch.einsum("bi,i->b", x, params["w"]).clone()

    cfg = fzero.Config(stage=3, executor="eager")
    sharded = fzero.shard({"w": torch.full((4,), 1 + 2**-10)}, cfg)
    return fzero.sharded(fn, cfg)(sharded, torch.ones(2, 4)).dtype


def test_autocast_sees_what_operators_on_leaves_are_made_of() -> None:
    assert run_ranks(2, _dtype_under_autocast) == [torch.bfloat16] * 2
