"""DeepSpeed's learning-rate schedulers, over the schedules of `fzero.optim`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero import optim
from fzero.compat.deepspeed.settings import Section, number_of
from fzero.errors import ConfigError

Rates = float | Sequence[float] | None


class Scheduler:
    """Writes the rate of each param group; `step()` after each update.

    Args:
        optimizer: with `param_groups`.
        schedules: one for each group, from the number of steps so far to the rate.
        last_batch_iteration: of the run that goes on; -1: none.
    """

    def __init__(
        self,
        optimizer: Any,
        schedules: Sequence[Callable[[Tensor], Tensor]],
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer, self.schedules = optimizer, schedules
        self.last_batch_iteration = last_batch_iteration
        self._write()

    def get_lr(self) -> list[float]:
        """The rate of each group."""
        step = torch.tensor(float(self.last_batch_iteration + 1), dtype=torch.float64, device="cpu")
        return [float(schedule(step)) for schedule in self.schedules]

    def get_last_lr(self) -> list[float]:
        """What was written last."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one, or to an iteration, and write the rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The iteration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Go on from there; the rates are written by the next step, or the optimizer's own."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        write_rates(self.optimizer.param_groups, self._last_lr)


class WarmupLR(Scheduler):
    """DeepSpeed's; see `fzero.optim.warmup_lr`; without `warmup_max_lr` to each group's own."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        pairs = _pairs(optimizer, warmup_min_lr, warmup_max_lr)
        schedules = [optim.warmup_lr(a, b, warmup_num_steps, warmup_type) for a, b in pairs]
        super().__init__(optimizer, schedules, last_batch_iteration)


class WarmupDecayLR(Scheduler):
    """DeepSpeed's; see `fzero.optim.warmup_decay_lr`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        pairs = _pairs(optimizer, warmup_min_lr, warmup_max_lr)
        schedules = [
            optim.warmup_decay_lr(total_num_steps, a, b, warmup_num_steps, warmup_type)
            for a, b in pairs
        ]
        super().__init__(optimizer, schedules, last_batch_iteration)


class WarmupCosineLR(Scheduler):
    """DeepSpeed's; see `fzero.optim.warmup_cosine_lr`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        schedules = [
            optim.warmup_cosine_lr(
                lr,
                total_num_steps,
                warmup_min_ratio,
                warmup_num_steps,
                cos_min_ratio,
                warmup_type,
            )
            for lr in _each(optimizer, None)
        ]
        super().__init__(optimizer, schedules, last_batch_iteration)


class OneCycle(Scheduler):
    """DeepSpeed's: the rate goes up and down once, and momentum against it; then both may decay.

    Args:
        optimizer: with `param_groups`.
        cycle_min_lr, cycle_max_lr: at both ends of the cycle, and at its top.
        decay_lr_rate: after the cycle, `cycle_min_lr / (1 + rate * steps / decay_step_size)`.
        cycle_first_step_size, cycle_second_step_size: steps up, and down; None: as many.
        cycle_first_stair_count, cycle_second_stair_count: stairs of each half; 0: none.
        decay_step_size: steps after which the rate has fallen once more; 0: no decay.
        cycle_momentum: whether the first of a group's `betas` cycles, too; the second is 0.99 then.
        cycle_min_mom, cycle_max_mom: of the momentum at the top of the cycle, and at its ends.
        decay_mom_rate: after the cycle, `cycle_max_mom * (1 + rate * steps / decay_step_size)`.
        last_batch_iteration: of the run that goes on; -1: none.

    Raises:
        ConfigError: a number of steps, or a momentum, out of its range.

    References:
        Smith, arXiv:1803.09820; `deepspeed/runtime/lr_schedules.py` of DeepSpeed 0.19.8.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first, stairs = cycle_first_step_size, cycle_first_stair_count
        second = first if cycle_second_step_size is None else cycle_second_step_size
        down = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        if first <= 0 or second < 0:
            raise ConfigError(
                f"OneCycle: cycle_first_step_size={first} must be above 0, and "
                f"cycle_second_step_size={second} at least 0."
            )
        self._halves, self._total = ((first, stairs), (second, down)), first + second
        self._decay = decay_step_size, decay_lr_rate, decay_mom_rate
        self._moms = _pairs(optimizer, cycle_min_mom, cycle_max_mom)
        self._pairs = _pairs(optimizer, cycle_min_lr, cycle_max_lr)
        groups = optimizer.param_groups
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in groups)
        super().__init__(optimizer, (), last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The rate of each group."""
        share, past = self._share(), self._past()
        if share is None:
            fallen = 1 + self._decay[1] * past
            return [low / fallen for low, _ in self._pairs]
        return [low + (high - low) * share for low, high in self._pairs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group; None where momentum does not cycle."""
        if not self.cycle_momentum:
            return None
        share, past = self._share(), self._past()
        if share is None:
            grown = 1 + self._decay[2] * past
            return [(high * grown, 0.99) for _, high in self._moms]
        return [(high - (high - low) * share, 0.99) for low, high in self._moms]

    def _write(self) -> None:
        super()._write()
        moms = self.get_mom() or ()
        if moms and self.last_batch_iteration < 0:
            moms = [(low, 0.99) for low, _ in self._moms]  # as DeepSpeed begins
        for group, betas in zip(self.optimizer.param_groups, moms, strict=False):
            group["betas"] = betas

    def _share(self) -> float | None:
        """How far up the cycle it is, from 0 to 1; None after it."""
        if self.last_batch_iteration >= self._total:
            return None
        if self.last_batch_iteration < 0:
            return 0.0
        at = (self.last_batch_iteration + 1) % self._total
        is_up = at <= self._halves[0][0]
        steps, stairs = self._halves[not is_up]
        at = at if is_up else self._total - at
        return math.floor(at * stairs / steps) / stairs if stairs > 0 else at / steps

    def _past(self) -> float:
        """How often rates have decayed since the cycle, fractions included."""
        steps = self._decay[0]
        return (self.last_batch_iteration - self._total + 1) / steps if steps else 0.0


class LRRangeTest(Scheduler):
    """DeepSpeed's: from a least rate up by a share of it every so many steps."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        if lr_range_test_step_size <= 0:
            raise ConfigError(
                f"LRRangeTest: lr_range_test_step_size={lr_range_test_step_size} must be above 0."
            )

        def of(low: float) -> Callable[[Tensor], Tensor]:
            def schedule(step: Tensor) -> Tensor:
                passed = step / lr_range_test_step_size
                stairs = passed.floor() if lr_range_test_staircase else passed
                return low * (1 + lr_range_test_step_rate * stairs)

            return schedule

        lows = _each(optimizer, lr_range_test_min_lr)
        super().__init__(optimizer, [of(low) for low in lows], last_batch_iteration)


BY_NAME: dict[str, type[Scheduler]] = {
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
    "WarmupCosineLR": WarmupCosineLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupLR": WarmupLR,
}


def scheduler_of(section: Section, optimizer: Any) -> Any:
    """The scheduler of a configuration's section: one of the above, or of torch.

    Raises:
        ConfigError: there is none of that name, or it does not take these arguments.
    """
    kind: Any = BY_NAME.get(section.type)
    kind = kind or getattr(torch.optim.lr_scheduler, section.type, None)
    if kind is None:
        raise ConfigError(
            f"scheduler.type = {section.type!r}: must be one of {', '.join(BY_NAME)}, or of "
            "torch.optim.lr_scheduler."
        )
    try:
        return kind(optimizer, **section.params)
    except TypeError as error:
        raise ConfigError(f"scheduler.params of {section.type}: {error}.") from error


def write_rates(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """Write the rate of each group; a tensor, which its client may hold, stays the same one."""
    for group, lr in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _each(optimizer: Any, given: Rates) -> list[float]:
    groups = optimizer.param_groups
    if given is None:
        return [number_of(f"param_groups[{i}]['lr']", g["lr"]) for i, g in enumerate(groups)]
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [number_of("a scheduler's rate", given)] * len(groups)
    if len(given) != len(groups):
        raise ConfigError(f"a scheduler has {len(given)} rates for {len(groups)} param groups.")
    return [number_of("a scheduler's rate", x) for x in given]


def _pairs(optimizer: Any, low: Rates, high: Rates) -> list[tuple[float, float]]:
    pairs = list(zip(_each(optimizer, low), _each(optimizer, high), strict=True))
    if not all(map(math.isfinite, [x for pair in pairs for x in pair])):
        raise ConfigError(f"a scheduler's rates must be finite, and are {pairs}.")
    return pairs
