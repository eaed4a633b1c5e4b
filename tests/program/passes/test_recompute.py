"""Backward computes again what it is told to, from what is still there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.program import pipeline
from fzero.program.graph import FORWARD, is_again, phases
from fzero.program.memory import timeline
from fzero.program.passes.recompute import may_be_copied, recompute
from fzero.program.program import Program


def net(params: Any, x: Tensor) -> Tensor:
    h = torch.nn.functional.dropout(torch.tanh(x @ params["a"]), 0.5)
    h = h + torch.nn.functional.layer_norm(h @ params["b"], (8,))
    return torch.nn.functional.gelu(h @ params["c"]).square().mean()


PARAMS = {"a": torch.ones(4, 8), "b": torch.ones(8, 8), "c": torch.ones(8, 5)}


def before_the_pass(
    model_fn: Callable[[Any, Tensor], Tensor] = net, params: Any = PARAMS, **options: Any
) -> Program:
    """A step's gradients as `recompute` gets them."""
    found = []
    original = pipeline.rematerialise

    def noted(program: Program) -> Program:
        found.append(original(program))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "rematerialise", noted)
        step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config(**options))
        step_fn.lower(*step_fn.init(params), torch.ones(6, 4))
    return found[0]


def forward_names(program: Program) -> list[str]:
    phase = phases(program.graph)
    nodes = (n for n in program.graph.nodes if n.op == "call_function" and phase[n] == FORWARD)
    return [n.name for n in nodes if may_be_copied(n)]


@pytest.fixture(scope="module")
def base() -> Program:
    return before_the_pass()


@settings(max_examples=20)
@given(st.data())
def test_every_set_of_values_keeps_the_promises_and_holds_no_more(
    base: Program, data: st.DataObject
) -> None:
    names = forward_names(base)
    chosen = data.draw(st.sets(st.sampled_from(names)))
    program = recompute(base, chosen)
    program.verify()
    copies = [n for n in program.graph.nodes if is_again(n)]
    made = {n.meta["promise"].number for n in copies}
    assert len(made) == len(copies)  # each at most once
    # what is chosen and read in backward is read as its copy
    phase = phases(program.graph)
    for node in program.graph.nodes:
        if phase[node] == FORWARD or node.op == "output":
            continue
        assert not {x.name for x in node.all_input_nodes} & chosen
    assert program.log[-1].startswith("recompute:") == bool(copies)


def test_nothing_chosen_is_nothing_done(base: Program) -> None:
    assert recompute(base, []) is base


def test_all_chosen_leaves_inputs_and_results_alone(base: Program) -> None:
    program = recompute(base, forward_names(base))
    assert program.inputs == base.inputs
    assert program.outputs == base.outputs
    # one long chain: all of it is alive at the end of forward of the copy, and no more than before
    assert max(timeline(program.graph)) <= max(timeline(base.graph)) * 1.5
