"""Two lanes carry what one does, in no more time, and what either does alone in no less."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.program.links import Flight, Links, Load

CLOSE = 1e-9


class Launch(NamedTuple):
    """Seconds after the launch before it, a lane, and a load."""

    gap: float
    lane: str
    load: Load


SECONDS = st.one_of(st.just(0.0), st.floats(1e-6, 3))
LAUNCHES = st.lists(
    st.builds(
        Launch,
        SECONDS,
        st.sampled_from(["gathers", "reductions"]),
        st.builds(Load, SECONDS, st.fixed_dictionaries({"inside": SECONDS, "between": SECONDS})),
    ),
    min_size=1,
    max_size=9,
)


def flown(launches: list[Launch], *, lane: str | None = None) -> list[Flight]:
    """All of them, to the end; in one lane, if its name is given."""
    links, flights, now = Links(), list[Flight](), 0.0
    for launch in launches:
        now += launch.gap
        flights.append(links.launch(lane or launch.lane, launch.load, now))
    links.finish()
    return flights


def end(flights: list[Flight]) -> float:
    return max(flight.end for flight in flights)


@given(LAUNCHES)
def test_two_lanes_are_done_no_later_than_one_and_no_earlier_than_each_alone(
    launches: list[Launch],
) -> None:
    two, one = flown(launches), flown(launches, lane="all")
    assert end(two) <= end(one) + CLOSE
    for lane in ("gathers", "reductions"):
        # the others take nothing, at the same moments
        alone = [x if x.lane == lane else x._replace(load=Load(0.0, {})) for x in launches]
        assert end(two) >= end(flown(alone)) - CLOSE
        if all(x.lane == lane for x in launches):
            assert [x.end for x in two] == [x.end for x in one]


@given(LAUNCHES)
def test_a_lane_keeps_its_order_and_no_link_carries_more_than_it_can(
    launches: list[Launch],
) -> None:
    flights = flown(launches)
    for flight, launch in zip(flights, launches, strict=True):
        assert flight.start >= flight.launched
        assert flight.end - flight.start >= launch.load.seconds - CLOSE
    for lane in ("gathers", "reductions"):
        mine = [f for f, x in zip(flights, launches, strict=True) if x.lane == lane]
        for one, following in itertools.pairwise(mine):
            assert following.start == max(one.end, following.launched)
    for link in ("inside", "between"):
        for since in (flight.launched for flight in flights):
            after = [x for f, x in zip(flights, launches, strict=True) if f.launched >= since]
            assert sum(x.load.links[link] for x in after) <= end(flights) - since + CLOSE


def test_two_over_one_link_have_half_of_it_each_and_others_are_not_disturbed() -> None:
    links = Links()
    gather = links.launch("gathers", Load(1.0, {"inside": 4.0, "between": 2.0}), 0.0)
    # who came first has no precedence: from second 3 to 5 this one has half
    reduction = links.launch("reductions", Load(1.0, {"inside": 1.0}), 2.0)
    far = links.launch("copies", Load(0.0, {"to host": 3.0}), 2.0)
    assert links.landing(reduction) == pytest.approx(5.0)
    assert links.landing(gather) == pytest.approx(6.0)
    assert far.end == pytest.approx(5.0)
    # a link that the first uses half of has room for half of the second
    links = Links()
    links.launch("gathers", Load(0.0, {"inside": 4.0, "between": 2.0}), 0.0)
    second = links.launch("copies", Load(0.0, {"between": 2.0}), 0.0)
    assert links.landing(second) == pytest.approx(3.0)
