"""Loss scaling as a pure state machine.

Small fp16 gradients vanish; scaling the loss up moves them into range. A dynamic scale grows until
gradients overflow and then backs off. The whole rule is tensor arithmetic on three scalars: no
value is read back by the host, so a step with a loss scale stages out like any other.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.errors import ConfigError, FzeroError, fields_by_name


@fields_by_name
@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled.

    Args:
        init: the first scale; the only one if not `dynamic`.
        dynamic: follow overflows by the rule of `update`.
        growth: factor after `window` good steps in a row, > 1.
        backoff: factor after an overflow, between 0 and 1.
        window: steps without overflow before the scale grows.
        hysteresis: overflows since the last growth from which on the scale backs off; 1 backs off
            at the first.
        minimum: the scale never backs off below this; see `exhausted`.
        settle: steps without overflow, at the start and after an overflow, before those that
            `window` counts; 1 in DeepSpeed.
        stops: whether an overflow that finds the scale at its `minimum` raises; else its step is
            skipped as any other.
        external: whoever computes the loss has multiplied it by the scale already. The step only
            divides by it, the reported loss too, and never changes it; `init` is the first one,
            and others go into the state: `state.loss_scale._replace(scale=torch.tensor(512.0))`.

    Raises:
        ConfigError: a value outside its range, or `init` below `minimum`.

    Examples:
        >>> LossScale(window=200).init
        65536.0
        >>> LossScale(backoff=2.0)
        Traceback (most recent call last):
        ...
        fzero.errors.ConfigError: LossScale.backoff=2.0: must be ...
    """

    init: float = 2.0**16
    dynamic: bool = True
    growth: float = 2.0
    backoff: float = 0.5
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    settle: int = 0
    stops: bool = True
    external: bool = False

    def __post_init__(self) -> None:
        held = torch.finfo(torch.float32).max  # of the state that holds it
        fits = _real(self.init) and 0 < self.init <= held
        _number("init", self.init, fits, f"> 0 and <= {held:.4g}, the largest of float32")
        for field in ("dynamic", "stops", "external"):
            if not isinstance(getattr(self, field), bool):
                raise _refuse(field, getattr(self, field), "True or False")
        _number("growth", self.growth, _real(self.growth) and self.growth > 1, "> 1")
        _number("backoff", self.backoff, _real(self.backoff) and 0 < self.backoff < 1, "in (0, 1)")
        for field, least in (("window", 1), ("hysteresis", 1), ("settle", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _refuse(field, value, f"an int >= {least} (steps)")
        _number("minimum", self.minimum, _real(self.minimum) and self.minimum > 0, "> 0")
        if self.moves and self.init < self.minimum:
            raise ConfigError(
                f"LossScale.init={self.init!r} is below LossScale.minimum={self.minimum!r}: a "
                "dynamic scale starts at or above its minimum. Raise init or lower minimum."
            )

    @property
    def moves(self) -> bool:
        """Whether the scale follows overflows."""
        return self.dynamic and not self.external


class LossScaleState(NamedTuple):
    """What the rule remembers, as 0-d tensors on one device.

    Attributes:
        scale: float32, the factor on the loss of the next step.
        good_steps: int32, steps without overflow since the last growth or, less `settle`, since
            the last overflow.
        hysteresis: int32, the scale backs off at an overflow when this is 1.
    """

    scale: Tensor
    good_steps: Tensor
    hysteresis: Tensor


def init(cfg: LossScale, *, device: torch.device | str | None = None) -> LossScaleState:
    """The state before the first step.

    Args:
        cfg: the rule.
        device: where the scalars live (default: torch's default device).

    Returns:
        A `LossScaleState`.

    Examples:
        >>> init(LossScale()).scale
        tensor(65536.)
    """
    return LossScaleState(
        scale=torch.tensor(float(cfg.init), dtype=torch.float32, device=device),
        good_steps=torch.tensor(-cfg.settle, dtype=torch.int32, device=device),
        hysteresis=torch.tensor(cfg.hysteresis, dtype=torch.int32, device=device),
    )


def update(state: LossScaleState, finite: Tensor, cfg: LossScale) -> LossScaleState:
    """The state after a step whose gradients were all finite, or not.

    An overflow backs the scale off to `max(scale * backoff, minimum)` once `hysteresis` overflows
    have come since the last growth; the ones before only count down. `window` steps in a row
    without overflow, after `settle` ones where an overflow was before, multiply the scale by
    `growth` and refill the hysteresis. A scale that float32 cannot hold stays as it is.

    Args:
        state: the state before.
        finite: 0-d bool, true if no gradient on any rank overflowed.
        cfg: the rule; a static or external scale never changes.

    Returns:
        The new state; `state` is not changed.

    Examples:
        >>> cfg = LossScale(init=8.0, window=2, hysteresis=1)
        >>> good, bad = torch.tensor(True), torch.tensor(False)
        >>> state, scales = init(cfg), []
        >>> for finite in (good, good, bad, good, good):
        ...     state = update(state, finite, cfg)
        ...     scales.append(state.scale.item())
        >>> scales
        [8.0, 16.0, 8.0, 8.0, 16.0]

    References:
        Micikevicius et al., arXiv:1710.03740, sec. 3.2, with hysteresis and minimum as in
        DeepSpeed's dynamic scaler, which is this rule at `settle=1`.
    """
    if not cfg.moves:
        return state
    scale, good_steps, hysteresis = state
    overflow = ~finite

    backs_off = overflow & (hysteresis <= 1)
    counts_down = overflow & (hysteresis > 1)
    good_steps = torch.where(finite, good_steps + 1, torch.full_like(good_steps, -cfg.settle))
    grows = good_steps >= cfg.window

    grown = scale * cfg.growth
    grown = torch.where(torch.isfinite(grown), grown, scale)
    scale = torch.where(backs_off, (scale * cfg.backoff).clamp(min=cfg.minimum), scale)
    return LossScaleState(
        scale=torch.where(grows, grown, scale),
        good_steps=torch.where(grows, torch.zeros_like(good_steps), good_steps),
        # Left at 1 after backing off: until the scale grows again each overflow backs off.
        hysteresis=torch.where(
            grows, torch.full_like(hysteresis, cfg.hysteresis), hysteresis - counts_down.int()
        ),
    )


def exhausted(before: LossScaleState, finite: Tensor, cfg: LossScale) -> Tensor:
    """Whether a step should have backed off, and the scale was at its minimum, where that `stops`.

    Args:
        before: the state that the step started from.
        finite: 0-d bool, as for `update`.
        cfg: the rule; only a dynamic scale can be exhausted.

    Returns:
        0-d bool.

    Examples:
        >>> cfg = LossScale(init=1.0, hysteresis=1)
        >>> exhausted(init(cfg), torch.tensor(False), cfg)
        tensor(True)
    """
    if not cfg.moves or not cfg.stops:
        return torch.zeros_like(finite)
    return ~finite & (before.hysteresis <= 1) & (before.scale <= cfg.minimum)


class Watch:
    """Tells the host of a step's flags, without making it wait for the device.

    On a CPU a flag can be read at once. From a GPU it is copied behind the host's back and read
    `LAG` steps later, when the device has long been there: on every rank at the same step, so that
    none is left waiting in a collective for one that has raised.
    """

    LAG = 2

    def __init__(self) -> None:
        self._flags: deque[_Flag] = deque()
        self._step = 0

    def look(self) -> None:
        """Before a step: raise if one that is `LAG` steps back had a flag set.

        Raises:
            FzeroError: what was said of it.
        """
        self._step += 1
        while self._flags and self._flags[0].step <= self._step - self.LAG:
            flag, there, _, told = self._flags.popleft()
            # as a rule done by now: it waits for a device that is LAG steps behind
            there.synchronize()
            if flag.item():
                self._flags.clear()
                raise told(f"{self.LAG} steps ago, ")

    def add(self, flag: Tensor, told: Callable[[str], FzeroError]) -> None:
        """After a step: remember a flag of it, or raise if it is there already and true.

        Args:
            flag: 0-d bool, such as `exhausted`; the same on all ranks.
            told: what to raise; of a text that says when, for the start of a sentence.

        Raises:
            FzeroError: it is true.
        """
        if flag.device.type != "cuda":
            if flag.item():
                raise told("")
            return
        copy = torch.zeros((), dtype=torch.bool, pin_memory=True, device="cpu").copy_(
            flag, non_blocking=True
        )
        there = torch.cuda.Event()
        there.record(torch.cuda.current_stream(flag.device))
        self._flags.append(_Flag(copy, there, self._step, told))


class _Flag(NamedTuple):
    """A copy of a flag, when it is there, its step, and what to raise."""

    value: Tensor
    there: torch.cuda.Event
    step: int
    told: Callable[[str], FzeroError]


def at_minimum(when: str) -> FzeroError:
    """What is raised of an `exhausted` scale."""
    return FzeroError(
        f"{when}gradients were NaN or infinite at the smallest loss scale that "
        "LossScale(minimum=...) allows, so a smaller one will not help. Parameters, optimizer "
        "state and step count are as before that step. Find the first operation of the model that "
        "gives NaN or infinity (torch.autograd.set_detect_anomaly(True) with "
        "Config(executor='eager')); then lower the learning rate, set Config(clip_norm=...), or "
        "use precision='bf16', which has float32's range. If gradients are just that large, lower "
        "the minimum."
    )


def resolve(value: "LossScale | float | str | None") -> LossScale | None:
    """What a user may write for a loss scale, as a `LossScale`; None stays None.

    Args:
        value: None, "dynamic", a number (static), or a `LossScale`.

    Returns:
        The `LossScale`, or None for no scaling.

    Raises:
        ConfigError: anything else.

    Examples:
        >>> resolve("dynamic") == LossScale(), resolve(128.0).dynamic
        (True, False)
    """
    if value is None or isinstance(value, LossScale):
        return value
    if value == "dynamic":
        return LossScale()
    if not isinstance(value, str) and _real(value) and value > 0:
        return LossScale(init=float(value), dynamic=False)
    raise ConfigError(
        f"loss_scale={value!r}: must be None, 'dynamic', a finite number > 0 (a static scale) or "
        "LossScale(...). Use 'dynamic' unless you know the scale."
    )


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(field: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise _refuse(field, value, f"a finite number {rule}")


def _refuse(field: str, value: object, rule: str) -> ConfigError:
    default = LossScale.__dataclass_fields__[field].default
    return ConfigError(
        f"LossScale.{field}={value!r}: must be {rule}. Leave it out for {default!r}."
    )
