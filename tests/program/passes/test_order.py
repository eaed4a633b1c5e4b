"""Collectives of single leaves can be put into another rank's order, or are refused."""

from typing import Any

import pytest
import torch

import fzero
from fzero.program.passes.gathers import hoist_reductions, regather, sink_gathers
from fzero.program.passes.order import OutOfOrder, in_order, order_of_leaves
from fzero.program.program import Program
from tests.ranks import fake_ranks


def model_fn(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in params.values():
        x = torch.tanh(x @ w)
    return x.square().mean()


def laid() -> Program:
    """A step's gradients before collectives share buckets."""
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config(stage=3))
    state = step_fn.init({f"w{i}": torch.ones(8, 8) for i in range(3)})
    fitting: Any = step_fn.lower(*state, torch.ones(4, 8)).fitting
    return hoist_reductions(sink_gathers(regather(fitting.laid())))


def test_gathers_go_earlier_and_reductions_later() -> None:
    with fake_ranks(2):
        program = laid()
        own = order_of_leaves(program)
        wanted = sorted(own, key=lambda one: "reduce" in one)  # all that is read, then all sums
        found = in_order(program, wanted)
        assert list(order_of_leaves(found)) == wanted != list(own)
        found.verify()
        assert in_order(program, own) is program


def test_what_is_computed_from_later_ones_is_refused() -> None:
    with fake_ranks(2):
        program = laid()
        own = order_of_leaves(program)
        for wanted in (own[::-1], own[1:], (*own, own[0] + "0")):
            with pytest.raises(OutOfOrder):
                in_order(program, wanted)
