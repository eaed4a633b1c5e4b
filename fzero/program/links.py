"""What is in flight: lanes in which things wait for each other, and links that lanes share.

[Note: lanes share links] What a process group carries goes one after another, and so does what its
second lane carries beside it: see [Note: two lanes] in `fzero.distributed.lanes`. Lanes run beside
each other. A latency takes nothing of a link, so latencies pass at the same time. The bytes that
follow share the links: while two are in flight over one link each has half of it, also where they
are of groups of different ranks. Over different links they do not disturb each other.

So it is on devices. NCCL runs collectives of one communicator one after another, and those of two
at once (NVIDIA/nccl, issue 574). Their kernels have channels of their own, whose bytes meet on the
link: two all-reduces of 256 MB at once took 4.2 ms, where one takes 1.8 (issue 1094). Who came
first has no precedence, so a reduction slows down a gather that was on its way already. Two lanes
carry all there is in no more time than one; a step that waits for such a gather may still take
longer.

References: Casanova, Marchal, A network model for simulation of grid application, INRIA RR-4596,
2002 (flows that share links, as rates that change when one begins or ends).
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Load(NamedTuple):
    """What something in flight takes of the links.

    Args:
        latency: seconds that take nothing of them, first.
        links: by name of a link, seconds for which its bytes would fill it.
    """

    latency: float
    links: Mapping[str, float]

    @property
    def transfer(self) -> float:
        """Seconds of its bytes with all links for themselves: the slowest sets the pace."""
        return max(self.links.values(), default=0.0)

    @property
    def shares(self) -> Mapping[str, float]:
        """By link, the part of it that is used at this pace: of the slowest all."""
        return {link: seconds / self.transfer for link, seconds in self.links.items() if seconds}

    @property
    def seconds(self) -> float:
        """Seconds that it takes alone."""
        return self.latency + self.transfer


@dataclass(eq=False)
class Flight:
    """Something in flight.

    Args:
        load: that it is of the links.
        launched: the second in which it was.
        start: when its lane was free for it; infinite before.
        end: when it is done; infinite before.
        left: share of its bytes that is still to come.
    """

    load: Load
    launched: float
    start: float = math.inf
    end: float = math.inf
    left: float = 1.0

    @property
    def moves_from(self) -> float:
        """When its bytes begin to."""
        return self.start + self.load.latency


class Links:
    """The links of one rank over time, from launch to launch.

    Examples:
        >>> links = Links()
        >>> first, second = (links.launch(x, Load(1.0, {"link": 2.0}), 0.0) for x in "ab")
        >>> links.landing(first), links.landing(second)  # both latencies, then half a link for each
        (5.0, 5.0)
        >>> third, fourth = (links.launch("a", Load(1.0, {"link": 2.0}), 5.0) for _ in range(2))
        >>> links.landing(fourth), third.end
        (11.0, 8.0)
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._lanes: dict[str, deque[Flight]] = {}

    def launch(self, lane: str, load: Load, now: float) -> Flight:
        """Start something, after what was launched in its lane before.

        Args:
            lane: that it goes in.
            load: of it.
            now: seconds; no launch is earlier than the one before it.
        """
        while self._now < now:
            self._advance(now)
        flight = Flight(load, now)
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append(flight)
        if waiting[0] is flight:
            flight.start = now
        return flight

    def landing(self, flight: Flight) -> float:
        """When something is done, if nothing more is launched until then."""
        while math.isinf(flight.end):
            self._advance(math.inf)
        return flight.end

    def finish(self) -> None:
        """Let all end that is in flight."""
        for waiting in self._lanes.values():
            while waiting:
                self.landing(waiting[0])

    def _advance(self, until: float) -> None:
        """Go on to where something begins to move or ends, at most to a moment before that."""
        first = [waiting[0] for waiting in self._lanes.values() if waiting]
        moving = [flight for flight in first if flight.moves_from <= self._now]
        busy: dict[str, float] = {}
        for flight in moving:
            for link, share in flight.load.shares.items():
                busy[link] = busy.get(link, 0.0) + share
        lasts = {x: x.left * x.load.transfer * _crowd(x.load, busy) for x in moving}
        begin = [flight.moves_from for flight in first if flight not in lasts]
        then = min([until, *begin, *(self._now + seconds for seconds in lasts.values())])
        for flight, seconds in lasts.items():
            if self._now + seconds > then:
                flight.left *= 1 - (then - self._now) / seconds
            else:
                flight.end = then
        for waiting in self._lanes.values():
            if waiting and waiting[0].end <= then:
                waiting.popleft()
                if waiting:
                    waiting[0].start = then
        self._now = then


def _crowd(load: Load, busy: Mapping[str, float]) -> float:
    """How many times as long it takes, by the fullest of its links."""
    return max([1.0, *(busy[link] for link in load.shares)])
