"""Fit a Program under a memory limit: the least work whose true peak stays below it.

The plans come from `Ladder`, whose peaks leave out inputs, state and the buffers of buckets. So a
rung is guessed, the Program is built as it will run, and its own peak says how far the next guess
has to go.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fzero.errors import ConfigError
from fzero.program.hardware import CPU, Hardware
from fzero.program.ladder import RUNGS, Ladder, Plan
from fzero.program.memory import peak_bytes
from fzero.program.program import Program
from fzero.program.text import size


class NothingFits(ConfigError):
    """No plan stays under the limit.

    Args:
        program: the one that holds least.
        limit: bytes.
        ways_on: what would fit.
    """

    def __init__(self, program: Program, limit: int, ways_on: str = "") -> None:
        self.program, self.limit = program, limit
        super().__init__(f"{_nothing_fits(program, limit)} {ways_on}".rstrip())


@dataclass
class Fitting:
    """Programs of one function, from the one that does least to the one that holds least.

    A rung has two Programs: gathers launched ahead as they are without a limit, and launched when
    they are needed. Their numbers rise with what is given up, and of the ranks' the highest counts.

    Args:
        laid: makes the Program that the ladder is of: before `recompute`, collectives in place.
        regather: see `Ladder`.
        build: `(plan, limit, late)` -> the Program as it runs, its buckets the largest under a
            limit in bytes; with 0 the smallest.
        machine: to whose host values may be sent away; None: they may not.
    """

    laid: Callable[[], Program]
    regather: bool
    build: Callable[[Plan | None, int, bool], Program]
    machine: Hardware | None = None
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
        program = self.build(self.ladder.plan(rung), limit - RESERVE, bool(late))
        return replace(program, rung=number)

    def under(self, limit: int) -> Program:
        """The first that stays under a limit in bytes.

        Raises:
            NothingFits: none does.
        """
        room = limit - RESERVE
        built: dict[int, tuple[int, Program]] = {}  # of rungs: the number, and with least buckets

        def peak_at(rung: int) -> int:
            if rung not in built:
                plan = self.ladder.plan(rung)
                first = self.build(plan, 0, False)
                built[rung] = (2 * rung, first)
                if peak_bytes(first) > room and any(_gathers(first)):
                    late = self.build(plan, 0, True)
                    if peak_bytes(late) < peak_bytes(first):
                        built[rung] = (2 * rung + 1, late)
            return peak_bytes(built[rung][1])

        low, high, rung = -1, RUNGS, 0  # nothing fits up to `low`; `high` may
        while high not in built or (high - low > _NEAR and len(built) < _TRIES):
            peak = peak_at(rung)
            if peak > room and rung == RUNGS:
                raise NothingFits(built[rung][1], limit)
            low, high = (low, rung) if peak <= room else (rung, high)
            # what the model leaves out is nearly the same at neighbouring rungs
            guess = self.ladder.rung_of(room - (peak - self.ladder.target(rung)))
            if len(built) >= _TRIES - 1 and high not in built:
                guess = high
            rung = min(max(guess, low + 1), high if high not in built else high - 1)
        return self.at(built[high][0], limit)

    def frontier(self, points: int) -> Sequence[Program]:
        """Programs from the one that does least to the one that holds least."""
        rungs = [RUNGS * i // max(points - 1, 1) for i in range(points)]
        found = [self.build(self.ladder.plan(rung), 0, False) for rung in rungs]
        return [self.build(None, 0, False), *found]


def _gathers(program: Program) -> Iterator[bool]:
    return (n.meta["bucket"].gathers for n in program.graph.nodes if "bucket" in n.meta)


RESERVE = 1024
"""Bytes of a limit that are left for what is in no Program: the numbers that a step reports."""
MAX_RUNG = 2 * RUNGS + 1
_NEAR, _TRIES = 2, 5


def _nothing_fits(program: Program, limit: int) -> str:
    peak = program.peak()
    rows = list(peak.by_category().items())
    rows.sort(key=lambda row: -row[1])
    most = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in rows[:3])
    first = peak[0]
    at = f" of {first.module}" if first.module else ""
    return (
        f"Config.memory_limit={limit}: the least that this step can hold is {peak.bytes} bytes "
        f"({size(peak.bytes)}), with all recomputed and gathered again that may be; the limit is "
        f"{size(limit)}. At that peak ({peak.phase}, {peak.node}) there are {most}; the largest is "
        f"{first.category} {first.name!r}{at}, {size(first.bytes)}."
    )
