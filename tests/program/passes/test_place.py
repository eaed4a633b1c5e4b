"""Gradients that are computed into the buckets that carry them away."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import fzero
from fzero.distributed.buckets import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    Bucket,
    buffer_of,
    pack_flat,
    pack_full,
)
from fzero.distributed.ragged import is_supported
from fzero.errors import TraceError
from fzero.layout import plan_layout
from fzero.layout.flats import plan_flats
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.graph import copy_graph
from fzero.program.passes.gathers import hoist_reductions, regather, sink_gathers
from fzero.program.passes.place import LEAST, place
from fzero.program.pipeline import share_collectives
from fzero.program.placed import INTO, placed
from tests.program.programs import Recorded
from tests.ranks import fake_ranks, run_ranks

share = partial(share_collectives, bucket_bytes=2**20, prefetch=1, exact=True)
WIDTHS = st.lists(st.integers(1, 9), min_size=2, max_size=6)


def unplaced(widths: list[int], rows: int = 3) -> tuple[Recorded, Program]:
    """An MLP whose leaves are in one flat, with buckets."""
    recorded = Recorded(widths, rows=rows, flat=True)
    return recorded, share(hoist_reductions(sink_gathers(regather(recorded.program))))


def placed_in(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.target is placed]


def both(widths: list[int]) -> list[list[Tensor]]:
    recorded, program = unplaced(widths)
    return [compile_program(one)(*recorded.inputs) for one in (program, place(program, 0))]


@pytest.mark.parametrize("widths", [[4, 8, 2], [7, 15, 16, 1], [5, 5, 5, 5, 5]])
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_peak_stay_where_gradients_are_placed(world: int, widths: list[int]) -> None:
    for before, after in run_ranks(world, both, widths):
        # products may be added up in another order where a result begins elsewhere in memory
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


@settings(max_examples=12)
@given(WIDTHS, st.integers(2, 4), st.integers(1, 40))
def test_what_is_recorded_is_kept_at_no_higher_peak(
    widths: list[int], world: int, rows: int
) -> None:
    with fake_ranks(world, rank=world - 1):
        _, before = unplaced(widths, rows)
        after = place(before, 0)
        assert after.peak_bytes() <= before.peak_bytes()
        assert sum(row.bytes for row in after.peak()) == after.peak_bytes()
        after.verify()
        assert [*map(str, after.collectives())] == [*map(str, before.collectives())]
        assert after.cost().flops == before.cost().flops
        assert place(before, 2**30) is before


def test_all_gradients_are_placed_where_little_else_is_alive() -> None:
    with fake_ranks(2):
        # the batch is large: most is alive where forward has ended, and not where flats are filled
        _, before = unplaced([8, 8, 8], rows=400)
        program = place(before, 0)
        found = placed_in(program)
        assert program.log[-1] == f"place: {len(found)} of 4 gradients computed into their buckets"
        assert len(found) == 4
        (pack,) = [node for node in program.graph.nodes if node.target is pack_full]
        assert pack.args[3] == ()  # nothing is left to copy
        assert "in send_reduce_scatter" in str(program)


def shift(node: Any) -> None:
    buffer, (shape, strides, start), *rest = node.args
    node.args = (buffer, (shape, strides, start + 1), *rest)


def other_operator(node: Any) -> None:
    buffer, there, operator, *rest = node.args
    node.args = (buffer, there, torch.ops.aten.add.Tensor, rest[0], rest[0])
    assert operator is not node.args[2]


def forget(node: Any) -> None:
    (pack,) = [x for x in node.graph.nodes if x.target is pack_full]
    node.target, node.args = node.args[2], node.args[3:]
    assert pack.args[3] == ()


@pytest.mark.parametrize("damage", [shift, other_operator, forget])
def test_what_is_not_where_it_belongs_is_found(damage: Any) -> None:
    with fake_ranks(2):
        program = place(unplaced([8, 8, 8], rows=400)[1], 0)
        graph = copy_graph(program.graph)
        damage(placed_in(program.logged(graph, ""))[0])
        with pytest.raises(TraceError, match=r"not in the place of|was recorded|can't run on"):
            program.logged(graph, "a pass of mine").verify()


def test_a_program_of_placed_gradients_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    with fake_ranks(2):
        program = place(unplaced([8, 8, 8], rows=400)[1], 0)
        program.save(tmp_path / "x")
        loaded = fzero.Program.load(tmp_path / "x")
        assert len(placed_in(loaded)) == 4
        assert loaded.listing(verbose=True) == program.listing(verbose=True)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [ALL_REDUCE, REDUCE_SCATTER])
def test_a_buffer_is_filled_alike_whatever_is_there_already(kind: str, world: int) -> None:
    shapes = [(5, 3), (7,), (4, 4), (2, 9)]
    full = [torch.randn(shape) for shape in shapes]
    layout = plan_layout("abcd", full, world)
    leaves = plan_flats(layout, 2**20) if kind == REDUCE_SCATTER else layout
    bucket = Bucket(kind, tuple(leaves), torch.float32, world, "g")
    pack = pack_full if kind == REDUCE_SCATTER else pack_flat
    wanted = pack(full, bucket)
    for missing in ((), (0,), (1, 3), (0, 1, 2, 3)):
        buffer = buffer_of(bucket, full[0].device)
        there = bucket.full.views(buffer)
        given = [full[i] if i in missing else x.copy_(full[i]) for i, x in enumerate(there)]
        assert torch.equal(pack(given, bucket, buffer, missing), wanted)


@pytest.mark.parametrize("operator", INTO)
def test_operators_write_where_they_are_told(operator: Any) -> None:
    x, kwargs = torch.randn(4, 4, 4), {}
    args: tuple[Any, ...] = (x, x)
    if operator is torch.ops.aten.mm.default:
        args = (x[0], x[1])
    elif operator is torch.ops.aten.addmm.default:
        args = (x[0], x[1], x[2])
    elif operator is torch.ops.aten.sum.dim_IntList:
        args = (x, [0], True)
    elif operator is torch.ops.aten._to_copy.default:
        args, kwargs = (x,), {"dtype": torch.float64}
    wanted = operator(*args, **kwargs)
    buffer = wanted.new_zeros(200)
    there = (tuple(wanted.shape), wanted.stride(), 7)
    found = placed(buffer, there, operator, *args, **kwargs)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert found.untyped_storage()._cdata == buffer.untyped_storage()._cdata
    assert not buffer[:7].any()
    assert not buffer[7 + wanted.numel() :].any()


def trained(world: int, stage: int, layout: str, precision: str | None) -> list[Tensor]:
    """Weights after three steps; most gradients are large enough to be placed."""

    def model_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        for name in ("a", "b", "c"):
            x = torch.tanh(x @ p[name].t() + p[f"{name}.bias"])
        x = x @ (p["d"] + p["e"])  # two leaves that have one gradient
        return x.square().mean() + (x @ p["a"]).square().mean()  # a leaf that is used twice

    wide = int((LEAST / 4) ** 0.5)
    generator = torch.Generator().manual_seed(0)
    params = {n: torch.randn(wide, wide, generator=generator) / 12 for n in "abcde"}
    params |= {f"{n}.bias": torch.randn(wide, generator=generator) for n in "abc"}
    cfg = fzero.Config(stage=stage, layout=layout, precision=precision, clip_norm=1.0)  # pyright: ignore
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.5), cfg)
    rank = torch.distributed.get_rank()
    batch = torch.randn(64, wide, generator=torch.Generator().manual_seed(rank))
    batch = batch.to(torch.bfloat16 if precision else torch.float32)
    state = step_fn.init(params)
    log = step_fn.lower(*state, batch).log
    assert any(line.startswith("place:") for line in log) == (layout == "flat" or stage == 0), log
    for _ in range(3):
        state = step_fn(*state, batch)
    return [*fzero.unshard(state[0]).values()]


@pytest.mark.skipif(not is_supported(), reason="an older torch has no DTensors for flats")
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.quick("3-bf16", "2-None")
def test_training_is_the_same_where_gradients_are_placed(stage: int, precision: str | None) -> None:
    for rows, flat in zip(
        run_ranks(2, trained, 2, stage, "rows", precision),
        run_ranks(2, trained, 2, stage, "flat", precision),
        strict=True,
    ):
        torch.testing.assert_close(flat, rows, rtol=1e-5, atol=1e-6)
