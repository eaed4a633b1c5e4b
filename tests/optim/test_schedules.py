"""Schedules: their values, and that they stay on tensors."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import optim
from fzero.errors import ConfigError

SCHEDULES = {
    "constant": (optim.constant(0.3), lambda s: 0.3),
    "linear": (optim.linear(1.0, 0.2, 7), lambda s: 1 - 0.8 * min(1, s / 7)),
    "cosine": (
        optim.cosine(2.0, 7, end=0.5),
        lambda s: 0.5 + 0.75 * (1 + math.cos(math.pi * min(1, s / 7))),
    ),
    "exponential": (optim.exponential(2.0, 0.5, 3), lambda s: 2 * 0.5 ** (s / 3)),
    "join": (
        optim.join([optim.linear(0, 1, 2), optim.constant(1), optim.linear(1, 0, 4)], [2, 5]),
        lambda s: s / 2 if s < 2 else 1 if s < 5 else max(0, 1 - (s - 5) / 4),
    ),
    "warmup_linear": (
        optim.warmup_linear(1.0, 3, 9, end=0.4, start=0.1),
        lambda s: 0.1 + 0.9 * s / 3 if s < 3 else 1 - 0.6 * min(1, (s - 3) / 6),
    ),
    "warmup_cosine": (
        optim.warmup_cosine(1.0, 3, 9),
        lambda s: s / 3 if s < 3 else 0.5 * (1 + math.cos(math.pi * min(1, (s - 3) / 6))),
    ),
    "no warm-up": (
        optim.warmup_cosine(1.0, 0, 4),
        lambda s: 0.5 * (1 + math.cos(math.pi * min(1, s / 4))),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_values(name):
    schedule, expected = SCHEDULES[name]
    found = [schedule(torch.tensor(float(step))) for step in range(15)]
    assert [value.shape for value in found] == [()] * 15
    assert {value.dtype for value in found} == {torch.float64}
    assert [value.item() for value in found] == pytest.approx(
        [expected(step) for step in range(15)], rel=1e-14, abs=1e-14
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_staged_out_schedule_still_follows_the_step(name):
    schedule, _ = SCHEDULES[name]
    program = make_fx(schedule, tracing_mode="fake")(torch.tensor(0.0))
    for step in (0.0, 1.0, 4.0, 20.0):
        assert torch.equal(program(torch.tensor(step)), schedule(torch.tensor(step)))


def test_the_first_update_sees_step_zero():
    seen = []

    def schedule(step):
        seen.append(step.item())
        return 0.1 * torch.ones(())

    params = [torch.ones(1)]
    for opt in (optim.sgd(schedule), optim.adamw(schedule), optim.lion(schedule)):
        seen.clear()
        _, state = opt.update(params, opt.init(params), params)
        opt.apply_(params, state, params)
        assert seen == [0, 1]


def test_a_schedule_may_return_a_number():
    params = [torch.ones(1)]
    for make in (optim.sgd, optim.adam, optim.lion):
        opt, plain = make(lambda step: 0.1), make(0.1)
        updates, _ = opt.update(params, opt.init(params), params)
        assert torch.equal(updates[0], plain.update(params, plain.init(params), params)[0][0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.linear(0, 1, 0), "linear: steps=0.*whole number >= 1"),
        (lambda: optim.cosine(float("nan"), 3), "cosine: peak=nan.*finite"),
        (lambda: optim.exponential(1.0, 0.0), "exponential: decay=0.0.*> 0"),
        (lambda: optim.constant("0.1"), "constant: value='0.1'"),
        (lambda: optim.warmup_cosine(1.0, 5, 5), "total_steps=5 with warmup_steps=5"),
        (lambda: optim.warmup_linear(1.0, -1, 5), "warmup_linear: warmup_steps=-1"),
        (lambda: optim.join([optim.constant(1)], [2]), r"boundaries=\[2\] for 1 schedules"),
        (lambda: optim.join([optim.constant(1)] * 3, [4, 2]), r"boundaries=\[4, 2\].*ascending"),
    ],
)
def test_what_is_not_allowed_is_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
