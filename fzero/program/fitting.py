"""Fit a Program under a memory limit: the least work whose true peak stays below it.

The plans come from `Ladder`, whose peaks leave out inputs, state and the buffers of buckets. So a
rung is guessed, the Program is built as it will run, and its own peak says how far the next guess
has to go.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fzero.errors import ConfigError
from fzero.program.choice import Thrift
from fzero.program.hardware import CPU, Hardware
from fzero.program.ladder import RUNGS, Ladder, Plan
from fzero.program.memory import peak_bytes
from fzero.program.passes.order import OutOfOrder
from fzero.program.program import Program
from fzero.program.text import size

_P = TypeVar("_P", Program, Program | None)


class NothingFits(ConfigError):
    """No plan stays under the limit.

    Args:
        program: the one that holds least.
        limit: bytes.
        uneven: bytes, see `Fitting`.
        ways_on: what would fit.
    """

    def __init__(self, program: Program, limit: int, uneven: int = 0, ways_on: str = "") -> None:
        self.program, self.limit, self.uneven = program, limit, uneven
        super().__init__(f"{_nothing_fits(program, limit, uneven)} {ways_on}".rstrip())

    @property
    def number(self) -> int:
        """Of the plan that holds least; -1: even that holds too much."""
        fits = peak_bytes(self.program) + self.uneven <= self.limit - RESERVE
        return self.program.thrift[0] if fits else -1


@dataclass
class Fitting:
    """Programs of one function, from the one that does least to the one that holds least.

    A rung has two Programs: gathers launched ahead as they are without a limit, and launched when
    they are needed. Their numbers rise with what is given up, and of the ranks' the highest counts.

    Args:
        laid: makes the Program that the ladder is of: before `recompute`, collectives in place.
        regather: see `Ladder`.
        build: `(plan, limit, late, alone)` -> the Program as it runs, its buckets the largest under
            a limit in bytes; with 0 the smallest. With `alone` as if ranks had settled nothing.
        machine: to whose host values may be sent away; None: they may not.
        uneven: bytes that the rank with the largest shards holds more than this one. A Program is
            judged as on that rank, so that ranks with alike batches find the same; or one would
            look for other collectives in a call in which the others go on.
    """

    laid: Callable[[], Program]
    regather: bool
    build: Callable[[Plan | None, int, bool, bool], Program]
    machine: Hardware | None = None
    uneven: int = 0
    _ladder: Ladder | None = None

    @property
    def ladder(self) -> Ladder:
        """The plans; made when they are asked for."""
        if self._ladder is None:
            self._ladder = Ladder(
                self.laid(),
                regather=self.regather,
                hardware=self.machine or CPU,
                away=self.machine is not None,
            )
        return self._ladder

    def at(self, number: int, limit: int) -> Program:
        """One of them, its buckets chosen under a limit in bytes."""
        rung, late = divmod(number, 2)
        program = self.build(self.ladder.plan(rung), self._room(limit), bool(late), False)
        return _numbered(program, number)

    def under(self, limit: int) -> Program:
        """The first that stays under a limit in bytes.

        Raises:
            NothingFits: none does.
        """
        room = self._room(limit)
        found = self._first(room, lambda rung: self._thriftiest(rung, room))
        if peak_bytes(found) > room:
            raise NothingFits(found, limit, self.uneven)
        return self.at(found.thrift[0], limit)

    def settled(self, limit: int, thrift: Thrift) -> Program:
        """The first that stays under a limit in bytes with the collectives that ranks have settled.

        Raises:
            NothingFits: none does. Its Program is the one that holds least with others.
        """
        room = self._room(limit)
        leaves = frozenset(thrift.regathered)

        def with_them(plan: Plan) -> Program | None:
            try:
                return self.build(replace(plan, regathered=leaves), 0, False, False)
            except OutOfOrder:
                return None

        found = self._first(room, lambda rung: with_them(self.ladder.plan(rung)))
        if found is None or peak_bytes(found) > room:
            found = with_them(Plan(recomputed=frozenset(thrift.recomputed)))
        if found is None or peak_bytes(found) > room:
            raise NothingFits(self._thriftiest(RUNGS, room, alone=True), limit, self.uneven)
        return found

    def _room(self, limit: int) -> int:
        """Bytes that a Program may hold under a limit."""
        return limit - RESERVE - self.uneven

    def _thriftiest(self, rung: int, room: int, *, alone: bool = False) -> Program:
        """That of a rung, in the smallest buckets; its gathers late if it takes that."""
        plan = self.ladder.plan(rung)
        first = _numbered(self.build(plan, 0, False, alone), 2 * rung)
        if peak_bytes(first) > room and any(_gathers(first)):
            late = _numbered(self.build(plan, 0, True, alone), 2 * rung + 1)
            if peak_bytes(late) < peak_bytes(first):
                return late
        return first

    def _first(self, room: int, made: Callable[[int], _P]) -> _P:
        """The Program of the first rung found that stays within `room` bytes; else the last rung's.

        Args:
            made: of a rung; None: there is no Program, as if it held too much.
        """
        built: dict[int, _P] = {}
        low, high, rung = -1, RUNGS, 0  # nothing fits up to `low`; `high` may
        while high not in built or (high - low > _NEAR and len(built) < _TRIES):
            program = built[rung] = made(rung)
            peak = None if program is None else peak_bytes(program)
            fits = peak is not None and peak <= room
            if not fits and rung == RUNGS:
                return program
            low, high = (low, rung) if fits else (rung, high)
            # what the model leaves out is nearly the same at neighbouring rungs
            guess = (low + high) // 2
            if peak is not None:
                guess = self.ladder.rung_of(room - (peak - self.ladder.target(rung)))
            if len(built) >= _TRIES - 1 and high not in built:
                guess = high
            rung = min(max(guess, low + 1), high if high not in built else high - 1)
        return built[high]

    def frontier(self, points: int) -> Sequence[Program]:
        """Programs from the one that does least to the one that holds least."""
        rungs = [RUNGS * i // max(points - 1, 1) for i in range(points)]
        found = [self.build(self.ladder.plan(rung), 0, False, False) for rung in rungs]
        return [self.build(None, 0, False, False), *found]


def _numbered(program: Program, number: int) -> Program:
    return replace(program, thrift=(number, *program.thrift[1:]))


def _gathers(program: Program) -> Iterator[bool]:
    return (n.meta["bucket"].gathers for n in program.graph.nodes if "bucket" in n.meta)


RESERVE = 1024
"""Bytes of a limit that are left for what is in no Program: the numbers that a step reports."""
MAX_RUNG = 2 * RUNGS + 1
_NEAR, _TRIES = 2, 5


def _nothing_fits(program: Program, limit: int, uneven: int) -> str:
    peak = program.peak()
    least = peak.bytes + uneven
    on = " on the rank with the largest shards" if uneven else ""
    rows = list(peak.by_category().items())
    rows.sort(key=lambda row: -row[1])
    most = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in rows[:3])
    first = peak[0]
    at = f" of {first.module}" if first.module else ""
    return (
        f"Config.memory_limit={limit}: the least that this step can hold{on} is {least} bytes "
        f"({size(least)}), with all recomputed and gathered again that may be; the limit is "
        f"{size(limit)}. At that peak ({peak.phase}, {peak.node}) there are {most}; the largest is "
        f"{first.category} {first.name!r}{at}, {size(first.bytes)}."
    )
