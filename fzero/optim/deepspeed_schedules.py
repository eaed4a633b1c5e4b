"""The schedules of DeepSpeed's config files, under its names and with its numbers.

DeepSpeed steps a scheduler after each update: update n runs at the scheduler's iteration n - 1, and
the first one at the rate that the scheduler starts with. So it is here.
"""

import math

import torch
from torch import Tensor

from fzero.errors import ConfigError, arguments_by_name
from fzero.optim import check
from fzero.optim.base import Schedule


@arguments_by_name
def warmup_lr(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    """DeepSpeed's WarmupLR: up from the least rate to the largest, then that.

    Args:
        warmup_min_lr: Of the first two updates.
        warmup_max_lr: From iteration `warmup_num_steps` on.
        warmup_num_steps: Length of the rise; 1 counts as 2.
        warmup_type: "log": by `log(iteration + 1) / log(warmup_num_steps)`; or "linear".

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> lr = warmup_lr(0.0, 1.0, warmup_num_steps=4)
        >>> [round(lr(torch.tensor(float(step))).item(), 3) for step in (0, 1, 2, 4, 9)]
        [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    check.finite("warmup_lr", warmup_min_lr=warmup_min_lr, warmup_max_lr=warmup_max_lr)
    rise = _rise("warmup_lr", warmup_num_steps, warmup_type)

    def schedule(step: Tensor) -> Tensor:
        share = torch.where(step < max(2, warmup_num_steps), rise(step), 1.0)
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share

    return _after(warmup_min_lr, schedule)


@arguments_by_name
def warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    """DeepSpeed's WarmupDecayLR: `warmup_lr`, then straight down to the least at the last step.

    Args:
        total_num_steps: Warm-up included.
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type: See `warmup_lr`.

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> lr = warmup_decay_lr(6, 0.0, 1.0, warmup_num_steps=2, warmup_type="linear")
        >>> [lr(torch.tensor(float(step))).item() for step in (0, 1, 2, 3, 5, 7, 9)]
        [0.0, 0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    check.finite("warmup_decay_lr", warmup_min_lr=warmup_min_lr, warmup_max_lr=warmup_max_lr)
    check.steps("warmup_decay_lr", total_num_steps=total_num_steps)
    rise = _rise("warmup_decay_lr", warmup_num_steps, warmup_type)
    border = max(2, warmup_num_steps)

    def schedule(step: Tensor) -> Tensor:
        left = (total_num_steps - step.double()) / max(1.0, total_num_steps - border)
        share = torch.where(step < border, rise(step), left.clamp(min=0.0))
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share

    return _after(warmup_min_lr, schedule)


@arguments_by_name
def warmup_cosine_lr(
    lr: float,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 1e-4,
    warmup_type: str = "log",
) -> Schedule:
    """DeepSpeed's WarmupCosineLR: up to `lr`, then half a cosine down to a share of it.

    Args:
        lr: The largest rate; in DeepSpeed that of the optimizer.
        total_num_steps: Warm-up included.
        warmup_min_ratio: Share of `lr` at the second update; at the first it is 0.
        warmup_num_steps: Length of the rise; 1 counts as 2.
        cos_min_ratio: Share of `lr` at the last step, and after it.
        warmup_type: "log" or "linear"; see `warmup_lr`.

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> schedule = warmup_cosine_lr(1.0, 6, 0.0, 2, 0.0, "linear")
        >>> [round(schedule(torch.tensor(float(step))).item(), 3) for step in (0, 1, 2, 3, 5)]
        [0.0, 0.0, 0.5, 0.854, 0.146]
    """
    check.finite("warmup_cosine_lr", warmup_min_ratio=warmup_min_ratio, cos_min_ratio=cos_min_ratio)
    check.non_negative("warmup_cosine_lr", lr=lr)
    check.steps("warmup_cosine_lr", total_num_steps=total_num_steps)
    rise = _rise("warmup_cosine_lr", warmup_num_steps, warmup_type)
    border = max(2, warmup_num_steps)

    def schedule(step: Tensor) -> Tensor:
        up = warmup_min_ratio + (1.0 - warmup_min_ratio) * rise(step)
        # its first step down is one into the cosine
        done = ((step.double() - border + 1) / max(1, total_num_steps - border)).clamp(max=1.0)
        down = (1 + torch.cos(math.pi * done)) / 2
        down = (cos_min_ratio + (1.0 - cos_min_ratio) * down).clamp(min=0.0)
        return lr * torch.where(step < border, up, down)

    return _after(0.0, schedule)


@arguments_by_name
def one_cycle(
    cycle_min_lr: float,
    cycle_max_lr: float,
    cycle_first_step_size: float = 2000,
    cycle_second_step_size: float | None = None,
    decay_step_size: float = 0,
    decay_lr_rate: float = 0.0,
) -> Schedule:
    """DeepSpeed's OneCycle, its learning rate: up and down once, then decay.

    Its momentum, which falls while the rate rises, and its stairs have no counterpart here.

    Args:
        cycle_min_lr: At both ends of the cycle.
        cycle_max_lr: At its top.
        cycle_first_step_size: Steps up.
        cycle_second_step_size: Steps down; None: as many.
        decay_step_size: Steps after which the rate has fallen once more; 0 for no decay.
        decay_lr_rate: After the cycle, `cycle_min_lr / (1 + rate * steps / decay_step_size)`.

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> lr = one_cycle(0.0, 1.0, cycle_first_step_size=4)
        >>> [lr(torch.tensor(float(step))).item() for step in (0, 1, 2, 4, 6, 8, 9)]
        [0.0, 0.25, 0.5, 1.0, 0.5, 0.0, 0.0]

    References:
        Smith, arXiv:1803.09820.
    """
    first = cycle_first_step_size
    second = first if cycle_second_step_size is None else cycle_second_step_size
    check.finite("one_cycle", cycle_min_lr=cycle_min_lr, cycle_max_lr=cycle_max_lr)
    check.positive("one_cycle", cycle_first_step_size=first, cycle_second_step_size=second)
    check.non_negative("one_cycle", decay_step_size=decay_step_size, decay_lr_rate=decay_lr_rate)
    total = first + second

    def schedule(step: Tensor) -> Tensor:
        position = (step.double() + 1) % total  # the last step of the cycle is its end
        share = torch.where(position <= first, position / first, (total - position) / second)
        within = cycle_min_lr + (cycle_max_lr - cycle_min_lr) * share
        after = torch.full_like(within, cycle_min_lr)
        if decay_step_size and decay_lr_rate:
            steps = (step.double() - total + 1) / decay_step_size
            after = cycle_min_lr / (1 + decay_lr_rate * steps)
        return torch.where(step < total, within, after)

    return _after(cycle_min_lr, schedule)


def _after(first: float, schedule: Schedule) -> Schedule:
    """`first` at the first update; then the schedule of iterations, which lag behind by one."""
    return lambda step: torch.where(step < 1, first, schedule((step - 1).clamp(min=0)))


def _rise(where: str, steps: int, kind: str) -> Schedule:
    check.steps(where, warmup_num_steps=steps)
    if kind not in ("log", "linear"):
        raise ConfigError(f"{where}: warmup_type={kind!r}, but it must be 'log' or 'linear'.")
    length = max(2, steps)
    if kind == "linear":
        return lambda step: step.double() / length
    return lambda step: torch.log(step.double() + 1) / math.log(length)
