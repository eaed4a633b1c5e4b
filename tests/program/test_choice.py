"""The smallest numbers of what ranks choose are a choice that is no larger than any rank's own."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from fzero.program.choice import Choice, Thrift
from fzero.program.graph import BACKWARD, FORWARD
from fzero.program.passes.groups import Growth
from fzero.program.passes.schedule import Early

small = st.integers(0, 9)
names = st.lists(st.text(max_size=3), max_size=3).map(tuple)
sizes = st.integers(0, 2**40)
growth = st.builds(Growth, sizes, small, small, small)
early = st.builds(Early, small, small, small, small)
choices = st.builds(Choice, sizes, growth, early, small, st.none())
thrifty = st.builds(Thrift, small, names, names, names)
limited = st.builds(Choice, sizes, growth, early, small, thrifty)


@given(choices, choices, sizes)
def test_the_smallest_is_no_larger_and_no_earlier_than_either(
    mine: Choice, other: Choice, between: int
) -> None:
    both = Choice.heard(list(map(min, mine.told(), other.told())))
    for one in (mine, other):
        assert both.gradients <= one.gradients
        for phase, gathers in product((FORWARD, BACKWARD), (True, False)):
            room = both.growth.room(both.gradients, phase, between, gathers=gathers)
            assert room <= one.growth.room(one.gradients, phase, between, gathers=gathers)
        for forward in (True, False):
            pairs = zip(
                both.early.depths(9, forward=forward),
                one.early.depths(9, forward=forward),
                strict=True,
            )
            assert all(a <= b for a, b in pairs)


@given(choices)
def test_what_was_told_is_heard(choice: Choice) -> None:
    assert Choice.heard(choice.told()) == choice


@given(choices | limited)
def test_a_whole_choice_goes_through_text(choice: Choice) -> None:
    assert Choice.decoded(choice.encoded()) == choice
