"""`Program.verify` finds what a pass broke, and names it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fzero
from fzero import Config
from fzero.errors import TraceError
from fzero.program import Program
from fzero.program.graph import copy_graph, is_op, output_node
from fzero.program.passes.rewrite import call, substitute
from tests.program.programs import Recorded
from tests.ranks import fake_ranks


def tanh_of(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if is_op(node, "aten::tanh"))


def put(graph: fx.Graph, node: fx.Node, target: Any, *args: Any) -> None:
    """Let all that reads a node read something made of it."""
    with graph.inserting_after(node):
        new = call(graph, target, node, *args)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def turned(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def turn(graph: fx.Graph) -> None:
    put(graph, tanh_of(graph), turned)


def widen(graph: fx.Graph) -> None:
    put(graph, tanh_of(graph), torch.ops.aten._to_copy.default)
    tanh_of(graph).next.kwargs = {"dtype": torch.float64}
    tanh_of(graph).next.meta["val"] = tanh_of(graph).meta["val"].double()


def lie(graph: fx.Graph) -> None:
    node = tanh_of(graph)
    node.meta["val"] = node.meta["val"].t()


def disorder(graph: fx.Graph) -> None:
    node = tanh_of(graph)
    next(iter(node.users)).append(node)


def turn_result(graph: fx.Graph) -> None:
    (results,) = output_node(graph).args
    put(graph, results[0], turned)  # pyright: ignore


@pytest.mark.parametrize("damage", [turn, widen, lie, disorder, turn_result])
def test_what_a_pass_breaks_is_named(damage: Callable[[fx.Graph], None]) -> None:
    program = Recorded([4, 6, 3]).program
    program.verify()
    graph = copy_graph(program.graph)
    damage(graph)
    broken = program.logged(graph, "a pass of mine")
    with pytest.raises(TraceError, match=r"(?s)(strides|float64|order).*a pass of mine"):
        broken.verify()
    program.verify()


def test_the_program_that_follows_is_checked_too() -> None:
    program = Recorded([4, 6, 3]).program
    graph = copy_graph(program.graph)
    turn(graph)
    program.then(replace(program, name="update")).verify()
    with pytest.raises(TraceError, match="'update'"):
        program.then(replace(program, graph=graph, name="update")).verify()


def test_a_substitute_is_laid_out_as_what_it_stands_for() -> None:
    program = Recorded([4, 6, 3]).program
    graph = copy_graph(program.graph)
    node = tanh_of(graph)
    with graph.inserting_before(node):
        other = call(graph, turned, call(graph, torch.ops.aten.tanh.default, node.args[0]))
    substitute(node, other)
    # its layout is right, which is looked at first; that its value is, nobody recorded
    with pytest.raises(TraceError, match="was recorded reading another value"):
        program.logged(graph, "a pass that substitutes").verify()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_programs_of_a_step_are_what_was_recorded(stage: int, world: int) -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = torch.relu_(x @ params["wide"]) @ params["odd"].t()
        return torch.dropout(y, 0.5, True).mul_(params["gain"]).square().mean()

    params = {"wide": torch.ones(3, 6), "odd": torch.ones(7, 6), "gain": torch.ones(())}
    params["unused"] = torch.ones(6, 2)  # its gradient is zero, and nobody need say so
    for accum in (1, 2):
        cfg = Config(stage=stage, accum_steps=accum, precision="bf16", bucket_mb=0.00005)
        step_fn = fzero.make_train_step(loss, fzero.optim.adamw(0.1), cfg)
        with fake_ranks(world):
            program: Program = step_fn.lower(*step_fn.init(params), torch.ones(4, 3))
            assert len(list(program.parts())) == 2
            program.verify()
