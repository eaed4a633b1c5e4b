"""Of a step's losses: those that were named; else those of outputs, but of tasks that ended."""

import torch

from fzero.engine.losses import Losses

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


def test_a_loss_that_was_named_comes_before_those_of_outputs() -> None:
    losses = Losses()
    losses.reached[0] = ONE
    losses.commit()
    assert losses.of_step() == [ONE]
    losses.given.append(TWO)
    assert losses.of_step() == [TWO]
    losses.clear()
    assert losses.of_step() == []


def test_losses_of_a_task_that_raised_are_none_of_the_step() -> None:
    losses = Losses()
    losses.reached[0] = ONE
    losses.discard()
    losses.commit()
    assert losses.of_step() == []
    losses.reached[1] = TWO
    losses.commit()
    losses.reached[1] = TWO  # the same forward again, by a second backward: one loss
    losses.commit()
    assert losses.of_step() == [TWO]
