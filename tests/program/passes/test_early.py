"""Gathers are launched early where memory has room, and nowhere else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.program import Program
from fzero.program.memory import peak_bytes, timeline
from fzero.program.passes import early as passes
from fzero.program.passes.bucket import bucket_at
from fzero.program.passes.early import as_early_as_fits
from fzero.program.passes.gathers import hoist_reductions, regather, sink_gathers
from fzero.program.passes.schedule import Early
from fzero.program.passes.sketch import Sketch
from tests.program.programs import Recorded, chain_loss, settled_by_ranks
from tests.ranks import run_ranks


def _found(widths: list[int], size: int, percent: int) -> tuple[int, int, Early | None]:
    program = hoist_reductions(sink_gathers(regather(Recorded(widths).program)))
    lowest = max(timeline(bucket_at(program, size).graph))
    bound = lowest * percent // 100
    early = as_early_as_fits(Sketch(program.graph), size, bound)
    return bound, max(timeline(bucket_at(program, size, early=early).graph)), early


def _over_gloo(cases: list[tuple[list[int], int, int]]) -> list[tuple[int, int, Early | None]]:
    return [_found(*case) for case in cases]


@settings(max_examples=4)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 40), min_size=4, max_size=9),
            st.sampled_from([1, 500, 5000]),
            st.integers(100, 130),
        ),
        min_size=4,
        max_size=4,
    )
)
def test_the_peak_stays_within_its_bound(cases: list[tuple[list[int], int, int]]) -> None:
    for rank in run_ranks(2, _over_gloo, cases):
        for bound, peak, _ in rank:
            assert peak <= bound


def _program(rows: int, **options: object) -> Program:
    params = {f"w{i}": torch.eye(32) for i in range(8)}
    cfg = fzero.Config(stage=3, bucket_mb=0.005, **options)  # pyright: ignore
    step_fn = fzero.make_train_step(chain_loss, fzero.optim.sgd(0.1), cfg)
    return next(step_fn.lower(*step_fn.init(params), torch.ones(rows, 32)).parts())


def _many_rows() -> tuple[tuple[int, ...], int, int]:
    with pytest.MonkeyPatch.context() as patch:
        found = _program(rows=512)
        patch.setattr(passes, "DEPTHS", (0,))
        return found.early, peak_bytes(found), peak_bytes(_program(rows=512, prefetch=0))


def test_activations_leave_room_for_early_gathers() -> None:
    for early, peak, lowest in run_ranks(2, _many_rows):
        assert early[0] == 4, early  # forward: so far from the peak that all depths fit
        assert early[1] >= 1, early
        assert peak <= lowest * 1.1


def _few_rows() -> tuple[int, int, int]:
    found = _program(rows=1)
    return peak_bytes(found), peak_bytes(_program(rows=1, prefetch=4)), len(found.early)


def test_without_room_they_are_not_early() -> None:
    for peak, early, fields in run_ranks(2, _few_rows):
        assert peak < early
        assert fields == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_other_batches_settle_one_order(rank: int) -> None:
    (first, losses), (second, others) = run_ranks(2, settled_by_ranks, "early", 8, 0.01, rank)
    assert first == second
    assert losses == others
