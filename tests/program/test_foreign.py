"""Collectives of a model's own are listed, cost something, and are compared between ranks."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fzero
from benchmarks.communication import launched_by
from fzero.distributed.mesh import resolve_mesh
from fzero.errors import RankMismatchError
from fzero.passes import calls, copy_graph, inline, replace_value
from fzero.program.listing import Collective
from fzero.transforms.agreement import signature_of
from tests.ranks import fake_ranks, run_ranks

ROWS, WIDTH = 4, 6
Params = dict[str, Tensor]


_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor  # torch 2.11
_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def _own(params: Params, x: Tensor) -> Tensor:
    """A loss with one collective of each kind."""
    world, z = dist.get_world_size(), x @ params["w"]
    everyone = _gather(z.detach(), 0, dist.group.WORLD)
    mean = funcol.all_reduce(z.detach().mean(0), "sum", dist.group.WORLD)
    parts = [ROWS // world] * world
    swapped = funcol.all_to_all_single(z.detach(), parts, parts, dist.group.WORLD)
    mine = _scatter(z.detach(), "sum", 0, dist.group.WORLD)
    first = funcol.broadcast(z.detach(), 0, dist.group.WORLD)
    others = swapped.square().mean() + mine.square().mean() + first.square().mean()
    return (z @ everyone.t()).logsumexp(1).mean() + (z * mean).mean() + others


def _lowered(model_fn: Any, cfg: fzero.Config, **more: Any) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg, **more)
    return step_fn, [*step_fn.init({"w": torch.randn(WIDTH, ROWS)}), torch.randn(ROWS, WIDTH)]


def _of_model(program: fzero.Program) -> list[Collective]:
    return [row for row in program.collectives() if not row.leaves]


@pytest.mark.parametrize("world", [2, 4])
def test_each_has_a_row_with_what_it_sends(world: int) -> None:
    with fake_ranks(world):
        step_fn, state = _lowered(_own, fzero.Config(stage=3))
        program = step_fn.lower(*state)
        quiet, others = _lowered(lambda p, x: (x @ p["w"]).square().mean(), fzero.Config(stage=3))
        without = quiet.lower(*others).cost()
    size = 4 * ROWS * ROWS
    part = (world - 1) / world
    assert [(row.kind, row.bytes, row.phase, row.wire_bytes) for row in _of_model(program)] == [
        ("all_gather", world * size, "forward", world * size * part),
        ("all_reduce", 4 * ROWS, "forward", 2 * 4 * ROWS * part),
        ("all_to_all", size, "forward", size * part),
        ("reduce_scatter", size, "forward", size * part),
        ("broadcast", size, "forward", size),
    ]
    cost = program.cost()
    sent = sum(row.wire_bytes for row in program.collectives())
    assert sum(cost.sent.values()) == sent > sum(without.sent.values())
    assert cost.exposed > without.exposed  # each is awaited where it is called


def _launched() -> tuple[list[Collective], Counter[str]]:
    step_fn, state = _lowered(_own, fzero.Config(stage=0))
    rows = step_fn.lower(*state).collectives()
    state[:2] = step_fn(*state)  # in the first call ranks agree on what they will launch
    launched = launched_by(lambda: step_fn(*state))
    return rows, Counter(one.kind for one in launched)


def test_what_is_listed_is_launched() -> None:
    for rows, launched in run_ranks(2, _launched):
        kinds = Counter(row.kind for row in rows)
        assert kinds.pop("broadcast") == 1  # which is not counted there
        # over gloo an all-to-all carries gathers and reduce-scatters of two ranks
        kinds["all_to_all"] += kinds.pop("all_gather") + kinds.pop("reduce_scatter")
        assert launched == kinds


def test_a_program_from_a_file_has_them_where_there_are_no_ranks(tmp_path: Path) -> None:
    with fake_ranks(2):
        step_fn, state = _lowered(_own, fzero.Config(stage=3))
        program = step_fn.lower(*state)
        program.save(tmp_path / "x")
    loaded = fzero.Program.load(tmp_path / "x")
    assert not dist.is_initialized()
    assert loaded.collectives() == program.collectives()
    assert str(loaded.cost()) == str(program.cost())


def test_a_picture_and_a_trace_show_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with fake_ranks(2):
        step_fn, state = _lowered(_own, fzero.Config(stage=3))
        program = step_fn.lower(*state)
    program.plot(tmp_path / "x.svg")
    program.save_trace(tmp_path / "x.json")
    text = (tmp_path / "x.svg").read_text()
    assert all(f"<!-- {row.kind} -->" in text for row in _of_model(program))
    assert "broadcast" in (tmp_path / "x.json").read_text()


def test_what_a_dtensor_sends_is_listed() -> None:
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))

        def model_fn(params: Params, x: Tensor) -> Tensor:
            z = DTensor.from_local(x @ params["w"], mesh, [Shard(0)], run_check=False)
            return z.redistribute(placements=[Replicate()]).to_local().square().mean()

        step_fn, state = _lowered(model_fn, fzero.Config(stage=0))
        rows = _of_model(step_fn.lower(*state))
    assert [(row.kind, row.phase) for row in rows[:1]] == [("all_gather", "forward")]


def test_one_that_a_pass_adds_is_listed() -> None:
    def summed(program: fzero.Program) -> fzero.Program:
        graph = copy_graph(program.graph)
        for node in calls(graph, "aten::tanh"):
            with graph.inserting_before(node.next):
                new = inline(graph, lambda x: funcol.all_reduce(x, "sum", "0"), node.args[0])
            replace_value(node, new)
        return program.logged(graph, "summed")

    with fake_ranks(2):
        assert dist.group.WORLD is not None
        step_fn, state = _lowered(lambda p, x: torch.tanh(x @ p["w"]).mean(), fzero.Config(stage=0))
        program = step_fn.with_pass(summed).lower(*state)
    assert "all_reduce" in [row.kind for row in _of_model(program)]


def test_one_of_a_function_in_place_is_listed() -> None:
    def summed(tree: Params) -> Params:
        return {"w": tree["w"].add_(funcol.all_reduce(tree["w"] * 2, "sum", "0"))}

    with fake_ranks(2):
        fn = fzero.jit(summed, fzero.Config(stage=0), donate_argnums=(0,))
        rows = fn.lower({"w": torch.ones(3)}).collectives()
    assert [row.kind for row in rows] == ["all_reduce"]


def test_those_of_a_group_apart_are_no_affair_of_other_ranks() -> None:
    with fake_ranks(4):
        group = dist.new_group([0, 1])

        def model_fn(params: Params, x: Tensor) -> Tensor:
            z = x @ params["w"]
            return (z * funcol.all_reduce(z.detach(), "sum", group)).mean()

        step_fn, state = _lowered(model_fn, fzero.Config(stage=3))
        program = step_fn.lower(*state)
        signature = signature_of(program, resolve_mesh(None, "cpu"))
        apart, state = _lowered(lambda p, x: (x @ p["w"]).square().mean(), fzero.Config(stage=3))
        program.verify([apart.lower(*state)])  # one of a rank that is not in the group
    assert len(_of_model(program)) == 1
    assert "called by the model function" not in signature


def _one_rank_more(phase: str) -> str:
    def model_fn(params: Params, x: Tensor) -> Tensor:
        z = x @ params["w"]
        if dist.get_rank() == 1:
            z = z * funcol.all_reduce(z.detach(), "sum", dist.group.WORLD)
        return z.mean()

    step_fn, state = _lowered(model_fn, fzero.Config(stage=3))
    before = state[0]["w"].to_local().clone()
    with pytest.raises(RankMismatchError) as error:
        step_fn(*state)
    assert torch.equal(state[0]["w"].to_local(), before)
    return str(error.value)


def test_ranks_that_call_different_ones_are_told_before_any_runs() -> None:
    for said in run_ranks(2, _one_rank_more, "forward"):
        assert "all_reduce forward, called by the model function" in said
