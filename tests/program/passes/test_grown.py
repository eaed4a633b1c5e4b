"""Buckets are larger where memory has room, and nowhere else."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.distributed import buckets
from fzero.program import Program
from fzero.program.graph import BACKWARD, FORWARD
from fzero.program.memory import timeline
from fzero.program.passes.bucket import bucket_at
from fzero.program.passes.gathers import hoist_reductions, regather, sink_gathers
from fzero.program.passes.groups import ALIKE, Growth
from fzero.program.passes.grown import as_grown_as_fits
from fzero.program.passes.sketch import Sketch
from tests.program.programs import Recorded, settled_by_ranks
from tests.ranks import fake_ranks, run_ranks


@contextlib.contextmanager
def _over_gloo(world: int, rank: int = 0) -> Iterator[None]:
    with fake_ranks(world, rank), mock.patch.object(buckets, "is_gloo", return_value=True):
        yield


@settings(max_examples=12)
@given(
    world=st.sampled_from([2, 3]),
    widths=st.lists(st.integers(1, 40), min_size=4, max_size=9),
    rows=st.sampled_from([1, 30, 300]),
    size=st.sampled_from([1, 500, 5000]),
    most=st.sampled_from([1, 2000, 10**6]),
    percent=st.integers(100, 140),
)
def test_the_peak_stays_within_its_bound_and_collectives_get_fewer(
    world: int, widths: list[int], rows: int, size: int, most: int, percent: int
) -> None:
    with _over_gloo(world, rank=world - 1):
        recorded = Recorded(widths, rows=rows)
        program = hoist_reductions(sink_gathers(regather(recorded.program)))
        alike = bucket_at(program, size)
        bound = max(timeline(alike.graph)) * percent // 100
        growth = as_grown_as_fits(Sketch(program.graph), size, most, bound)
        built = bucket_at(program, size, growth=growth)
        assert max(timeline(built.graph)) <= bound
        assert len(built.collectives()) <= len(alike.collectives())
        for row in built.collectives():
            assert row.bytes <= max(size, most) or len(row.leaves) == 1, row


def _program(rows: int) -> Program:
    return hoist_reductions(sink_gathers(regather(Recorded([32] * 25, rows=rows).program)))


def _grown(rows: int) -> tuple[Growth, dict[tuple[str, str], list[int]], int]:
    """Of 24 layers of 4 KB in buckets of 9 KB, with no more memory than those take: the growth,
    the sizes of buckets by kind and phase, how many more there would be without."""
    with _over_gloo(4):
        program = _program(rows)
        alike = bucket_at(program, 9000)
        bound = max(timeline(alike.graph))
        growth = as_grown_as_fits(Sketch(program.graph), 9000, 2**20, bound)
        built = bucket_at(program, 9000, growth=growth)
        sizes: dict[tuple[str, str], list[int]] = {}
        for row in built.collectives():
            sizes.setdefault((row.kind, row.phase), []).append(row.bytes)
        return growth, sizes, len(alike.collectives()) - len(built.collectives())


def test_buckets_get_smaller_towards_the_turn_and_larger_after_it() -> None:
    growth, sizes, fewer = _grown(rows=300)  # a layer keeps ten times as much as it has parameters
    assert growth.forward
    assert growth.reductions
    gathers, reductions = sizes["all_gather", FORWARD], sizes["reduce_scatter", BACKWARD]
    assert gathers[0] == max(gathers) > 3 * gathers[-1]
    assert reductions[0] <= 9000 < 3 * 9000 < max(reductions)
    assert fewer > 10


def test_where_activations_are_small_there_is_little_room() -> None:
    growth, _, fewer = _grown(rows=1)
    assert not growth.reductions
    assert not growth.backward
    assert fewer <= 6


def test_on_devices_all_have_one_size() -> None:
    # a collective costs less there than copying a leaf that would else travel alone
    with fake_ranks(4):
        sketch = Sketch(_program(300).graph)
        assert as_grown_as_fits(sketch, 9000, 2**20, 2**30) == ALIKE


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_other_batches_settle_one_growth(rank: int) -> None:
    (first, losses), (second, others) = run_ranks(2, settled_by_ranks, "growth", 24, 25.0, rank)
    assert first == second
    assert losses == others
