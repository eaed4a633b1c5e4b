"""A sketch of a graph holds what the graph with its buckets holds, of which none is built."""

from itertools import product
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.distributed import buckets
from fzero.program.memory import timeline
from fzero.program.passes import bucket as passes
from fzero.program.passes.bucket import bucket_at
from fzero.program.passes.gathers import hoist_reductions, regather, sink_gathers
from fzero.program.passes.groups import ALIKE, Growth
from fzero.program.passes.schedule import Early
from fzero.program.passes.sketch import Sketch
from fzero.program.program import Program
from tests.program.programs import Recorded
from tests.ranks import fake_ranks, run_ranks

SIZES = (1, 300, 10**5)
MIXED = Early(forward=2, backward=1, last=1, first=1)
GROWN = Growth(most=10**4, forward=16, backward=4, reductions=8)


def same_bytes(program: Program) -> None:
    sketch = Sketch(program.graph)
    for size, prefetch in product(SIZES, (0, 2)):
        built = bucket_at(program, size, prefetch=prefetch)
        assert sketch.timeline_at(size, prefetch) == list(timeline(built.graph)), (size, prefetch)
        for growth in (ALIKE, GROWN):
            built = bucket_at(program, size, early=MIXED, growth=growth)
            sketched = sketch.at(size, MIXED, growth)
            assert sketched.alive == list(timeline(built.graph)), (size, growth)
            assert sketched.collectives == len(built.collectives()), (size, growth)


@settings(max_examples=4)
@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    world=st.sampled_from([2, 3]),
    laid=st.booleans(),
    alone=st.sampled_from([0, 99]),
)
def test_a_sketch_holds_what_is_built(
    widths: list[int], world: int, laid: bool, alone: int
) -> None:
    with (
        fake_ranks(world, rank=world - 1),
        mock.patch.multiple(buckets, ALONE_FROM=alone, ALONE_FROM_ON_DEVICES=alone),
    ):
        program = Recorded(widths).program
        same_bytes(hoist_reductions(sink_gathers(regather(program))) if laid else program)


def met(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Every Program whose buckets a step chooses."""
    found: list[Program] = []
    choose = passes._peaks

    def noted(
        program: Program, sketch: Sketch, sizes: list[int], prefetch: int | None
    ) -> list[int]:
        found.append(program)
        return choose(program, sketch, sizes, prefetch)

    monkeypatch.setattr(passes, "_peaks", noted)
    return found


def params() -> dict[str, torch.Tensor]:
    shapes = {"a": (5, 8), "b": (8,), "c": (3, 8, 8), "d": (8, 1), "e": (1, 7), "f": (2, 9)}
    return {
        k: torch.randn(v, generator=torch.Generator().manual_seed(1)) for k, v in shapes.items()
    }


def model_fn(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ p["a"] + p["b"])
    for w in p["c"]:
        h = torch.tanh(h @ w.t())
    return (h @ p["d"] @ p["e"]).square().mean() + (p["f"].t() @ p["f"]).sum()


@pytest.mark.parametrize(
    ("stage", "opt"),
    [(0, "adamw"), (1, "adamw"), (2, "adamw"), (3, "adamw"), (2, "muon"), (3, "muon")],
)
def test_a_step_is_sketched_whole(stage: int, opt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(4, rank=2):
        found = met(monkeypatch)
        cfg = fzero.Config(stage=stage, precision="bf16" if stage % 2 else None, accum_steps=2)
        step_fn = fzero.make_train_step(model_fn, getattr(fzero.optim, opt)(0.1), cfg)
        step_fn.lower(*step_fn.init(params()), torch.ones(4, 5))
        assert found
        for program in found:
            same_bytes(program)


def over_gloo() -> int:
    program = Recorded([4, 8, 7, 3]).program
    for alone in (buckets.ALONE_FROM, 99):
        with mock.patch.object(buckets, "ALONE_FROM", alone):
            same_bytes(program)
            same_bytes(hoist_reductions(sink_gathers(regather(program))))
    return 1


def test_a_sketch_knows_how_gloo_travels() -> None:
    assert run_ranks(2, over_gloo) == [1, 1]
