"""The engine's state machine alone, over generated histories."""

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fzero.engine import phases
from fzero.engine.phases import BackwardState, Rules, masks, transition
from fzero.errors import BackwardError
from tests.engine.walk import Walk

LEAVES = 5


@settings(
    max_examples=10_000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.binary(min_size=30, max_size=100))
def test_every_gradient_is_reduced_once_in_every_history(choices: bytes) -> None:
    Walk(choices).run()


# a graph task as what it brings: pairs of leaf and the task inside it, 0 for itself
Arrivals = list[tuple[int, int]]
arrivals = st.lists(
    st.tuples(st.integers(0, LEAVES - 1), st.integers(0, 2)), min_size=1, unique=True
)


def run(
    rules: Rules, state: BackwardState, *events: phases.Event
) -> tuple[BackwardState, list[phases.Action]]:
    done: list[phases.Action] = []
    for event in events:
        state, actions = transition(rules, state, event)
        done += actions
    return state, done


def one_task(number: int, arrivals: Arrivals) -> list[phases.Event]:
    ready = [phases.GradientReady(leaf, number + nested) for leaf, nested in arrivals]
    return [phases.OutputReached(0, number), *ready]


@given(arrivals, st.lists(st.integers(0, LEAVES), max_size=3), st.data())
def test_a_task_like_the_last_one_reduces_early_and_has_nothing_late(
    first: Arrivals, cuts: list[int], data: st.DataObject
) -> None:
    edges = [0, *sorted(set(cuts) - {0, LEAVES}), LEAVES]
    buckets = [range(a, b) for a, b in itertools.pairwise(edges)]
    rules = Rules(masks(buckets), counts=True)
    state, _ = run(rules, BackwardState(), *one_task(10, first), phases.TaskEnded(10))
    state, _ = run(
        rules, state._replace(kept=False), *one_task(20, data.draw(st.permutations(first)))
    )
    assert state.task is not None
    assert not state.task.late
    came = {leaf for leaf, _ in first}
    ready = [set(bucket) <= came for bucket in buckets]
    assert state.task.launched == [*ready, False].index(False)


def test_what_comes_after_its_bucket_left_is_kept_for_the_next() -> None:
    rules = Rules(masks([[0], [1]]))
    state, actions = run(
        rules, BackwardState(), *one_task(10, [(0, 0), (0, 1), (1, 0)]), phases.TaskEnded(10)
    )
    assert [a for a in actions if isinstance(a, phases.Launch)] == [(0,), (1,)]
    assert state.kept
    _, actions = run(rules, state, phases.StepCalled())
    assert [type(a) for a in actions] == [phases.Flush, phases.Update, phases.Reshard]


def test_a_backward_that_only_asks_for_gradients_changes_nothing() -> None:
    state, actions = run(
        Rules(masks([[0]])), BackwardState(), phases.OutputReached(3, 10), phases.TaskEnded(10)
    )
    assert state == BackwardState()
    assert [type(a) for a in actions] == [phases.Watch, phases.Discard, phases.Reshard]


def test_a_scale_on_one_backward_does_not_excuse_the_next() -> None:
    rules = Rules(masks([[0]]), scaled=True)
    scaled = [phases.ScaleApplied(10), phases.GradientReady(0, 10), phases.TaskEnded(10)]
    state, _ = run(rules, BackwardState(), *scaled)
    with pytest.raises(BackwardError, match="scale"):
        run(rules, state, phases.OutputReached(0, 11), phases.GradientReady(0, 11))


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([phases.StepCalled()], "no backward"),
        ([*one_task(1, [(0, 0)]), phases.StepCalled()], "inside a backward"),
        ([phases.ForwardStarted(0), phases.StepCalled()], "inside a forward"),
        ([phases.ForwardStarted(0), phases.GradientsZeroed()], "inside a forward"),
        (
            [
                *one_task(1, [(0, 0)]),
                phases.TaskEnded(1),
                phases.StepCalled(),
                phases.StepCalled(),
            ],
            "no backward",
        ),
        (
            [
                *one_task(1, [(0, 0)]),
                phases.TaskEnded(1),
                phases.SyncPaused(),
                phases.StepCalled(),
            ],
            "no_sync",
        ),
    ],
)
def test_out_of_order(events: list[phases.Event], word: str) -> None:
    rules = Rules(masks([[0]]))
    state, _ = run(rules, BackwardState(), *events[:-1])
    with pytest.raises(BackwardError, match=word):
        transition(rules, state, events[-1])


def lines_per_event(leaves: int, history: bool) -> list[int]:
    """How many lines of Python each event of one task takes."""
    size = leaves // 10
    buckets = [range(i, i + size) for i in range(0, leaves, size)]
    last = ((1 << leaves) - 1,) if history else ()
    rules, state = Rules(masks(buckets)), BackwardState(last=last)
    lines: list[int] = []

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        # what the garbage collector happens to run is no part of it
        lines[-1] += event == "line" and frame.f_code.co_filename == phases.__file__
        return count

    some = [phases.GradientReady(leaf, 1 + leaf % 2) for leaf in range(0, leaves, size // 2)]
    events = [phases.ForwardStarted(0), phases.ForwardEnded(0), phases.OutputReached(0, 1)]
    for event in [*events, *some, phases.TaskEnded(1), phases.StepCalled()]:
        lines.append(0)
        before = sys.gettrace()
        sys.settrace(count)
        try:
            state, _ = transition(rules, state, event)
        finally:
            sys.settrace(before)
    return lines


@pytest.mark.parametrize("history", [False, True])
def test_an_event_costs_the_same_however_many_leaves_there_are(history: bool) -> None:
    small, large = lines_per_event(40, history), lines_per_event(100_000, history)
    assert small == large
    assert max(small) < 60
