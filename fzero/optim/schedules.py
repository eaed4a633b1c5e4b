"""Schedules: functions from the step (0-d tensor, the first is 0) to a value (0-d float64).

They compute on tensors and in float64: nothing waits for the device, a staged-out step holds
them as a few scalar nodes, and the values equal those of a schedule in Python.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.errors import ConfigError, arguments_by_name
from fzero.optim import check
from fzero.optim.base import Schedule


@arguments_by_name
def constant(value: float) -> Schedule:
    """The same value at every step.

    Examples:
        >>> constant(0.1)(torch.tensor(7.0))
        tensor(0.1000, dtype=torch.float64)
    """
    check.finite("constant", value=value)
    return lambda step: torch.full_like(step, value, dtype=torch.float64)


@arguments_by_name
def linear(start: float, end: float, steps: int) -> Schedule:
    """A straight line from `start` to `end` over `steps` steps, then `end`.

    Examples:
        >>> warmup = linear(0.0, 1.0, 4)
        >>> [warmup(torch.tensor(float(step))).item() for step in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]
    """
    check.finite("linear", start=start, end=end)
    check.steps("linear", steps=steps)
    return lambda step: start + (end - start) * _progress(step, steps)


@arguments_by_name
def cosine(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `peak` to `end` over `steps` steps, then `end`.

    Examples:
        >>> decay = cosine(1.0, 4)
        >>> [round(decay(torch.tensor(float(step))).item(), 3) for step in (0, 1, 2, 4, 9)]
        [1.0, 0.854, 0.5, 0.0, 0.0]

    References:
        Loshchilov and Hutter, arXiv:1608.03983, eq. 5, without restarts.
    """
    check.finite("cosine", peak=peak, end=end)
    check.steps("cosine", steps=steps)

    def schedule(step: Tensor) -> Tensor:
        return end + (peak - end) * 0.5 * (1 + torch.cos(math.pi * _progress(step, steps)))

    return schedule


@arguments_by_name
def exponential(start: float, decay: float, steps: int = 1) -> Schedule:
    """`start * decay ** (step / steps)`.

    Examples:
        >>> exponential(1.0, 0.5)(torch.tensor(3.0))
        tensor(0.1250, dtype=torch.float64)
    """
    check.finite("exponential", start=start)
    check.positive("exponential", decay=decay)
    check.steps("exponential", steps=steps)
    return lambda step: start * decay ** (step.double() / steps)


@arguments_by_name
def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Schedules one after the other; each counts its steps from its own first one.

    Args:
        schedules: In order.
        boundaries: The first step of every schedule but the first, ascending.

    Raises:
        ConfigError: Boundaries that do not ascend, or not one fewer than the schedules.

    Examples:
        >>> stable_then_decay = join([constant(1.0), linear(1.0, 0.0, 2)], [10])
        >>> [stable_then_decay(torch.tensor(float(step))).item() for step in (9, 10, 11, 12)]
        [1.0, 1.0, 0.5, 0.0]
    """
    check.steps("join", **{f"boundaries[{i}]": border for i, border in enumerate(boundaries)})
    if len(boundaries) != len(schedules) - 1 or sorted(set(boundaries)) != list(boundaries):
        raise ConfigError(
            f"join: boundaries={list(boundaries)} for {len(schedules)} schedules, but there must "
            "be one fewer than schedules, in ascending order: the first step of each but the first."
        )

    def schedule(step: Tensor) -> Tensor:
        value = schedules[0](step)
        for border, following in zip(boundaries, schedules[1:], strict=True):
            # both sides are computed, later ones at negative steps; `where` drops those
            value = torch.where(step < border, value, following(step - border))
        return value

    return schedule


@arguments_by_name
def warmup_linear(
    peak: float, warmup_steps: int, total_steps: int, end: float = 0.0, start: float = 0.0
) -> Schedule:
    """Up from `start` to `peak` in `warmup_steps`, then straight down to `end` at `total_steps`.

    Examples:
        >>> lr = warmup_linear(1.0, warmup_steps=2, total_steps=6)
        >>> [lr(torch.tensor(float(step))).item() for step in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    check.finite("warmup_linear", peak=peak, end=end, start=start)
    decay_steps = _after_warmup("warmup_linear", warmup_steps, total_steps)
    return _warmup(linear(peak, end, decay_steps), start, peak, warmup_steps)


@arguments_by_name
def warmup_cosine(
    peak: float, warmup_steps: int, total_steps: int, end: float = 0.0, start: float = 0.0
) -> Schedule:
    """Up from `start` to `peak` in `warmup_steps`, then a cosine to `end` at `total_steps`.

    Args:
        peak: The highest value, at step `warmup_steps`.
        warmup_steps: Length of the linear rise; 0 for none.
        total_steps: Warm-up included; `end` from there on.
        end: The last value.
        start: The value at step 0.

    Raises:
        ConfigError: `total_steps` is not above `warmup_steps`, or a value is not finite.

    Examples:
        >>> lr = warmup_cosine(1.0, warmup_steps=2, total_steps=6)
        >>> [round(lr(torch.tensor(float(step))).item(), 3) for step in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    check.finite("warmup_cosine", peak=peak, end=end, start=start)
    decay_steps = _after_warmup("warmup_cosine", warmup_steps, total_steps)
    return _warmup(cosine(peak, decay_steps, end), start, peak, warmup_steps)


def _progress(step: Tensor, steps: int) -> Tensor:
    return (step.double() / steps).clamp(max=1.0)


def _after_warmup(where: str, warmup_steps: int, total_steps: int) -> int:
    check.steps(where, least=0, warmup_steps=warmup_steps)
    check.steps(where, total_steps=total_steps)
    if total_steps <= warmup_steps:
        raise ConfigError(
            f"{where}: total_steps={total_steps} with warmup_steps={warmup_steps}, but total_steps "
            "includes the warm-up and must be above it."
        )
    return total_steps - warmup_steps


def _warmup(decay: Schedule, start: float, peak: float, warmup_steps: int) -> Schedule:
    if warmup_steps == 0:
        return decay
    return join([linear(start, peak, warmup_steps), decay], [warmup_steps])
