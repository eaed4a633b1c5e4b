"""DeepSpeed's schedulers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fzero.compat.deepspeed import lr_schedules
from fzero.compat.deepspeed.lr_schedules import scheduler_of
from fzero.compat.deepspeed.settings import Section
from fzero.errors import ConfigError


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 2 * lr}]
    return torch.optim.SGD(groups, lr)


def warmup(k: int) -> float:
    """Of 4 steps to 1; `k` steps have been taken, and the iteration is `k - 1`."""
    return 0.0 if k < 1 else min(1.0, math.log(k) / math.log(4))


# the share of each rate after k steps, as DeepSpeed's own formulas have it
SHARES: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
    ("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 4}, warmup),
    (
        "WarmupDecayLR",
        {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "total_num_steps": 8},
        lambda k: warmup(k) if k < 5 else max(0.0, (8 - (k - 1)) / 4),
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2},
        lambda k: 1.0 + k / 2,
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1.0,
            "lr_range_test_step_size": 2,
            "lr_range_test_staircase": True,
        },
        lambda k: 1.0 + k // 2,
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4},
        lambda k: k / 4 if k <= 4 else max(0.0, (8 - k) / 4),
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.0,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 1,
        },
        lambda k: k // 2 / 2 if k <= 4 else 0.0,
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1.0,
            "cycle_max_lr": 3.0,
            "cycle_first_step_size": 2,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
        },
        lambda k: [1.0, 2.0, 3.0, 2.0, 1.0][k] if k <= 4 else 1 / (1 + 0.5 * (k - 4) / 2),
    ),
]


@pytest.mark.parametrize(("name", "params", "share"), SHARES)
def test_rates_are_deepspeeds(
    name: str, params: dict[str, Any], share: Callable[[int], float]
) -> None:
    opt = optimizer()
    scheduler = scheduler_of(Section(name, params), opt)
    for k in range(10):
        assert scheduler.get_last_lr() == pytest.approx([share(k)] * 2), k
        assert [group["lr"] for group in opt.param_groups] == scheduler.get_last_lr()
        scheduler.step()


def test_the_cosine_goes_down_from_the_optimizers_rates() -> None:
    opt = optimizer()
    params = {"total_num_steps": 6, "warmup_num_steps": 2, "cos_min_ratio": 0.0}
    scheduler = scheduler_of(Section("WarmupCosineLR", params), opt)
    for _ in range(3):
        scheduler.step()
    down = (1 + math.cos(math.pi / 4)) / 2
    assert scheduler.get_lr() == pytest.approx([0.5 * down, 1.0 * down])


@pytest.mark.parametrize(("name", "params", "share"), SHARES)
def test_a_scheduler_goes_on_from_its_state(
    name: str, params: dict[str, Any], share: Callable[[int], float]
) -> None:
    one, other = (scheduler_of(Section(name, params), optimizer()) for _ in range(2))
    for _ in range(3):
        one.step()
    other.load_state_dict(one.state_dict())
    one.step()
    other.step()
    assert other.get_last_lr() == one.get_last_lr() == pytest.approx([share(4)] * 2)


def test_momentum_cycles_against_the_rate_and_decays_after() -> None:
    opt = torch.optim.AdamW([torch.zeros(1)], 0.5, betas=(0.7, 0.95))
    scheduler = lr_schedules.OneCycle(
        opt, 0.0, 1.0, cycle_first_step_size=2, decay_step_size=4, decay_mom_rate=0.1,
        cycle_min_mom=0.5, cycle_max_mom=0.9,
    )  # fmt: skip
    seen = []
    for _ in range(7):
        seen.append(opt.param_groups[0]["betas"])
        scheduler.step()
    decayed = [0.9 * (1 + 0.1 * n / 4) for n in (1, 2)]
    assert [b1 for b1, _ in seen] == pytest.approx([0.5, 0.7, 0.5, 0.7, 0.9, *decayed])
    assert {b2 for _, b2 in seen} == {0.99}


def test_without_betas_the_rate_alone_cycles() -> None:
    opt = optimizer()
    scheduler = lr_schedules.OneCycle(opt, 0.0, 1.0, cycle_first_step_size=2)
    scheduler.step()
    assert scheduler.get_mom() is None
    assert "betas" not in opt.param_groups[0]


def test_each_group_may_have_rates_of_its_own() -> None:
    scheduler = lr_schedules.WarmupLR(optimizer(), [0.0, 0.1], [1.0, 2.0], 4, "linear")
    for _ in range(3):
        scheduler.step()
    assert scheduler.get_lr() == pytest.approx([0.5, 0.1 + 1.9 / 2])


def test_torchs_schedulers_are_found_by_name() -> None:
    found = scheduler_of(Section("StepLR", {"step_size": 2}), optimizer())
    assert isinstance(found, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("NoSuch", {}, "NoSuch"),
        ("WarmupLR", {"peak": 1}, "peak"),
        ("WarmupLR", {"warmup_max_lr": [1.0]}, "1 rates for 2"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 0},
            "cycle_first_step_size=0",
        ),
    ],
)
def test_what_can_not_be_honoured_is_refused(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler_of(Section(name, params), optimizer())


def test_momentum_of_each_group() -> None:
    groups = [{"params": [torch.zeros(1)]} for _ in range(2)]
    opt = torch.optim.AdamW(groups)
    lows, highs = [0.5, 0.6], [0.8, 0.9]
    scheduler = lr_schedules.OneCycle(
        opt, 0.0, 1.0, cycle_first_step_size=2, cycle_min_mom=lows, cycle_max_mom=highs
    )
    # DeepSpeed writes the least at the start, and tells what the first step will write
    assert [group["betas"][0] for group in opt.param_groups] == lows
    assert [mom for mom, _ in scheduler.get_mom() or ()] == highs
    for share in (0.5, 1.0, 0.5, 0.0):
        scheduler.step()
        expected = [high - (high - low) * share for low, high in zip(lows, highs, strict=True)]
        assert [group["betas"][0] for group in opt.param_groups] == pytest.approx(expected)
    with pytest.raises(ConfigError, match="3 rates for 2"):
        lr_schedules.OneCycle(opt, 0.0, 1.0, cycle_min_mom=[0.1] * 3)
    with pytest.raises(ConfigError, match="lr_range_test_step_size=0"):
        lr_schedules.LRRangeTest(opt, lr_range_test_step_size=0)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": 10}),
        ("WarmupDecayLR", {"warmup_num_steps": 10, "total_num_steps": 20}),
        ("WarmupCosineLR", {"warmup_num_steps": 10, "total_num_steps": 20}),
        ("LRRangeTest", {}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}),
    ],
)
def test_a_rate_that_is_a_tensor_stays_the_one_that_its_client_holds(
    name: str, params: dict[str, Any], shape: tuple[int, ...]
) -> None:
    held = torch.full(shape, 0.5, dtype=torch.float64)
    opt, plain = (torch.optim.SGD([torch.zeros(1)], lr) for lr in (held, 0.5))
    schedules = [scheduler_of(Section(name, params), one) for one in (opt, plain)]
    for _ in range(3):
        for schedule in schedules:
            schedule.step()
        assert opt.param_groups[0]["lr"] is held
        assert held.item() == plain.param_groups[0]["lr"]


def test_a_warmup_goes_to_the_rate_that_each_group_has() -> None:
    opt = optimizer(0.5)
    schedule = scheduler_of(Section("WarmupLR", {"warmup_num_steps": 10}), opt)
    schedule.step(10)
    assert [group["lr"] for group in opt.param_groups] == [0.5, 1.0]
