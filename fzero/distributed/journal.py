"""Ranks that are about to run different collectives find out before they do.

[Note: the journal] A collective that all ranks ran at this point the last time needs no word. One
that is new here is agreed on first, through the store. All ranks share the record of what was
agreed, so when two ranks are about to run different things, at least one of them departs from it:
that one asks, and nobody runs anything wrong. Each collective is a station; see `whereabouts`.

An engine's passes come in an order that can change, so each entry into one is a station, too. The
eager executor's micro-batches come one after another in a call that all ranks have met for.

A pass that raised may have done so on one rank alone, between two collectives, while the others go
on with the second. So who starts again after one meets all others first: see `Circle.raised`.
"""

from typing import NamedTuple

from fzero.distributed.buckets import Bucket
from fzero.distributed.mesh import Mesh
from fzero.distributed.rendezvous import rendezvous
from fzero.distributed.store import Asked
from fzero.distributed.whereabouts import circle_of

_GATHER = (
    " At stage 3, modules that only some ranks run must be named in Config(gather_together=[...]); "
    "evaluations that only some ranks run belong into engine.local_forward()."
)
_READ = (
    " The eager executor gathers a leaf where it is read, which all ranks must do in one order: "
    "what only some read (experts, adapters) belongs into fzero.opaque, with the traced executor, "
    "or into an Engine with Config(gather_together=[...])."
)
# unless parameters are gathered
_WITHOUT_COLLECTIVES = ("forward", "evaluation", "local_forward")
_LONGEST = 1000  # phases that are remembered of what happens between two updates


class Owner(NamedTuple):
    """Whose collectives a journal has.

    Args:
        key: under which the store counts them.
        name: as messages call it.
        hint: what they say besides when ranks differ.
    """

    key: str
    name: str
    hint: str = ""


ENGINE = Owner("engine", "engine", _GATHER)
EAGER = Owner("eager", "eager step function", _READ)
FUNCTION = Owner("function", "eager function", _READ)


class Journal:
    """What this rank's collectives were, phase by phase.

    Args:
        mesh: its ranks.
        owner: ENGINE, EAGER or FUNCTION.
        active: whether collectives may differ between ranks at all.
        limit: seconds that ranks may come later than others; None: the process group's.
    """

    def __init__(
        self, mesh: Mesh, owner: Owner = ENGINE, *, active: bool, limit: float | None = None
    ) -> None:
        self.mesh, self.owner, self.limit = mesh, owner, limit
        self.circle = circle_of(mesh)
        alone = self.circle.alone
        self.alone, self.active = alone, active and not alone
        # ranks make their engines, and their step functions, in the same order: the n-th is the
        # same on all
        key = f"fzero/{owner.key}/{mesh.rank}"
        self.number = 0 if alone else Asked()(lambda store: store.add(key, 1))
        self.name = f"{owner.name} {self.number}"
        self.phase = "start"
        self.position = self.turn = self.count = 0
        self.lines: dict[str, list[str]] = {"start": []}
        self.next: dict[str, str] = {}
        self.cycle: list[str] = []  # the phases since the last update
        self.before: list[str] = []  # and those of the update before
        self.on_track = True  # whether the one has begun like the other

    def begin(self, phase: str) -> None:
        """The next of many passes of one phase, which ranks need not meet for."""
        self.phase, self.position = phase, 0
        self.lines.setdefault(phase, [])

    def leave(self, what: str) -> None:
        """The passes of this phase are over, and what comes waits for all ranks.

        One that has a collective of the phase left is elsewhere, and not late.
        """
        if self.active:
            self.circle.limit = self.limit
            self.circle.announce(f"{self.name}, {what} {self.turn}", self._hint)

    def enter(self, phase: str) -> None:
        """A pass begins: a forward, a backward, an update."""
        if self.alone or (not self.active and phase in _WITHOUT_COLLECTIVES):
            return
        at = len(self.cycle)
        self.on_track &= at < len(self.before)
        # one phase is followed by others at other times (a forward by a backward, or by a forward):
        # its place in the cycle tells more than the phase before it, while all goes as last time
        expected = self.before[at] if self.on_track else self.next.get(self.phase)
        self.on_track &= expected == phase
        if expected != phase:
            self._meet(f"after {self.phase}", phase, calls=True)
        else:
            self.circle.limit = self.limit
            self.circle.announce(f"{self.name}, {phase}", self._hint)
        self.next[self.phase] = phase
        if at < _LONGEST:
            self.cycle.append(phase)
        if phase == "update":
            self.before, self.cycle, self.on_track = self.cycle, [], True
        self.begin(phase)

    def raised(self, *, sent: bool) -> None:
        """A pass has raised, after it `sent` collectives or before."""
        # `sent` knows of reductions only: where parameters are gathered, something may have gone
        if not self.alone and (sent or self.active):
            self.circle.raised()

    def announce(self, bucket: Bucket) -> None:
        """Return once all ranks are known to run this collective next.

        Raises:
            RankMismatchError: they are not.
        """
        self.hear(bucket.line)

    def hear(self, line: str) -> None:
        """`announce` of a collective that is told in words."""
        if not self.active:
            return
        lines = self.lines[self.phase]
        where = f"{self._pass()}, collective {self.position + 1}"
        if lines[self.position : self.position + 1] != [line]:
            self._meet(where, line)
            lines[self.position :] = [line]  # what came after it last time may not come now
        else:
            self.circle.announce(f"{self.name}, {where}: {line}", self._hint)
        self.position += 1

    def _pass(self) -> str:
        if self.owner is ENGINE:
            return self.phase
        # counted at its first collective: one that raised before it, on some rank alone, was none
        self.turn += self.position == 0
        return f"{self.phase} {self.turn}"

    def _meet(self, where: str, line: str, *, calls: bool = False) -> None:
        key = f"{self.name}, {where}"
        if self.owner is ENGINE:  # whose passes have no number that would tell meetings apart
            self.count += 1
            key = f"{key} (meeting {self.count})"
        rendezvous(key, line, self.mesh, self.limit, self._hint, calls=calls)

    @property
    def _hint(self) -> str:
        return self.owner.hint if self.active else ""
