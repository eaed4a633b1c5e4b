"""The engine's state machine alone, over generated histories."""

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fzero.engine import events as ev
from fzero.engine import phases
from fzero.engine.backward_state import BackwardState, Rules
from fzero.engine.counts import masks
from fzero.engine.phases import transition
from fzero.errors import BackwardError
from tests.engine.walk import Walk

LEAVES = 5


@settings(
    max_examples=10_000,
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
    rules: Rules, state: BackwardState, *events: ev.Event
) -> tuple[BackwardState, list[ev.Action]]:
    done: list[ev.Action] = []
    for event in events:
        state, actions = transition(rules, state, event)
        done += actions
    return state, done


def one_task(number: int, arrivals: Arrivals) -> list[ev.Event]:
    ready = [ev.GradientReady(leaf, number + nested) for leaf, nested in arrivals]
    return [ev.OutputReached(0, number), *ready]


@given(arrivals, st.lists(st.integers(0, LEAVES), max_size=3), st.data())
def test_a_task_like_the_last_one_reduces_early_and_has_nothing_extra(
    first: Arrivals, cuts: list[int], data: st.DataObject
) -> None:
    edges = [0, *sorted(set(cuts) - {0, LEAVES}), LEAVES]
    buckets = [range(a, b) for a, b in itertools.pairwise(edges)]
    rules = Rules(masks(buckets), counts=True)
    state, _ = run(rules, BackwardState(), *one_task(10, first), ev.TaskEnded(10))
    state, _ = run(
        rules, state._replace(unreduced=False), *one_task(20, data.draw(st.permutations(first)))
    )
    assert state.task is not None
    assert not state.task.extra
    came = {leaf for leaf, _ in first}
    ready = [set(bucket) <= came for bucket in buckets]
    assert state.task.launched == [*ready, False].index(False)


@given(
    st.lists(st.tuples(st.integers(0, LEAVES - 1), st.integers(0, 2)), min_size=1, max_size=12),
    st.lists(st.integers(0, LEAVES), max_size=3),
    st.lists(st.integers(0, LEAVES - 1), max_size=8),
    st.booleans(),
)
def test_gradients_that_are_told_together_do_what_they_do_one_by_one(
    arrivals: Arrivals, cuts: list[int], before: list[int], counts: bool
) -> None:
    edges = [0, *sorted(set(cuts) - {0, LEAVES}), LEAVES]
    rules = Rules(masks([range(a, b) for a, b in itertools.pairwise(edges)]), counts=counts)
    first = [ev.GradientReady(leaf, 5) for leaf in before]
    start, _ = run(rules, BackwardState(), ev.OutputReached(0, 5), *first, ev.TaskEnded(5))
    state, _ = run(rules, start, ev.OutputReached(1, 10))
    together, launched = state, []
    taken = 0
    for leaf, nested in arrivals:
        event = ev.GradientReady(leaf, 10 + nested)
        state, actions = transition(rules, state, event)
        launches = [action for action in actions if isinstance(action, ev.Launch)]
        number, awaited = phases.untold(rules, together)
        alone = number != event.task or taken >> leaf & 1
        taken |= 0 if alone else 1 << leaf
        if taken and (alone or not awaited & ~taken):
            together, launched = run(rules, together, ev.GradientsTaken(taken, 10))
            taken = 0
        else:
            launched = []
        if alone:
            together, more = run(rules, together, event)
            launched += [action for action in more if isinstance(action, ev.Launch)]
        assert launched == launches  # none later, none earlier
    if taken:
        together, _ = run(rules, together, ev.GradientsTaken(taken, 10))
    assert together == state


def test_what_is_to_be_refused_is_never_taken_untold() -> None:
    open_ = run(Rules((1,)), BackwardState(), ev.OutputReached(0, 10))[0]
    assert phases.untold(Rules((1,)), open_) == (10, 1)
    assert phases.untold(Rules((1,), scaled=True), open_)[0] == -1
    assert phases.untold(Rules((1,)), open_._replace(blocks=("local_forward",)))[0] == -1
    assert phases.untold(Rules((1,)), BackwardState())[0] == -1
    unsynced = run(Rules((1,)), BackwardState(paused=1), ev.OutputReached(0, 10))[0]
    assert phases.untold(Rules((1,)), unsynced)[0] == -1


def test_what_comes_after_its_bucket_left_is_kept_for_the_next() -> None:
    rules = Rules(masks([[0], [1]]))
    state, actions = run(
        rules, BackwardState(), *one_task(10, [(0, 0), (0, 1), (1, 0)]), ev.TaskEnded(10)
    )
    assert [a for a in actions if isinstance(a, ev.Launch)] == [(0,), (1,)]
    assert state.unreduced
    _, actions = run(rules, state, ev.StepCalled())
    assert [type(a) for a in actions] == [ev.Flush, ev.Update, ev.Reshard]


def test_a_backward_that_only_asks_for_gradients_changes_nothing() -> None:
    state, actions = run(
        Rules(masks([[0]])), BackwardState(), ev.OutputReached(3, 10), ev.TaskEnded(10)
    )
    assert state == BackwardState()
    assert [type(a) for a in actions] == [ev.Watch, ev.Discard, ev.Reshard]


def test_a_scale_on_one_backward_does_not_excuse_the_next() -> None:
    rules = Rules(masks([[0]]), scaled=True)
    scaled = [ev.ScaleApplied(10), ev.GradientReady(0, 10), ev.TaskEnded(10)]
    state, _ = run(rules, BackwardState(), *scaled)
    with pytest.raises(BackwardError, match="scale"):
        run(rules, state, ev.OutputReached(0, 11), ev.GradientReady(0, 11))


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([ev.StepCalled()], "no backward"),
        ([*one_task(1, [(0, 0)]), ev.StepCalled()], "inside a backward"),
        ([ev.ForwardStarted(0), ev.StepCalled()], "inside a forward"),
        ([ev.ForwardStarted(0), ev.GradientsZeroed()], "inside a forward"),
        (
            [
                *one_task(1, [(0, 0)]),
                ev.TaskEnded(1),
                ev.StepCalled(),
                ev.StepCalled(),
            ],
            "no backward",
        ),
        (
            [
                *one_task(1, [(0, 0)]),
                ev.TaskEnded(1),
                ev.SyncPaused(),
                ev.StepCalled(),
            ],
            "no_sync",
        ),
    ],
)
def test_out_of_order(events: list[ev.Event], word: str) -> None:
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

    some = [ev.GradientReady(leaf, 1 + leaf % 2) for leaf in range(0, leaves, size // 2)]
    events = [ev.ForwardStarted(0), ev.ForwardEnded(0), ev.OutputReached(0, 1)]
    for event in [*events, *some, ev.TaskEnded(1), ev.StepCalled()]:
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
