"""The model of what a plan would hold, against the passes that carry it out."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.program.hardware import CPU
from fzero.program.liveness import Liveness
from fzero.program.memory import timeline
from fzero.program.passes.gathers import hoist_reductions, regather, sink_gathers
from fzero.program.passes.recompute import recompute
from fzero.program.program import Program
from tests.program.passes.test_recompute import before_the_pass
from tests.ranks import fake_ranks


def laid(program: Program) -> Program:
    return hoist_reductions(sink_gathers(program))


@pytest.fixture(scope="module", params=[(0, 1), (1, 2), (2, 2), (3, 2)], ids=str)
def model(request: Any) -> Iterator[tuple[Program, Liveness]]:
    stage, world = request.param
    with fake_ranks(world):
        base = before_the_pass(stage=stage)
        yield base, Liveness(laid(base), CPU)


@settings(max_examples=12)
@given(st.data())
def test_the_model_is_the_memory_of_the_passes(
    model: tuple[Program, Liveness], data: st.DataObject
) -> None:
    base, liveness = model
    every = range(len(liveness.values))
    saved = data.draw(st.sets(st.sampled_from(every)))
    alive = liveness.under(saved)
    gone = {liveness.nodes[i].name for i in alive.copied if liveness.of[i] not in liveness.leaves}
    leaves = {liveness.values[v].name for v in liveness.leaves - saved}
    program = laid(regather(recompute(base, gone), leaves))
    # by node the two may differ by a step where copies of gathers stand; the most may not
    assert alive.peak == max(timeline(program.graph))


def test_saving_what_is_read_is_the_step_as_it_was(model: tuple[Program, Liveness]) -> None:
    base, liveness = model
    alive = liveness.under(liveness.read)
    assert not alive.copied
    assert alive.flops == alive.price == 0
    assert [*map(int, alive.bytes)] == [*timeline(laid(base).graph)]
