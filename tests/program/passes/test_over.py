"""Leaves that are gathered into the memory that they live in."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fzero.distributed.collectives import all_gather, all_reduce
from fzero.distributed.mesh import Axis, resolve_mesh
from fzero.errors import TraceError
from fzero.layout import LeafLayout, plan_layout
from fzero.layout.flats import plan_flats
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.graph import copy_graph
from fzero.program.memory import is_wait
from fzero.program.passes.rewrite import call
from fzero.program.passes.schedule import wait_of
from fzero.program.pipeline import in_place
from fzero.program.trace import trace_program
from fzero.state.homes import Homes
from tests.ranks import fake_ranks, run_ranks

LARGE, ODD = (1024, 128), (1023, 129)  # half a megabyte goes alone; the odd one is padded
BY_ROWS = (LARGE, LARGE, ODD, LARGE)
IN_FLATS = ((6, 4), (6, 4), (5, 3), (9, 3))
Step = tuple[str, int, int]
"""What is done, to which leaf, with which one."""


def own(leaf: LeafLayout, x: Tensor, rank: int) -> Tensor:
    return leaf.split(x, rank)


def leaves_of(world: int, *, flat: bool = False) -> Sequence[LeafLayout]:
    shapes = IN_FLATS if flat else BY_ROWS
    if flat:  # the first three in one, the last in another
        whole = [torch.empty(shape, device="meta") for shape in shapes]
        return plan_flats(plan_layout("0123", whole, world), 2**20, least=300).leaves
    return [LeafLayout(str(i), shape, torch.float32, 0, world) for i, shape in enumerate(shapes)]


def function_of(
    steps: list[Step], leaves: Sequence[LeafLayout], rank: int, axis: Axis
) -> Callable[..., Any]:
    """What an update may do with leaves, line by line; of each gather what is copied comes once."""

    def run(*xs: Tensor) -> tuple[Tensor, ...]:
        told, gathered = [], {}
        for what, i, j in steps:
            if what == "scale":
                xs[i].mul_(1.5)
            elif what == "own":
                own(leaves[i], xs[i], rank).add_(rank + 1)
            elif what == "gather":
                gathered[i] = all_gather(own(leaves[i], xs[i], rank).contiguous(), leaves[i], axis)
            elif what == "copy" and i in gathered and xs[i].shape == xs[j].shape:
                torch._foreach_copy_([xs[j]], [gathered.pop(i)])
            elif what == "read":
                told.append(xs[i].sum())
            elif what == "tell":
                told.append(all_reduce(xs[i].sum(), axis, "sum").sqrt())
            elif what == "clip":
                xs[j].mul_(all_reduce(xs[i].sum(), axis, "sum").sigmoid())
            elif what == "both" and xs[i].shape == xs[j].shape:
                xs[i].add_(xs[j], alpha=0.5)
        return (*told, torch.zeros(()))

    return run


def program_of(steps: list[Step], leaves: Sequence[LeafLayout], rank: int, axis: Axis) -> Program:
    function = function_of(steps, leaves, rank, axis)
    inputs = [torch.empty(leaf.shape) for leaf in leaves]
    names = ["0", "1", "2", "3"]
    recorded = trace_program("update", [("torch.func", function)], inputs, names)
    homes = Homes(leaves).members
    return in_place(recorded, bucket_bytes=2**22, prefetch=None, at_home=homes)


def both(
    cases: list[list[Step]], flat: bool = False
) -> list[tuple[list[Tensor], list[Tensor], int]]:
    """On a rank: what lines give one by one, what their Program gives, and how many are over.

    Leaves of flats are where they should be on the first rank, on the second now and then.
    """
    mesh = resolve_mesh(None, "cpu")
    axis = Axis(mesh.shard_group, mesh.shard_size, mesh.shard_rank)
    found = []
    leaves = leaves_of(mesh.world_size, flat=flat)
    for number, steps in enumerate(cases):
        generator = torch.Generator().manual_seed(mesh.rank)
        given = [torch.randn(leaf.shape, generator=generator) for leaf in leaves]
        program = program_of(steps, leaves, mesh.rank, axis)
        program.verify()
        wanted, mine = [x.clone() for x in given], [x.clone() for x in given]
        if mesh.rank == 0 or number % 2 == 0:
            mine = Homes(leaves).copies(given)
        elif flat:
            mine = in_another_order(given)
        with torch.no_grad():
            first = function_of(steps, leaves, mesh.rank, axis)(*wanted)
        second = compile_program(program)(*mine)
        found.append(([*wanted, *first], [*mine, *second], len(over(program))))
    return found


def in_another_order(given: Sequence[Tensor]) -> list[Tensor]:
    """Copies in one memory, which is as large as flats are, and not laid out as they are."""
    memory = torch.zeros(400)
    sizes = [x.numel() for x in given]
    starts = [100 + sum(sizes[i + 1 :]) for i in range(len(given))]
    places = zip(given, sizes, starts, strict=True)
    return [memory[at : at + n].view(x.shape).copy_(x) for x, n, at in places]


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def over(program: Program) -> list[fx.Node]:
    nodes = [node for node in program.graph.nodes if "bucket" in node.meta]
    return [node for node in nodes if node.meta["bucket"].over]


PAIR = ("gather", "copy")
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*("scale", "own", "read", "both", "tell", "clip"), *PAIR, *PAIR]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=4,
    max_size=16,
)
PUBLISHED: list[Step] = [
    ("own", 0, 0), ("own", 2, 0), ("own", 3, 0),
    *((what, i, i) for what in ("gather", "copy") for i in (0, 2, 3)),
    ("read", 0, 0),
]  # fmt: skip


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(st.lists(STEPS, min_size=6, max_size=6))
def test_an_update_gives_what_its_lines_give_one_by_one(cases: list[list[Step]]) -> None:
    for results in run_ranks(2, both, [PUBLISHED, *cases]):
        assert results[0][2] == 2
        for wanted, found, _ in results:
            assert all(map(same, wanted, found))


EVERY: list[Step] = [
    *(("own", i, 0) for i in range(4)),
    *((what, i, i) for what in ("gather", "copy") for i in range(4)),
    ("read", 0, 0), ("tell", 1, 0),
]  # fmt: skip
ALL = st.sampled_from([EVERY[4:12], EVERY[:12], []])
"""Leaves of a flat come over it only together."""


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(st.lists(st.tuples(STEPS, ALL, STEPS), min_size=6, max_size=6))
@pytest.mark.slow
def test_so_it_does_where_leaves_lie_in_flats(
    cases: list[tuple[list[Step], list[Step], list[Step]]],
) -> None:
    drawn = [[*before, *every, *after] for before, every, after in cases]
    for results in run_ranks(2, both, [EVERY, EVERY, *drawn], True):
        assert results[0][2] == 2
        for wanted, found, _ in results:
            assert all(map(same, wanted, found))


def in_line(*steps: Step, flat: bool = False) -> Program:
    with fake_ranks(2):
        mesh = resolve_mesh(None, "cpu")
        axis = Axis(mesh.shard_group, mesh.shard_size, mesh.shard_rank)
        program = program_of([*steps], leaves_of(2, flat=flat), 0, axis)
        program.verify()
        return program


@pytest.mark.parametrize(
    ("between", "count"),
    [
        ((), 1),
        ((("read", 1, 0),), 1),
        ((("scale", 1, 0),), 1),
        ((("gather", 1, 0),), 1),
        ((("read", 0, 0),), 0),  # it would see what other ranks send
        ((("scale", 0, 0),), 0),
        ((("own", 0, 0),), 0),
        ((("both", 1, 0),), 0),
        ((("gather", 1, 0), ("copy", 1, 0)), 0),
    ],
)
def test_only_what_nobody_touches_meanwhile_is_gathered_over(
    between: tuple[Step, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fzero.distributed.buckets.ALONE_FROM_ON_DEVICES", 0)
    program = in_line(("own", 0, 0), ("gather", 0, 0), *between, ("copy", 0, 0), ("read", 0, 0))
    found = [x for x in over(program) if x.meta["bucket"].leaves[0].name == "0"]
    assert len(found) == count


def late(graph: fx.Graph, launch: fx.Node) -> None:
    """Read the leaf once more, while it comes."""
    (read,) = [x for x in graph.nodes if str(x.target) == "aten.sum.default"]
    wait_of(launch).prepend(read)


def elsewhere(graph: fx.Graph, launch: fx.Node) -> None:
    (unpack,) = wait_of(launch).users
    other = next(x for x in graph.nodes if x.op == "placeholder" and x.name.startswith("arg1"))
    unpack.args = (*unpack.args[:2], [other])


@pytest.mark.parametrize("damage", [late, elsewhere])
def test_who_reads_a_leaf_while_it_comes_is_found(
    damage: Callable[[fx.Graph, fx.Node], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fzero.distributed.buckets.ALONE_FROM_ON_DEVICES", 0)
    program = in_line(("own", 0, 0), ("gather", 0, 0), ("copy", 0, 0), ("read", 0, 0))
    graph = copy_graph(program.graph)
    changed = program.logged(graph, "a pass of mine")
    damage(graph, over(changed)[0])
    with pytest.raises(TraceError, match=r"is writing over|over other leaves"):
        changed.verify()


@pytest.mark.parametrize(
    ("wrong", "told"), [(torch.ops.aten.sum.default, "reads"), (torch.ops.aten.zero_.default, "")]
)
@pytest.mark.parametrize("leaf", [0, 1, 2])
def test_nor_may_any_leaf_of_a_flat_be_touched_while_it_comes(
    wrong: Any, told: str, leaf: int
) -> None:
    every: list[Step] = [(what, i, i) for what in ("gather", "copy") for i in (0, 1, 2)]
    program = in_line(*every, flat=True)
    graph = copy_graph(program.graph)
    changed = program.logged(graph, "a pass of mine")
    (launch,) = over(changed)
    x = [node for node in graph.nodes if node.op == "placeholder"][leaf]
    with graph.inserting_after(launch):
        call(graph, wrong, x)
    with pytest.raises(TraceError, match=f"{told or 'writes'} .*, which all_gather is"):
        changed.verify()


def test_they_take_no_memory_and_are_on_their_way_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fzero.distributed.buckets.ALONE_FROM_ON_DEVICES", 0)
    owned: list[Step] = [("own", i, 0) for i in (0, 1, 3)]
    moved: list[Step] = [(what, i, i) for i in (0, 1, 3) for what in ("gather", "copy")]
    program = in_line(*owned, ("tell", 0, 0), *moved)
    inputs = sum(torch.empty(shape).nbytes for shape in BY_ROWS)
    assert program.peak_bytes() < inputs + 100
    marks = [x for x in program.graph.nodes if "bucket" in x.meta or is_wait(x)]
    kinds = ["wait" if is_wait(x) else x.meta["bucket"].kind for x in marks]
    # the sum that is told reads a leaf that comes over: it can't be taken behind its gather
    assert kinds == ["all_reduce", *["all_gather"] * 3, *["wait"] * 4]
    assert str(program).count(", in place") == 3
    assert "unpack_into" not in str(program)


def test_what_is_only_told_is_computed_while_leaves_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that something is multiplied by is awaited there."""
    monkeypatch.setattr("fzero.distributed.buckets.ALONE_FROM_ON_DEVICES", 0)
    moved: list[Step] = [("own", 0, 0), ("gather", 0, 0), ("copy", 0, 0)]
    kinds = {}
    for what in ("tell", "clip"):
        program = in_line((what, 2, 1), *moved)
        marks = [x for x in program.graph.nodes if "bucket" in x.meta or is_wait(x)]
        kinds[what] = ["wait" if is_wait(x) else x.meta["bucket"].kind for x in marks]
        order = [str(x.target) for x in program.graph.nodes]
        assert (order.index("aten.sum.default") > order.index(str(GATHER_IN_PLACE))) == (
            what == "tell"
        )
    assert kinds["tell"] == ["all_gather", "all_reduce", "wait", "wait"]
    assert kinds["clip"] == ["all_reduce", "wait", "all_gather", "wait"]


GATHER_IN_PLACE = torch.ops.fzero.gather_in_place.default


def test_a_flat_is_gathered_over_only_as_a_whole() -> None:
    """A leaf that is not asked for would be written over by what other ranks have of it."""
    every: list[Step] = [(what, i, i) for what in ("gather", "copy") for i in (0, 1, 2)]
    assert len(over(in_line(*every, flat=True))) == 1
    some = [step for step in every if step[1] != 1]
    assert not over(in_line(*some, flat=True))
