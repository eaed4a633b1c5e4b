"""The rates that DeepSpeed 0.19's schedulers give an optimizer, stepped after each update."""

import math
from collections.abc import Callable

import pytest
import torch

from fzero import optim
from fzero.errors import ConfigError

LOW, HIGH, TOTAL = 0.1, 0.9, 20


def _rise(kind: str, steps: int, i: int) -> float:
    length = max(2, steps)
    return i / length if kind == "linear" else math.log(i + 1) / math.log(length)


def _warmup(kind: str, steps: int) -> Callable[[int], float]:
    def rate(i: int) -> float:
        if i < 0:
            return LOW
        share = _rise(kind, steps, i) if i < max(2, steps) else 1.0
        return LOW + (HIGH - LOW) * share

    return rate


def _decay(kind: str, steps: int) -> Callable[[int], float]:
    def rate(i: int) -> float:
        if i < max(2, steps):
            return _warmup(kind, steps)(i)
        return LOW + (HIGH - LOW) * max(0.0, (TOTAL - i) / max(1.0, TOTAL - max(2, steps)))

    return rate


def _cosine(kind: str, steps: int) -> Callable[[int], float]:
    def rate(i: int) -> float:
        if i < 0:
            return 0.0
        if i < max(2, steps):
            return HIGH * (LOW + (1 - LOW) * _rise(kind, steps, i))
        done = min(1.0, (i - max(2, steps) + 1) / max(1, TOTAL - max(2, steps)))
        return HIGH * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)

    return rate


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("name", ["warmup_lr", "warmup_decay_lr", "warmup_cosine_lr"])
def test_warm_ups_have_deepspeeds_rates(name: str, kind: str, steps: int) -> None:
    schedule, rate = {
        "warmup_lr": (optim.warmup_lr(LOW, HIGH, steps, kind), _warmup(kind, steps)),
        "warmup_decay_lr": (
            optim.warmup_decay_lr(TOTAL, LOW, HIGH, steps, kind),
            _decay(kind, steps),
        ),
        "warmup_cosine_lr": (
            optim.warmup_cosine_lr(HIGH, TOTAL, LOW, steps, 0.01, kind),
            _cosine(kind, steps),
        ),
    }[name]
    found = [schedule(torch.tensor(float(step))).item() for step in range(30)]
    assert found == pytest.approx([rate(step - 1) for step in range(30)], abs=1e-12)


def test_one_cycle_has_deepspeeds_rates() -> None:
    schedule = optim.one_cycle(LOW, HIGH, 5, 7, decay_step_size=3, decay_lr_rate=0.2)

    def rate(i: int) -> float:
        if i + 1 <= 5:
            return LOW + (HIGH - LOW) * (i + 1) / 5
        if i < 12:
            return LOW + (HIGH - LOW) * (12 - (i + 1)) / 7
        return LOW / (1 + 0.2 * (i - 12 + 1) / 3)

    found = [schedule(torch.tensor(float(step))).item() for step in range(30)]
    assert found == pytest.approx([rate(step - 1) for step in range(30)], abs=1e-12)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_lr: warmup_type='cubic'"):
        optim.warmup_lr(warmup_type="cubic")
    with pytest.raises(ConfigError, match="one_cycle: cycle_first_step_size=0"):
        optim.one_cycle(0.1, 0.9, 0)
