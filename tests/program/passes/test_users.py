"""Passes of users: none changes a bit that it does not mean to, and a wrong one is named."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero import passes
from fzero.config.names import name_of
from fzero.errors import ConfigError, RankMismatchError, TraceError
from fzero.program import Program
from fzero.program.memory import is_wait
from tests.ranks import fake_ranks, run_ranks

# rows that two ranks do not share evenly, and a leaf that is split along its second dim
SHAPES = {"a": (5, 8), "b": (8, 7), "bias": (7,), "wide": (1, 8)}


def model_fn(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    h = torch.tanh(x @ params["a"]) * params["wide"]
    h = torch.nn.functional.dropout(h, 0.25)
    return (h @ params["b"] + params["bias"]).square().mean(), dict(params)


def step_of(*those: Any, **options: Any) -> fzero.TrainStep:
    cfg = fzero.Config(passes=those, has_aux=True, **options)
    return fzero.make_train_step(model_fn, fzero.optim.adam(0.05), cfg)


def start() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}


def batch(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(7 + rank))


def two_steps(step_fn: fzero.TrainStep, rank: int) -> list[Tensor]:
    """Losses, what the model saw, and the parameters afterwards."""
    params, state = step_fn.init(start())
    found = []
    for _ in range(2):
        params, state = step_fn(params, state, batch(rank))
        found += [state.metrics["loss"], *state.metrics["aux"].values()]
    return [x.clone() for x in (*found, *fzero.unshard(params).values())]


def lowered(*those: Any, **options: Any) -> Program:
    step_fn = step_of(*those, **options)
    return step_fn.lower(*step_fn.init(start()), batch(0))


def nothing(program: Program) -> Program:
    return program


def copied(program: Program) -> Program:
    return program.logged(passes.copy_graph(program.graph), "copied")


copied_late = passes.scheduled(copied)


def half_gather(program: Program) -> Program:
    """Leaves of float32 travel as bfloat16."""
    graph = passes.copy_graph(program.graph)
    for node in filter(passes.is_gather, list(graph.nodes)):
        leaf, axis = passes.leaf_and_axis(node)
        with graph.inserting_before(node):
            new = passes.inline(graph, _through_bf16, node.args[0], leaf, axis)
        passes.replace_value(node, new)
    return program.logged(graph, "gathers of bfloat16")


def _through_bf16(x: Tensor, leaf: Any, axis: Any) -> Tensor:
    # products, which no check looks through as it does through casts
    return passes.gather((x * 1.0).bfloat16(), leaf, axis).float() * 1.0


# ------------------------------------------------------------------------------- right ones
def _same_bits() -> None:
    rank = dist.get_rank()
    for stage in range(4):
        for options in ({}, {"accum_steps": 2, "prefetch": 1, "bucket_mb": 1e-4}):
            plain = two_steps(step_of(stage=stage, **options), rank)
            passed = two_steps(step_of(nothing, copied, copied_late, stage=stage, **options), rank)
            assert len(plain) == len(passed)
            assert all(torch.equal(a, b) for a, b in zip(plain, passed, strict=True))


def test_a_pass_that_does_nothing_changes_no_bit_at_any_stage() -> None:
    run_ranks(2, _same_bits)


def _through_half() -> None:
    rank = dist.get_rank()
    plain, half = step_of(stage=3), step_of(stage=3).with_pass(half_gather)
    wanted = start()
    params, state = half.init(wanted)
    _, state = half(params, state, batch(rank))
    for name, seen in state.metrics["aux"].items():
        assert torch.equal(seen.reshape(SHAPES[name]), wanted[name].bfloat16().float())
    # the other step function is as it was: the same values bit for bit, in float32
    params, state = plain.init(wanted)
    _, state = plain(params, state, batch(rank))
    for name, seen in state.metrics["aux"].items():
        assert torch.equal(seen.reshape(SHAPES[name]), wanted[name])


def test_a_value_is_replaced_by_what_a_pass_computes() -> None:
    run_ranks(2, _through_half)


@pytest.mark.parametrize("limit", [None, 10**6])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_pass_sends_is_what_the_program_tells(limit: int | None, prefetch: int) -> None:
    options: Any = {"stage": 3, "memory_limit": limit, "prefetch": prefetch, "bucket_mb": 1e-6}
    with fake_ranks(2):
        plain, half = lowered(**options), lowered(half_gather, **options)

    def gathered(program: Program) -> int:
        return sum(row.bytes for row in program.collectives() if row.kind == "all_gather")

    assert gathered(plain) == 2 * gathered(half) > 0
    half.verify()
    kinds = [row.kind for row in half.collectives()]
    assert kinds.count("reduce_scatter") > 0
    if prefetch:  # what is sent is computed early enough to be sent early
        assert _ahead(half) == _ahead(plain) > 0


def _ahead(program: Program) -> int:
    """Launches of gathers while another is under way."""
    flying = ahead = 0
    for node in program.graph.nodes:
        if "bucket" in node.meta and node.meta["bucket"].gathers:
            ahead += flying > 0
            flying += 1
        elif is_wait(node) and node.all_input_nodes[0].meta["bucket"].gathers:
            flying -= 1
    return ahead


def test_passes_run_in_their_order_the_scheduled_ones_last() -> None:
    def telling(name: str) -> Callable[[Program], Program]:
        return lambda program: program.logged(program.graph, f"I am {name}")

    late = passes.scheduled(telling("late"))
    program = lowered(late, telling("first"), telling("second"))
    for part in program.parts():
        told = [line.removeprefix("I am ") for line in part.log if line.startswith("I am")]
        assert told == ["first", "second", "late"]
        assert part.log[-1] == "I am late"


def test_functions_of_shards_and_simulations_have_passes_too() -> None:
    def telling(program: Program) -> Program:
        return program.logged(program.graph, "I was here")

    cfg = fzero.Config(passes=telling)
    fn = fzero.value_and_grad(lambda params, x: model_fn(params, x)[0], cfg)
    assert "I was here" in fn.lower(fzero.shard(start()), batch(0)).log
    report = fzero.simulate(
        lambda params, x: model_fn(params, x)[0], fzero.optim.sgd(0.1), cfg, start(), batch(0), 4
    )
    assert report.program is not None
    assert all("I was here" in part.log for part in report.program.parts())


# ------------------------------------------------------------------------------- wrong ones
def _edited(change: Callable[[Any], None]) -> Callable[[Program], Program]:
    def broken(program: Program) -> Program:
        graph = passes.copy_graph(program.graph)
        if program.name == "gradients":
            change(graph)
        return program.logged(graph, "broken")

    return broken


def _first(graph: Any, fits: Callable[[Any], bool]) -> Any:
    return next(node for node in graph.nodes if fits(node))


def _drop_a_wait(graph: Any) -> None:
    wait = _first(graph, is_wait)
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)


def _reduce_twice(graph: Any) -> None:
    node = _first(graph, passes.is_reduction)
    with graph.inserting_before(node):
        again = passes.call(graph, torch.ops.aten.mul.Tensor, node.args[0], 1.0)
        leaf, axis = passes.leaf_and_axis(node)
        args = (again, axis.size, axis.group, leaf.name)
        twice = graph.call_function(torch.ops.fzero.all_reduce.default, args)
        twice.meta["val"] = again.meta["val"]
    node.replace_input_with(node.args[0], twice)


def _skip_a_reduction(graph: Any) -> None:
    node = _first(graph, lambda n: n.target is torch.ops.fzero.all_reduce.default)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _launch_in_another_order(graph: Any) -> None:
    one, *_, other = [n for n in graph.nodes if "bucket" in n.meta and n.meta["bucket"].gathers]
    for node in (*other.all_input_nodes, other):
        one.prepend(node)
    passes.legalise(graph)


def _another_number(graph: Any) -> None:
    tanh = passes.calls(graph, "aten::tanh")[0]
    tanh.target = torch.ops.aten.sin.default


def _draw(graph: Any) -> None:
    tanh = passes.calls(graph, "aten::tanh")[0]
    with graph.inserting_before(tanh):
        new = passes.inline(graph, torch.rand_like, tanh.args[0])
    passes.replace_value(tanh, new)


def _another_shape(graph: Any) -> None:
    tanh = passes.calls(graph, "aten::tanh")[0]
    with graph.inserting_before(tanh):
        new = passes.call(graph, torch.ops.aten.sum.dim_IntList, tanh.args[0], [0])
    passes.replace_value(tanh, new)


def in_place(program: Program) -> Program:
    node = passes.calls(program.graph, "aten::tanh")
    for one in node:
        one.target = torch.ops.aten.sin.default
    return program


def returns_nothing(program: Program) -> Any:
    program.logged(program.graph, "forgotten")


def says_otherwise(program: Program) -> Program:
    return dataclasses.replace(program, reduced_over=())


def raises(program: Program) -> Program:
    raise KeyError(program.name)


def refuses(program: Program) -> Program:
    one, *_, other = passes.placeholders(passes.copy_graph(program.graph))
    passes.replace_value(one, other)
    return program


def makes_a_pass(size: Any) -> Any:
    return lambda program: program


@pytest.mark.parametrize(
    ("broken", "stage", "told"),
    [
        (passes.scheduled(_edited(_drop_a_wait)), 3, "before it is awaited|awaited 0 times"),
        (_edited(_reduce_twice), 3, "reduced 2 times|over group .* and over group"),
        (_edited(_skip_a_reduction), 0, "not at all|reduced 0 times"),
        (passes.scheduled(_edited(_launch_in_another_order)), 3, "its turn is"),
        (_edited(_another_number), 3, "was recorded as aten.tanh"),
        (_edited(_draw), 3, "draws random numbers, and has no site"),
        (_edited(_another_shape), 3, "which it is to stand for, is torch.float32"),
        (in_place, 3, "edited the graph that it was given"),
        (returns_nothing, 3, "returned a NoneType"),
        (says_otherwise, 3, "changed program.reduced_over"),
        (
            raises,
            3,
            rf"raised KeyError: 'gradients' \(raised at {re.escape(__file__)}:\d+, in raises",
        ),
        (refuses, 3, rf"which it is to .* \(raised at {re.escape(__file__)}:\d+, in refuses"),
        (makes_a_pass, 3, r"returned a function, which is a pass itself. Call it.*makes_a_pass\("),
        (passes.overlap, 3, r"was given a Program as one. Call it: passes.overlap\(\)"),
        (passes.scheduled, 3, r"was given a Program. Call it .* passes.scheduled\(my_pass\)"),
    ],
)
def test_a_wrong_pass_is_refused_by_name_and_deed(broken: Any, stage: int, told: str) -> None:
    with fake_ranks(2), pytest.raises(TraceError, match=told) as error:
        lowered(nothing, broken, stage=stage, bucket_mb=1e-4)
    assert f"the pass {name_of(broken)}, on the Program 'gradients'" in str(error.value)


def noisy_update(program: Program) -> Program:
    graph = passes.copy_graph(program.graph)
    for node in passes.calls(graph, "aten::clamp") if program.name == "update" else ():
        with graph.inserting_before(node):
            new = passes.inline(graph, lambda x: x + torch.rand_like(x), node.args[0])
        passes.replace_value(node, new)
    return program.logged(graph, "noisy")


def test_a_pass_may_not_draw_where_nothing_was_drawn() -> None:
    with fake_ranks(2), pytest.raises(TraceError, match="has no site") as error:
        lowered(nothing, noisy_update, stage=0, clip_norm=0.1)
    assert "on the Program 'update'" in str(error.value)


def test_a_value_may_stand_for_another_and_for_itself() -> None:
    """Of two products that are one, the second goes, and those who read the first stay."""

    def model_fn(params: Any, x: Tensor) -> Tensor:
        h = x @ params["w"]
        return (h.tanh() * h.tanh().sin()).square().sum()

    def joined(program: Program) -> Program:
        graph = passes.copy_graph(program.graph)
        if program.name == "gradients":
            first, *rest = passes.calls(graph, "aten::tanh")
            for node in rest:
                passes.replace_value(node, first)
        return program.logged(graph, "joined")

    params, x = {"w": torch.randn(4, 4, dtype=torch.float64)}, torch.randn(8, 4).double()
    found = []
    for given in ((), joined):
        cfg = fzero.Config(passes=given)
        step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
        state = step_fn.init(params)
        program = step_fn.lower(*state, x)
        tanhs = len(passes.calls(program.graph, "aten::tanh"))
        found.append((tanhs, fzero.unshard(step_fn(*state, x)[0])["w"]))
    assert [tanhs for tanhs, _ in found] == [2, 1]
    assert torch.equal(found[0][1], found[1][1])


def test_a_wrong_pass_leaves_others_alone() -> None:
    step_fn = step_of()
    state = step_fn.init(start())
    before = step_fn.lower(*state, batch(0))
    with pytest.raises(TraceError):
        step_fn.with_pass(raises).lower(*state, batch(0))
    assert step_fn.lower(*state, batch(0)) is before
    assert step_fn.cfg.passes == ()


# ------------------------------------------------------------------------------ ranks, names
def _ranks_differ() -> str:
    rank = dist.get_rank()
    step_fn = step_of(stage=3)
    state = step_fn.init(start())
    other = step_fn.with_pass(half_gather if rank else copied)
    with pytest.raises(RankMismatchError) as error:
        other(*state, batch(rank))
    return str(error.value)


def test_ranks_whose_passes_differ_are_told_before_anything_runs() -> None:
    for told in run_ranks(2, _ranks_differ):
        assert "half_gather" in told
        assert "passes" in told


@dataclasses.dataclass(frozen=True)
class Sized:
    """A pass with a parameter."""

    block: int = 8

    def __call__(self, program: Program) -> Program:
        return program


def test_a_pass_is_known_by_a_name_that_all_ranks_have() -> None:
    assert name_of(nothing) == f"{__name__}.nothing"
    assert name_of(copied_late) == f"{__name__}.copied"
    assert name_of(Sized(3)) == "Sized(block=3)"
    assert name_of(functools.partial(print, 3, sep="b")) == "builtins.print(3, sep='b')"
    assert name_of(passes.scheduled(Sized(3))) == "Sized(block=3)"
    assert "at 0x" not in str(fzero.Config(passes=(nothing, Sized(), copied_late)).describe())
    cfg = fzero.Config(passes=(Sized(2),))
    assert cfg == fzero.Config(passes=Sized(2)) != fzero.Config(passes=Sized(3))
    assert repr(cfg) == "Config(stage=3, passes=(Sized(block=2)))"


def test_what_has_no_program_refuses_passes() -> None:
    with pytest.raises(ConfigError, match="there is no Program that a pass could change"):
        step_of(nothing, executor="eager")
    with pytest.raises(ConfigError, match="has no Program that a pass could change"):
        fzero.Engine(torch.nn.Linear(2, 2), cfg=fzero.Config(passes=nothing))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("aten.mm", "Did you mean 'aten::mm'?"),
        ("aten::mm.default", "Did you mean 'aten::mm'?"),
        ("torch.ops.aten.mm", "Did you mean 'aten::mm'?"),
        ("aten::nope", ""),
        ("mm", ""),
        ("", ""),
        (torch.ops.aten.mm, "Did you mean 'aten::mm'?"),
    ],
)
def test_an_operator_that_is_not_there_is_not_looked_for(name: Any, hint: str) -> None:
    graph = lowered().graph
    assert passes.calls(graph, "aten::mm", "fzero::phase")
    with pytest.raises(ConfigError, match="no operator is called") as error:
        passes.calls(graph, "aten::mm", name)
    assert hint in str(error.value)
    assert bool(hint) == ("Did you mean" in str(error.value))
