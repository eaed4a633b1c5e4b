"""Laws of every pass: values stay bit for bit, the input stays as it was, the order is legal."""

import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import fzero
from fzero.distributed.buckets import GATHER, REDUCE_SCATTER, pack_shards, unpack_full
from fzero.distributed.ragged import is_supported
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.graph import BACKWARD, FORWARD, copy_graph, is_op, order_of, output_node, phases
from fzero.program.memory import storages
from fzero.program.passes.bucket import bucket, bucket_at
from fzero.program.passes.clean import clean
from fzero.program.passes.functionalise import functionalise
from fzero.program.passes.gathers import hoist_reductions, regather, sink_gathers
from fzero.program.passes.remat import rematerialise
from fzero.program.passes.rewrite import is_cheap, is_gather, is_reduction, legalise
from fzero.program.passes.schedule import wait_of
from fzero.program.passes.seed import insert_seeds, number_sites
from fzero.program.pipeline import share_collectives
from tests.program.programs import Recorded
from tests.ranks import fake_ranks, run_ranks

share = partial(share_collectives, bucket_bytes=1000, prefetch=1, exact=True)
PIPELINE: list[Callable[[Program], Program]] = [
    functionalise,
    number_sites,
    clean,
    rematerialise,
    regather,
    sink_gathers,
    hoist_reductions,
    share,
    insert_seeds,
]
WIDTHS = st.lists(st.integers(1, 9), min_size=2, max_size=6)
few = settings(max_examples=8)


def prefixes(program: Program) -> list[Program]:
    """The Program after none, one, ... and all of the passes."""
    programs = [program]
    for one in PIPELINE:
        programs.append(one(programs[-1]))
    return programs


def results_of_prefixes(widths: list[int]) -> list[list[Tensor]]:
    recorded = Recorded(widths)
    return [compile_program(program)(*recorded.inputs) for program in prefixes(recorded.program)]


def same_results(results: list[list[Tensor]]) -> None:
    first, *others = results
    assert len(first) > 1
    for place, other in enumerate(others):
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b), f"after pass {place}"


@few
@given(WIDTHS)
def test_values_stay_bitwise_at_world_1(widths: list[int]) -> None:
    same_results(results_of_prefixes(widths))


@pytest.mark.parametrize("widths", [[4, 8, 2], [7, 15, 16, 1], [5, 5, 5, 5, 5]])
def test_values_stay_bitwise_at_world_2(widths: list[int]) -> None:
    for results in run_ranks(2, results_of_prefixes, widths):
        same_results(results)


@few
@given(WIDTHS, st.integers(1, 4))
def test_order_is_legal_and_inputs_stay(widths: list[int], world: int) -> None:
    with fake_ranks(world, rank=world - 1):
        programs = [Recorded(widths).program]
        for one in PIPELINE:
            before = str(programs[-1].graph), programs[-1].log
            programs.append(one(programs[-1]))
            assert (str(programs[-2].graph), programs[-2].log) == before
            programs[-1].graph.lint()
            assert programs[-1].log[: len(before[1])] == before[1]


@few
@given(WIDTHS, st.integers(1, 4))
def test_every_pass_keeps_what_was_recorded(widths: list[int], world: int) -> None:
    with fake_ranks(world, rank=world - 1):
        for program in prefixes(Recorded(widths).program):
            program.verify()


def optimised(widths: list[int], upto: int) -> Program:
    return prefixes(Recorded(widths).program)[upto]


def uses_of(node: fx.Node) -> set[fx.Node]:
    """What computes with a gathered leaf: views and casts of it looked through."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= uses_of(user) if is_cheap(user) else {user}
    return found


def between(graph: fx.Graph, start: fx.Node, stop: fx.Node) -> list[fx.Node]:
    order = order_of(graph)
    return [node for node, place in order.items() if order[start] < place < order[stop]]


@few
@given(WIDTHS, st.integers(2, 4))
def test_gathers_sink_and_are_made_again(widths: list[int], world: int) -> None:
    with fake_ranks(world):
        graph = optimised(widths, 1 + PIPELINE.index(sink_gathers)).graph
    order, phase = order_of(graph), phases(graph)
    for gather in filter(is_gather, graph.nodes):
        users = uses_of(gather)
        assert {phase[user] for user in users if user.op != "output"} == {phase[gather]}
        first = min(users, key=order.__getitem__)
        for node in between(graph, gather, first):
            assert is_gather(node) or is_cheap(node), f"{node} between {gather} and {first}"


@few
@given(WIDTHS, st.integers(2, 4))
def test_reductions_come_right_after_their_gradients(widths: list[int], world: int) -> None:
    with fake_ranks(world):
        graph = optimised(widths, 1 + PIPELINE.index(hoist_reductions)).graph
    order = order_of(graph)
    reductions = list(filter(is_reduction, graph.nodes))
    assert len(reductions) == 2 * (len(widths) - 1)
    for reduction in reductions:
        (ready,) = reduction.all_input_nodes
        while is_cheap(ready):
            (ready,) = ready.all_input_nodes
        for node in between(graph, ready, reduction):
            assert is_reduction(node) or is_cheap(node), f"{node} between {ready} and {reduction}"
        assert order[ready] < order[reduction]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 300, 10**6])
def test_buckets_carry_every_leaf_once_and_in_time(size: int, prefetch: int) -> None:
    widths = [6, 7, 8, 9, 3]
    with fake_ranks(2):
        before = optimised(widths, 1 + PIPELINE.index(hoist_reductions))
        program = bucket_at(before, size, prefetch=prefetch)
    compile_program(program)
    singles = [n for n in before.graph.nodes if is_gather(n) or is_reduction(n)]
    order = order_of(program.graph)
    launches = [n for n in program.graph.nodes if "bucket" in n.meta]
    carried = [leaf.name for n in launches for leaf in n.meta["bucket"].leaves]
    assert len(carried) == len(singles)
    for node in launches:
        one = node.meta["bucket"]
        assert len(one.leaves) == 1 or one.nbytes <= size
    for phase in (FORWARD, BACKWARD):
        gathers = [n for n in launches if n.meta["bucket"].kind == GATHER]
        gathers = [n for n in gathers if n.meta["phase"] == phase]
        waits = [next(iter(n.users)) for n in gathers]
        for i, wait in enumerate(waits):
            in_flight = [n for n in gathers[i + 1 :] if order[n] < order[wait]]
            assert len(in_flight) == min(prefetch, len(gathers) - 1 - i)
    reductions = [n for n in launches if n.meta["bucket"].kind == REDUCE_SCATTER]
    for node, following in itertools.pairwise(reductions):
        assert order[next(iter(node.users))] < order[following], "one reduction in flight"


def test_gathers_without_reductions_are_scheduled_too() -> None:
    with fake_ranks(2):
        program = optimised([4, 6, 8], 1 + PIPELINE.index(hoist_reductions))
        graph = copy_graph(program.graph)
        output = output_node(graph)
        output.args = ((output.args[0][-1],),)  # pyright: ignore
        graph.eliminate_dead_code()
        scheduled = bucket_at(replace(program, graph=graph), 1)
    kinds = {row.kind for row in scheduled.collectives()}
    assert kinds == {GATHER}


def test_bucket_takes_the_largest_size_that_memory_allows() -> None:
    with fake_ranks(2):
        before = optimised([64] * 8, 1 + PIPELINE.index(hoist_reductions))
        peaks = {slack: bucket(before, limit=2**20, slack=slack) for slack in (0.0, 0.3, 10.0)}
    counts = {s: sum("bucket" in n.meta for n in p.graph.nodes) for s, p in peaks.items()}
    assert counts[10.0] <= counts[0.3] <= counts[0.0]
    assert counts[10.0] < counts[0.0]
    assert peaks[0.0].peak_bytes() <= peaks[0.3].peak_bytes() <= peaks[10.0].peak_bytes()


def test_slack_is_on_top_of_what_the_rest_of_the_step_needs_in_any_case() -> None:
    with fake_ranks(2):
        before = optimised([64] * 8, 1 + PIPELINE.index(hoist_reductions))
        least = bucket(before, limit=2**20, slack=0.0).peak_bytes()
        room = int(least * 1.06)
        made = {s: bucket(before, limit=2**20, slack=s, budget=room) for s in (0.0, 0.05, 0.3)}
    counts = [sum("bucket" in n.meta for n in p.graph.nodes) for p in made.values()]
    assert all(least <= p.peak_bytes() <= room * (1 + s) for s, p in made.items())
    assert counts[2] < counts[1] < counts[0]  # 5% of the lowest peak alone would buy nothing


def test_regather_off_keeps_what_forward_gathered() -> None:
    with fake_ranks(2):
        recorded = Recorded([4, 6, 8]).program
        program = sink_gathers(clean(number_sites(functionalise(recorded))))
    assert sum(map(is_gather, program.graph.nodes)) == 4
    with fake_ranks(2):
        again = optimised([4, 6, 8], 1 + PIPELINE.index(regather))
    # of two weights and two biases backward reads one: the batch needs no gradient
    assert sum(map(is_gather, again.graph.nodes)) == 5


def test_functionalise_leaves_nothing_in_place() -> None:
    recorded = Recorded([4, 4]).program
    in_place = [n for n in recorded.graph.nodes if is_op(n, "aten::mul_")]
    assert in_place
    left = functionalise(recorded).graph.nodes
    assert not [n for n in left if is_op(n, "aten::mul_")]


@st.composite
def shuffled_graphs(draw: Any) -> tuple[fx.Graph, list[fx.Node], bool]:
    """A random graph, its nodes in legal order, and whether they stand in that order."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(draw(st.integers(1, 12))):
        a, b = (nodes[draw(st.integers(0, len(nodes) - 1))] for _ in "ab")
        nodes.append(graph.call_function(operator.add, (a, b)))
    inner = nodes[1:]
    order = draw(st.permutations(inner))
    for before, after in zip([nodes[0], *order], order, strict=False):
        before.append(after)
    graph.output(tuple(nodes))
    return graph, nodes, order == inner


@settings(max_examples=50)
@given(shuffled_graphs())
def test_legalise_makes_any_order_legal_and_keeps_a_legal_one(drawn: Any) -> None:
    graph, nodes, legal = drawn
    before = list(graph.nodes)
    order = order_of(graph)
    fits = all(order[x] < order[n] for n in before for x in n.all_input_nodes)
    assert fits or not legal
    legalise(graph)
    graph.lint()
    assert set(graph.nodes) == set(before)
    assert not fits or list(graph.nodes) == before
    assert len(nodes) + 1 == len(before)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_bucket_of_small_leaves_keeps_no_large_one_waiting(precision: Any) -> None:
    layers, width = 5, 4096  # so large that a leaf has a bucket of its own; none has memory

    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for i in range(layers):  # a scale's cast stands before its own layer, as its gather did
            x = torch.tanh((x * params[f"{i}.scale"]) @ params[f"{i}.w"])
        return x.square().mean()

    shapes = {"scale": (width,), "w": (width, width)}
    params = {
        f"{i}.{name}": torch.empty(n, device="meta")
        for i in range(layers)
        for name, n in shapes.items()
    }
    batch, cfg = torch.empty(8, width, device="meta"), fzero.Config(stage=3, precision=precision)
    program = fzero.simulate(model_fn, fzero.optim.sgd(0.1), cfg, params, batch, 4).program
    assert program is not None
    assert any(len(row.leaves) == layers for row in program.collectives())
    large = width * width * (4 if precision is None else 2)
    held = [m.categories.get("gathered", 0) for m in program.memory() if m.phase == "forward"]
    # one that is read, the next, of both what was sent if it was cast for that, and all the scales
    sent = 0 if precision is None else large // 4
    assert max(held) < 2 * (large + sent) + 2**17


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gathers_of_forward_are_early_in_every_precision(precision: Any) -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(256, 256, device="meta") for _ in range(6)])
    apply, params = fzero.functionalize(module)
    report = fzero.simulate(
        lambda params, x: apply(params, x).square().mean(),
        fzero.optim.sgd(0.1),
        fzero.Config(stage=3, precision=precision, bucket_mb=0.3, prefetch=1),
        params,
        torch.empty(8, 256, device="meta"),
        world_size=4,
    )
    assert report.program is not None
    nodes = list(report.program.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    launches = [n for n in nodes if "bucket" in n.meta and n.meta["bucket"].gathers]
    for phase in ("forward", "backward"):
        mine = [n for n in launches if n.meta["phase"] == phase]
        assert len(mine) >= 5
        for before, node in itertools.pairwise(mine):
            assert place[node] < place[wait_of(before)]
    # a cast is there for one gather: shared, it would be kept from forward to backward
    casts = [n for n in nodes if n.op == "call_function" and prepares_pack(n)]
    assert bool(casts) == (precision is not None)
    assert all(len(n.users) == 1 for n in casts)


def prepares_pack(node: fx.Node) -> bool:
    """Whether a node casts a shard for a bucket."""
    return is_op(node, "aten::_to_copy") and all(user.target is pack_shards for user in node.users)


@pytest.mark.skipif(not is_supported(), reason="an older torch has no DTensors for flats")
@pytest.mark.parametrize("micro", [1, 2])
def test_what_is_gathered_of_a_flat_is_not_copied(micro: int) -> None:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for w in params.values():
            x = torch.tanh(x @ w)
        return x.square().mean()

    with fake_ranks(3):
        cfg = fzero.Config(stage=3, layout="flat", accum_steps=micro)
        step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
        state = step_fn.init({str(i): torch.ones(8, 8) for i in range(7)})
        program = step_fn.lower(*state, torch.ones(2 * micro, 8))
    unpacked = [node for node in program.graph.nodes if node.target is unpack_full]
    assert len(unpacked) == 2  # all leaves are in one flat, in forward and in backward
    for node in unpacked:
        assert storages([node]) == storages([node.args[0]])
