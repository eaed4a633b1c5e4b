"""What ranks settle before a Program runs: the size of buckets, and which collectives there are.

What a rank runs depends on what it alone sees: the shapes of its batch, the rows of its shards,
values that its Python read. So before anything is run the ranks settle the size of buckets, once,
and compare their collectives, whenever they change. What comes after meets no question any more.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from fzero.distributed.agree import agree, smallest
from fzero.distributed.mesh import Mesh
from fzero.distributed.rendezvous import rendezvous
from fzero.distributed.store import Asked
from fzero.distributed.whereabouts import circle_of
from fzero.program import Program
from fzero.program.choice import Choice


class Agreement:
    """What the ranks know of each other's calls of one function.

    Args:
        what: the function, as messages call it ("step function").
        timeout: seconds to wait for the others; None: the process group's.
    """

    def __init__(self, what: str, timeout: float | None) -> None:
        self.what, self.timeout = what, timeout
        self.choice: Choice | None = None  # settled by all ranks
        self.collectives: str | None = None  # of the last call
        self.number, self.calls = 0, 0  # under which this function is known to the others

    def clear(self) -> None:
        """Forget what was settled for other parameters."""
        self.choice = self.collectives = None

    def settle(self, mine: Choice, mesh: Mesh, *more: int) -> tuple[Choice, tuple[int, ...]]:
        """The buckets that all ranks have; the first call settles them for all that follow.

        The best ones depend on what differs between ranks: the rows of an uneven shard, the shapes
        of a batch.

        Args:
            mine: what this rank would choose.
            mesh: its ranks.
            more: further numbers, of which the smallest of all ranks is wanted.

        Returns:
            The choice; the smallest of `more`, or those of this rank if nothing is left to settle.
        """
        if self.choice is not None:
            return self.choice, more
        told = (*more, *mine.told())
        told = smallest("the size of buckets", told, mesh, self.timeout)
        self.choice = Choice.heard(told[len(more) :])
        return self.choice, tuple(told[: len(more)])

    def compare(self, collectives: str, mesh: Mesh) -> None:
        """See that all ranks would run the same collectives, before any runs.

        Raises:
            RankMismatchError: they would not.
        """
        if collectives == self.collectives:
            return
        if self.collectives is None:
            lines = [(f"line {i}", line) for i, line in enumerate(collectives.split("\n"), 1)]
            agree(f"the {self.what}'s collectives", lines, mesh, self.timeout)
            if not circle_of(mesh).alone:
                # ranks make their functions in the same order: the n-th is the same on all
                key = f"fzero/{self.what}s/{mesh.ranks}/{mesh.rank}"
                self.number = Asked()(lambda store: store.add(key, 1))
        else:
            rendezvous(f"{self._meeting}, new collectives", collectives, mesh, self.timeout)
        self.collectives = collectives

    @contextlib.contextmanager
    def running(self, mesh: Mesh) -> Iterator[None]:
        """This call's collectives run inside: other ranks can see which call this one is at."""
        circle = circle_of(mesh)
        sent = circle.sent
        try:
            with circle.at(self._meeting, self.timeout):
                yield
        except BaseException:
            if circle.sent == sent:  # the others know nothing of this call: the next one is it
                self.calls -= 1
            raise

    @property
    def _meeting(self) -> str:
        """Where ranks meet whose collectives change in this call."""
        return f"{self.what} {self.number}, call {self.calls}"


def signature_of(program: Program, mesh: Mesh, passes: Iterable[tuple[str, Any]] = ()) -> str:
    """The collectives that all ranks must launch alike, one a line, and the users' passes.

    Those over the replicate axis carry shards, which may be uneven, and say nothing new: their
    leaves are those of the reductions over the shard axis.
    """
    rows = [
        f"{row.kind} {row.phase} {row.bytes} bytes: {', '.join(row.leaves)}"
        for row in program.collectives()
        if row.group != mesh.replicate_group or mesh.shard_size == 1
    ]
    return "\n".join([*(f"pass {name}" for name, _ in passes), *rows])
