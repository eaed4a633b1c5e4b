"""The order of samples: a permutation an epoch, a function of the step, the same at any world."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import fzero
from fzero.checkpoint import sample_order


@settings(max_examples=50)
@given(samples=st.integers(1, 300), batch=st.integers(1, 40), seed=st.integers(0, 2**40))
@pytest.mark.slow
def test_every_epoch_sees_every_sample_once(samples: int, batch: int, seed: int) -> None:
    steps = -(-3 * samples // batch)
    order = torch.cat(
        [sample_order(s, samples=samples, batch=batch, seed=seed) for s in range(steps)]
    )
    epochs = order[: 3 * samples].view(3, samples)
    assert torch.equal(epochs.sort(1).values, torch.arange(samples).expand(3, -1))
    if samples > 20:
        assert not torch.equal(epochs[0], epochs[1])
        assert not torch.equal(epochs[0], torch.arange(samples))


@settings(max_examples=25)
@given(step=st.integers(0, 10**9), samples=st.integers(1, 10**12), seed=st.integers(0, 2**40))
def test_any_world_shares_the_same_batch(step: int, samples: int, seed: int) -> None:
    whole = sample_order(step, samples=samples, batch=12, seed=seed)
    for world in (2, 3, 4):
        parts = [
            sample_order(step, samples=samples, batch=12, seed=seed, rank=rank, world=world)
            for rank in range(world)
        ]
        assert torch.equal(torch.cat(parts), whole)
    assert whole.min() >= 0
    assert whole.max() < samples


def test_the_order_looks_random() -> None:
    order = sample_order(0, samples=10_000, batch=10_000, seed=1)
    place = torch.arange(10_000)
    stacked = torch.stack([place, order, order.roll(1)]).double()
    correlation = torch.corrcoef(stacked) - torch.eye(3, dtype=torch.float64)
    assert correlation.abs().max() < 0.05
    assert not torch.equal(order, sample_order(0, samples=10_000, batch=10_000, seed=2))


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"samples": 0}, {"batch": 5, "world": 2}, {"rank": 1}, {"step": -1}]
)
def test_wrong_values_are_named(wrong: dict[str, int]) -> None:
    args = {"step": 0, "samples": 10, "batch": 4} | wrong
    with pytest.raises(fzero.ConfigError, match=next(iter(wrong))):
        sample_order(args.pop("step"), **args)
