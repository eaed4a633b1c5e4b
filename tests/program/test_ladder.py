"""Plans of recomputation beside the best of all, on graphs small enough to try them all."""

import itertools
from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fzero.program.hardware import CPU
from fzero.program.ladder import RUNGS, Ladder, knapsack
from tests.program.passes.test_recompute import before_the_pass
from tests.program.test_liveness import laid


@given(
    offers=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 99), st.integers(1, 4)), min_size=1, max_size=4
    ),
    missing=st.integers(1, 300),
)
def test_a_knapsack_frees_what_is_missing_for_the_least_work(
    offers: list[tuple[int, int, int]], missing: int
) -> None:
    found = knapsack(offers, missing)
    every = itertools.product(*(range(count + 1) for *_, count in offers))
    enough = [counts for counts in every if _sum(counts, offers, 0) >= missing]
    if not enough:
        assert found is None
        return
    assert found is not None
    assert tuple(found) in enough
    assert _sum(found, offers, 1) == min(_sum(counts, offers, 1) for counts in enough)


@given(offer=st.tuples(st.integers(10**6, 10**9), st.integers(1, 99)), missing=st.floats(0.01, 40))
def test_bytes_by_the_million_are_freed_too(offer: tuple[int, int], missing: float) -> None:
    wanted = max(int(offer[0] * missing), 1)
    (count,) = knapsack([(*offer, 100)], wanted) or [0]
    assert count * offer[0] >= wanted
    # of each a grain may be lost: one less does not free enough
    assert (count - 1) * (offer[0] - wanted / 2048 - 1) < wanted


def apart(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Products that are made again one without another."""
    return sum((torch.tanh(x @ w).square().sum() for w in params.values()), x.new_zeros(()))


def chain(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Products that are made again one from another."""
    for w in params.values():
        x = torch.tanh(x @ w)
    return x.square().sum()


def residual(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Two products a layer, and a sum that all layers go on with."""
    for w in params.values():
        x = x + torch.tanh(x @ w) @ w.t()
    return x.square().sum()


@settings(max_examples=8)
@given(
    fn=st.sampled_from([apart, chain, residual]),
    widths=st.lists(st.sampled_from([3, 8, 21, 40]), min_size=2, max_size=7),
)
def test_a_plan_of_products_takes_no_more_work_than_the_best(
    fn: Callable[[dict[str, Tensor], Tensor], Tensor], widths: list[int]
) -> None:
    """Of all sets of values that could be saved: what Checkmate's integer program finds."""
    widths = widths[: {apart: 7, chain: 6, residual: 3}[fn]]
    first = [4, *widths] if fn is chain else [4] * len(widths)
    params = {f"w{i}": torch.ones(first[i], width) for i, width in enumerate(widths)}
    ladder = Ladder(laid(before_the_pass(fn, params, stage=0)), regather=False, hardware=CPU)
    read = sorted(ladder.model.read)
    every = [
        ladder.model.under(frozenset(saved))
        for count in range(len(read) + 1)
        for saved in itertools.combinations(read, count)
    ]
    for rung in range(0, RUNGS + 1, RUNGS // 8):
        fits = [alive for alive in every if alive.peak <= ladder.target(rung)]
        plan = ladder.plan(rung)
        assert plan.peak <= ladder.target(rung)
        assert plan.flops <= min(alive.flops for alive in fits)


def _sum(counts: Sequence[int], offers: Sequence[tuple[int, int, int]], which: int) -> int:
    return sum(n * offer[which] for n, offer in zip(counts, offers, strict=True))
