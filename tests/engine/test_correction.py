"""The factor on a gradient makes it that of a loss that is scaled, and divided exactly once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.engine.correction import Correction
from fzero.engine.losses import Losses
from fzero.errors import BackwardError

powers = st.integers(-8, 16).map(lambda n: 2.0**n)


def correction(accum_steps: int, scale: float | None) -> Correction:
    state = None if scale is None else SimpleNamespace(scale=torch.tensor(scale))
    stepper: Any = SimpleNamespace(opt_state=SimpleNamespace(loss_scale=state))
    return Correction(accum_steps, stepper)


@given(st.integers(1, 8), st.booleans(), powers, st.none() | powers, st.booleans())
def test_whatever_scale_a_gradient_carries_it_ends_up_with_this_engines(
    accum_steps: int, divides: bool, own: float, other: float | None, inside: bool
) -> None:
    subject = correction(accum_steps, own)
    subject.divides = divides
    subject.open()
    scale: torch.Tensor = (
        subject.stepper.opt_state.loss_scale.scale if other is None else torch.tensor(other)  # pyright: ignore
    )
    subject.carries(scale)
    # as a gradient of 1 leaves backward, and as one that was early and met no scale
    got = subject.of_aside(scaled=True) if inside else scale * (subject.factor or 1.0)
    share = got / accum_steps  # what the reduction makes of it
    torch.testing.assert_close(share * (1 if not divides else accum_steps), torch.tensor(own))


@given(st.integers(1, 8), st.booleans())
def test_a_task_starts_with_the_factor_of_its_own_backward(accum_steps: int, divides: bool) -> None:
    subject = correction(accum_steps, None)
    subject.factor, subject.carried = 7.0, torch.tensor(3.0)  # of the task before
    subject.divides = divides
    subject.open()
    assert (subject.factor or 1.0) == (1 if divides else accum_steps)
    assert subject.of_aside(scaled=False) == (1 if divides else accum_steps)
    assert subject.carried is None


def test_two_scales_in_one_task_are_refused() -> None:
    subject = correction(1, 4.0)
    subject.open()
    subject.carries(torch.tensor(2.0))
    with pytest.raises(BackwardError, match="two different loss scales"):
        subject.carries(torch.tensor(2.0))


def test_losses_of_a_task_that_raised_are_none_of_the_steps() -> None:
    losses, first, second = Losses(), torch.tensor(1.0), torch.tensor(2.0)
    losses.reached[0] = first
    losses.commit()
    losses.reached[1] = second
    losses.discard()
    losses.commit()
    assert losses.of_step() == [first]
    losses.clear()
    assert losses.of_step() == []
