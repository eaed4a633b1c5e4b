"""Activations on the host: the same bits, less on the device, nothing read that is not there."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import fzero
from fzero.errors import ConfigError, TraceError
from fzero.program.cost import spans
from fzero.program.graph import copy_graph
from fzero.program.hardware import CPU, GPU, Hardware
from fzero.program.passes.offload import Stay, offload, places_of
from fzero.program.passes.rewrite import call
from fzero.program.transfers import (
    DOWN,
    LANDED,
    UP,
    is_brought,
    is_sent,
    is_transfer,
    planned_for,
)
from tests.program.test_fitting import net, run_step

# a copy of a value here takes about as long as the product that makes it
LINKED = Hardware("m", flops=1e12, memory_bandwidth=1e11, overhead=1e-6, host_bandwidth=1e10)


def everything(program: fzero.Program) -> fzero.Program:
    """All that can travel does."""
    return offload(program, [node.name for node in program.graph.nodes], LINKED)


@settings(max_examples=6)
@given(
    depth=st.integers(1, 3),
    width=st.sampled_from([8, 24]),
    dropout=st.sampled_from([0.0, 0.4]),
    stage=st.integers(0, 3),
    accum=st.sampled_from([1, 2]),
)
def test_what_was_on_the_host_has_the_same_bits(
    depth: int, width: int, dropout: float, stage: int, accum: int
) -> None:
    cfg = fzero.Config(stage=stage, accum_steps=accum)
    expected, program = run_step(cfg, depth, width, 64, dropout)
    found, away = run_step(cfg.replace(passes=[everything]), depth, width, 64, dropout)
    away.verify()
    assert all(map(torch.equal, expected, found))
    assert away.host_bytes() > program.host_bytes() == 0
    assert away.peak_bytes() <= program.peak_bytes()
    # the rows that are alive then leave out what is on the host, as the sum does
    assert sum(row.bytes for row in away.peak()) == away.peak_bytes()
    assert "fzero.to_host" in away.listing(verbose=True)


def lowered(cfg: fzero.Config, depth: int = 3) -> fzero.Program:
    shapes = {"up": (32, 64), "down": (64, 32)}
    params = {
        f"{i}.{name}": torch.ones(shape) for i in range(depth) for name, shape in shapes.items()
    }
    step_fn = fzero.make_train_step(net(depth, 0.0), fzero.optim.sgd(0.01), cfg)
    return step_fn.lower(*step_fn.init(params), torch.ones(256, 32))


@pytest.mark.slow
def test_a_limit_that_recomputation_cannot_reach_is_reached_with_the_host() -> None:
    program = lowered(fzero.Config(stage=3))
    least = min(point.bytes for point in program.frontier(2))
    limit = least * 19 // 20
    cfg = fzero.Config(stage=3, memory_limit=limit)
    with pytest.raises(ConfigError, match=f"memory_limit={limit}"):
        lowered(cfg)
    with planned_for(LINKED):
        away = lowered(cfg.replace(offload="activations"))
    away.verify()
    assert away.peak_bytes() <= limit
    assert away.host_bytes() > 0


def test_a_link_with_time_to_spare_takes_the_place_of_recomputation() -> None:
    limit = lowered(fzero.Config(stage=3)).peak_bytes() * 6 // 10
    cfg = fzero.Config(stage=3, memory_limit=limit)
    again = lowered(cfg).cost(LINKED)
    with planned_for(LINKED):
        away = lowered(cfg.replace(offload="activations"))
    cost = away.cost(LINKED)
    assert away.peak_bytes() <= limit
    assert cost.recomputed < again.recomputed
    assert cost.seconds < again.seconds
    # down and up again, and nothing else crosses
    assert cost.crossed == 2 * sum(
        node.meta["val"].nbytes for node in away.graph.nodes if is_sent(node)
    )


SLOW = Hardware("m", flops=1e12, memory_bandwidth=1e11, overhead=1e-6, host_bandwidth=1e5)


@pytest.mark.parametrize(
    ("hardware", "logged"),
    [(None, True), (CPU, True), (SLOW, False)],
    ids=["this machine", "one that shares its memory", "a link that is too slow"],
)
def test_where_copies_cannot_pay_nothing_is_sent(hardware: Hardware | None, logged: bool) -> None:
    limit = lowered(fzero.Config(stage=3)).peak_bytes() * 8 // 10
    planned = contextlib.nullcontext() if hardware is None else planned_for(hardware)
    with planned:
        program = lowered(fzero.Config(stage=3, memory_limit=limit, offload="activations"))
    assert program.host_bytes() == 0
    assert not any(map(is_transfer, program.graph.nodes))
    said = any("the host's memory is the device's own" in line for line in program.log)
    assert said == logged


def test_copies_of_one_way_go_one_after_another() -> None:
    program = everything(lowered(fzero.Config(stage=3)))
    rows = list(spans(program, GPU))
    for way in (DOWN, UP):
        lane = [(row.start, row.end) for row in rows if row.lane == way]
        assert len(lane) > 2
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(lane))


@given(
    stays=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(11, 19)), min_size=1, max_size=6
    ),
    bandwidth=st.floats(0.2, 20.0),
)
def test_a_value_is_down_before_it_comes_up(
    stays: list[tuple[int, int, int]], bandwidth: float
) -> None:
    link = Hardware("link", 1e9, 1e9, overhead=0.0, host_bandwidth=bandwidth)
    rows = [Stay(*stay) for stay in stays]
    places, stalled = places_of(rows, [float(i) for i in range(21)], 10, link)
    for stay, place in zip(rows, places, strict=True):
        assert stay.last < place.awaited <= 10 < place.back <= stay.first
    # nobody waits who need not: the link has this much time
    time = sum(stay.nbytes for stay in rows) / bandwidth
    assert stalled <= 2 * time
    if time <= 1:
        assert (
            stalled == 0 or max(stay.last for stay in rows) == 8 or min(x.first for x in rows) < 13
        )


# ------------------------------------------------------------------------------- the mutations
def sent(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if is_sent(node))


def brought(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if is_brought(node))


def only(node: fx.Node) -> fx.Node:
    (user,) = node.users
    return user


def the_copy_back_is_dropped(graph: fx.Graph) -> str:
    back = brought(graph)
    there, here = back.all_input_nodes[0], only(back)
    here.replace_all_uses_with(there)
    graph.erase_node(here)
    graph.erase_node(back)
    return f"reads {there.name}, which is in the host's memory"


def the_wait_for_the_copy_back_is_dropped(graph: fx.Graph) -> str:
    back = brought(graph)
    here = only(back)
    here.replace_all_uses_with(back)
    graph.erase_node(here)
    return f"reads {back.name} before it has landed"


def the_wait_for_the_copy_is_dropped(graph: fx.Graph) -> str:
    down = sent(graph)
    there = only(down)
    there.replace_all_uses_with(down)
    graph.erase_node(there)
    return f"reads {down.name} before it has landed"


def a_copy_is_awaited_twice(graph: fx.Graph) -> str:
    back = brought(graph)
    here = only(back)
    with graph.inserting_before(here):
        again = graph.node_copy(here)
    next(iter(here.users)).replace_input_with(here, again)
    return f"{back.name} lands 2 times"


def the_copy_is_dropped(graph: fx.Graph) -> str:
    back = brought(graph)
    there = back.all_input_nodes[0]
    value = there.all_input_nodes[0].all_input_nodes[0]
    back.replace_input_with(there, value)
    return f"{back.name} brings back {value.name}, which was not sent"


def values_change_places(graph: fx.Graph) -> str:
    ups = [node for node in graph.nodes if is_brought(node)]
    shapes = [node.meta["val"].shape for node in ups]
    one, other = next(
        (a, b)
        for i, a in enumerate(ups)
        for j, b in enumerate(ups)
        if i < j and shapes[i] == shapes[j]
    )
    a, b = one.all_input_nodes[0], other.all_input_nodes[0]
    one.replace_input_with(a, b)
    other.replace_input_with(b, a)
    return "was recorded reading another value"


def what_travels_is_written(graph: fx.Graph) -> str:
    down = sent(graph)
    (value,) = down.all_input_nodes
    with graph.inserting_before(only(down)):
        node = call(graph, torch.ops.aten.mul_.Tensor, value, 2.0)
    return f"{node.name} writes {value.name}, which {down.name} is carrying"


def it_is_brought_elsewhere(graph: fx.Graph) -> str:
    back = brought(graph)
    back.args = (back.args[0], torch.device("meta"))
    # torch's own words follow: versions differ in them, and each names the two devices
    return r"\w+ = aten\S+ can't run on \[\w+, [\w, ]+\]: .*devices,? cpu(,| and) meta\b"


def what_waits_is_never_read(graph: fx.Graph) -> str:
    back = brought(graph)
    there, here = back.all_input_nodes[0], only(back)
    value = there.all_input_nodes[0].all_input_nodes[0]
    here.replace_all_uses_with(value)
    graph.erase_node(here)
    graph.erase_node(back)
    return f"{there.name} waits in the host's memory, and is never brought back"


def what_has_no_copy_is_awaited(graph: fx.Graph) -> str:
    value = next(node for node in graph.nodes if str(node.target) == "aten.mm.default")
    with graph.inserting_after(value):
        new = call(graph, LANDED, value, torch.device("cpu"))
    return f"{new.name} awaits {value.name}, which is no copy"


MUTATIONS: list[Callable[[fx.Graph], str]] = [
    the_copy_back_is_dropped,
    the_wait_for_the_copy_back_is_dropped,
    the_wait_for_the_copy_is_dropped,
    a_copy_is_awaited_twice,
    the_copy_is_dropped,
    values_change_places,
    what_travels_is_written,
    it_is_brought_elsewhere,
    what_waits_is_never_read,
    what_has_no_copy_is_awaited,
]


@pytest.fixture(scope="module")
def away() -> fzero.Program:
    return everything(lowered(fzero.Config(stage=3)))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_mutation_is_found(mutation: Any, away: fzero.Program) -> None:
    away.verify()
    graph = copy_graph(away.graph)
    expected = mutation(graph)
    with pytest.raises(TraceError, match=expected):
        away.logged(graph, "mutated").verify()


# ------------------------------------------------------------------------------------- refusals
def test_activations_go_to_the_host_for_a_limit_only() -> None:
    with pytest.raises(ConfigError, match="is planned for a limit"):
        fzero.Config(offload="activations")
    with pytest.raises(ConfigError, match="must be one of"):
        fzero.Config(offload="activation")  # pyright: ignore


def test_what_is_returned_or_read_too_late_stays() -> None:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ params["w"])
        return h.square().mean(), h

    cfg = fzero.Config(stage=0, has_aux=True, passes=[everything])
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    program = step_fn.lower(*step_fn.init({"w": torch.ones(4, 4)}), torch.ones(8, 4))
    assert not [n for n in program.graph.nodes if is_sent(n) and "tanh" in str(n.args)]
