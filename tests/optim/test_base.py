"""Two functions are an optimizer: elementwise, and without a step in place of its own."""

import math
from typing import Any

import pytest
import torch

import fzero
from fzero import optim


def test_two_functions_are_an_optimizer() -> None:
    halve = optim.Optimizer(
        lambda params: (), lambda grads, state, params=None, **_: (grads, state)
    )
    assert halve.apply_ is None
    assert not halve.foreign  # it is given shards, not whole leaves
    params = [torch.ones(2)]
    made = optim.as_optimizer(halve)
    assert not made.foreign
    assert made.apply_ is not None
    made.apply_([torch.full((2,), 0.5)], made.init(params), params)
    assert torch.equal(params[0], torch.full((2,), 1.5))


@pytest.mark.parametrize(
    "schedule",
    [lambda t: 1e-3 if t < 10 else 1e-4, lambda t: 1e-3 * math.cos(t), lambda t: 1.0 / float(t)],
)
def test_a_schedule_that_reads_its_step_is_named(schedule: Any) -> None:
    """And not the model function, which may be as it is."""
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(schedule))
    state = step_fn.init({"w": torch.ones(3)})
    with pytest.raises(fzero.TraceError, match=r"the schedule .*<lambda> reads the value .*join"):
        step_fn(*state, torch.ones(3))


def _step(opt: optim.Optimizer, executor: Any) -> dict[str, torch.Tensor]:
    cfg = fzero.Config(executor=executor)
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), opt, cfg)
    params, _ = step_fn(*step_fn.init({"w": torch.ones(3)}), torch.ones(3))
    return fzero.unshard(params)


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda t: None, "NoneType"),
        (lambda t: "x", "str"),
        (lambda t: t.reshape(1), r"tensor of shape \(1,\)"),
    ],
)
@pytest.mark.parametrize("make", [optim.sgd, optim.inject_hyperparams(optim.adam)])
def test_a_schedule_that_gives_no_number_is_named(
    make: Any, given: Any, said: str, executor: Any
) -> None:
    with pytest.raises(fzero.ConfigError, match=rf"the schedule .*<lambda> gave a {said}"):
        _step(make(given), executor)


def test_a_schedule_may_give_a_number() -> None:
    for executor in ("traced", "eager"):
        assert _step(optim.sgd(lambda step: 0.5), executor)["w"].tolist() == [0.5] * 3
