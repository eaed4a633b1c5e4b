"""Ranks that are about to run different collectives find out before they do.

[Note: the journal] A collective that all ranks ran at this point the last time needs no word. One
that is new here is agreed on first, through the store. All ranks share the record of what was
agreed, so when two ranks are about to run different things, at least one of them departs from it:
that one asks, and nobody runs anything wrong. Whoever waits in a collective meanwhile looks once a
second whether somebody gave up.

A pass that raised may have done so on one rank alone, between two collectives, while the others go
on with the second. So who starts again after one meets all others first, who must have raised too.
"""

from fzero.distributed.agree import rendezvous
from fzero.distributed.buckets import Bucket
from fzero.distributed.mesh import Mesh, default_store, is_gloo, is_simulated
from fzero.errors import RankMismatchError

_GATHER = (
    " At stage 3, modules that only some ranks run must be named in Config(gather_together=[...])."
)
_RAISED = (
    " A pass that raised can be run again only where it raised on all ranks. Raise on all of them, "
    "or start again from the last checkpoint."
)
_WITHOUT_COLLECTIVES = ("forward", "evaluation")  # unless parameters are gathered
_LONGEST = 1000  # phases that are remembered of what happens between two updates
_PATIENCE = 15.0  # seconds to wait for ranks that don't come


class Journal:
    """What this rank's collectives were, phase by phase.

    Args:
        mesh: its ranks.
        active: whether collectives may differ between ranks at all.
    """

    def __init__(self, mesh: Mesh, *, active: bool) -> None:
        alone = mesh.world_size == 1 or is_simulated(mesh)
        self.mesh = mesh
        self.alone, self.active = alone, active and not alone
        self.broke_off = False
        self.watches = not alone and is_gloo(mesh.shard_group or mesh.replicate_group)
        # ranks make their engines in the same order: the n-th is the same on all
        self.number = 0 if alone else default_store().add(f"fzero/engine/{mesh.rank}", 1)
        self.phase = "start"
        self.position = self.count = 0
        self.lines: dict[str, list[str]] = {"start": []}
        self.next: dict[str, str] = {}
        self.cycle: list[str] = []  # the phases since the last update
        self.before: list[str] = []  # and those of the update before
        self.on_track = True  # whether the one has begun like the other

    def enter(self, phase: str) -> None:
        """A pass begins: a forward, a backward, an update."""
        if self.broke_off:
            self.broke_off = False
            self._meet("after an exception", phase, _RAISED)
        if self.alone or (not self.active and phase in _WITHOUT_COLLECTIVES):
            return
        at = len(self.cycle)
        self.on_track &= at < len(self.before)
        expected = self.before[at] if self.on_track else self.next.get(self.phase)
        self.on_track &= expected == phase
        if expected != phase:
            self._meet(f"after {self.phase}", phase)
        self.next[self.phase] = phase
        if at < _LONGEST:
            self.cycle.append(phase)
        if phase == "update":
            self.before, self.cycle, self.on_track = self.cycle, [], True
        self.phase, self.position = phase, 0
        self.lines.setdefault(phase, [])

    def raised(self, *, sent: bool) -> None:
        """A pass has raised, after it `sent` collectives or before."""
        self.broke_off |= not self.alone and (sent or self.active)

    def announce(self, bucket: Bucket) -> None:
        """Return once all ranks are known to run this collective next.

        Raises:
            RankMismatchError: they are not.
        """
        if not self.active:
            return
        line = f"{bucket.kind} of {', '.join(leaf.name for leaf in bucket.leaves)}"
        lines = self.lines[self.phase]
        if lines[self.position : self.position + 1] != [line]:
            self._meet(f"{self.phase}, collective {self.position + 1}", line)
            lines[self.position :] = [line]
        self.position += 1

    def check_others(self) -> None:
        """Raise a RankMismatchError if a rank has given up waiting."""
        store = default_store()
        try:
            told = store.get(self._broken).decode() if store.check([self._broken]) else ""
        except RuntimeError:  # the store went with the rank that held it
            return
        if told:
            raise RankMismatchError(
                f"rank {self.mesh.rank} waits in a collective of the {self.phase} pass, and "
                f"another rank gave up: {told}"
            )

    def _meet(self, where: str, line: str, hint: str = _GATHER) -> None:
        self.count += 1
        key = f"engine {self.number}, {where} (meeting {self.count})"
        try:
            rendezvous(key, line, self.mesh, _PATIENCE)
        except RankMismatchError as error:
            default_store().set(self._broken, str(error) + hint)
            raise RankMismatchError(str(error) + hint) from None

    @property
    def _broken(self) -> str:
        return f"fzero/engine {self.number}/gave up"
