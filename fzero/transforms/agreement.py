"""What ranks settle before a Program runs: the size of buckets, and which collectives there are.

What a rank runs depends on what it alone sees: the shapes of its batch, the rows of its shards,
values that its Python read. So before anything is run the ranks settle the size of buckets, once,
and compare their collectives, whenever they change. What comes after meets no question any more.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from fzero.distributed.agree import agree, smallest
from fzero.distributed.mesh import Mesh
from fzero.distributed.rendezvous import rendezvous, says
from fzero.distributed.store import Asked
from fzero.distributed.whereabouts import circle_of
from fzero.errors import ConfigError, RankMismatchError
from fzero.program import Program
from fzero.program.choice import Choice
from fzero.program.fitting import MAX_RUNG, NothingFits


class Made(Protocol):
    """What one rank has staged out for a call."""

    choice: Choice
    collectives: str


E = TypeVar("E", bound=Made)


@dataclass(frozen=True)
class Mine(Generic[E]):
    """What one rank has staged out of one function.

    Args:
        find: gives that of this call, made if need be with the choice that is settled.
        known: gives all.
        forget: drops one.
        clear: drops all.
    """

    find: Callable[[], E]
    known: Callable[[], Iterable[Made]]
    forget: Callable[[E], None]
    clear: Callable[[], None]


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
        self.turns, self.rounds = 0, 0  # how often ranks have settled anew, and in how many rounds

    def clear(self) -> None:
        """Forget what was settled for other parameters."""
        self.choice = self.collectives = None

    def together(self, mine: Mine[E], mesh: Mesh) -> E:
        """The executor of this call, with the collectives that all ranks have; all must call it.

        The first call settles buckets, and what decides on collectives under a memory limit, for
        all that follow. The best ones depend on what differs between ranks: the rows of an uneven
        shard, the shapes of a batch.

        Args:
            mine: what this rank has staged out.
            mesh: its ranks.

        Raises:
            ConfigError: a rank can't stay under the memory limit, alone or with the others.
            RankMismatchError: ranks would run different collectives.
        """
        made = _tried(mine.find)
        if isinstance(made, NothingFits) and circle_of(mesh).alone:
            raise made
        # counted here and not in `find`, which `lower` may call on one rank alone
        self.calls += 1
        if self.choice is None or isinstance(made, NothingFits):
            made = self._settled(made, mine, mesh)
        elif made.choice != self.choice:  # made before ranks had settled
            mine.forget(made)
            made = mine.find()
        try:
            self.compare(made.collectives, mesh)
        except RankMismatchError:
            mine.forget(made)  # the function may do otherwise when called again
            raise
        return made

    def _settled(self, made: E | NothingFits, mine: Mine[E], mesh: Mesh) -> E:
        """`made`, with what all ranks have settled now."""
        choices: list[Choice] = []
        if self.choice is not None:  # a later batch, which needs more than was settled
            assert isinstance(made, NothingFits)
            if made.number >= 0 and self.turns:  # not to settle for each of some shapes in turn
                choices.append(_of_least(made, self.choice))
            hint = _FIRST if made.number >= 0 else f" {made}"
            rendezvous(f"{self._meeting}, new collectives", _NEW_PLAN, mesh, self.timeout, hint)
            self.choice, self.turns = None, self.turns + 1
            mine.clear()
            made = _tried(mine.find)
        if isinstance(made, NothingFits):
            urgent, text, told = 0, str(made), ()
        else:
            choices += [made.choice, *(one.choice for one in mine.known())]
            wanted = max(choices, key=_number)
            urgent, text, told = _LAST - _number(wanted), wanted.encoded(), made.choice.told()
        urgent, text, told = self._most_urgent(urgent, text, told, mesh)
        self.choice = Choice.heard(told) if urgent > _LAST else Choice.decoded(text)
        made = self._remade(made, mine)
        if self.choice.thrift is None:
            assert not isinstance(made, NothingFits)
            return made
        # who does not fit under that asks for the least that it can hold
        for last in (False, True):
            urgent, text = _LAST, ""
            if isinstance(made, NothingFits):
                unfit = last or made.number < 0
                urgent = 0 if unfit else _LAST - made.number
                text = _alone(made) if unfit else _of_least(made, self.choice).encoded()
            urgent, text, _ = self._most_urgent(urgent, text, (), mesh)
            if urgent == _LAST:
                break
            self.choice = Choice.decoded(text)
            made = self._remade(made, mine)
        assert not isinstance(made, NothingFits)
        return made

    def _remade(self, made: E | NothingFits, mine: Mine[E]) -> E | NothingFits:
        """It, or one with the choice that is settled now."""
        if isinstance(made, NothingFits):
            return _tried(mine.find)
        if made.choice == self.choice:
            return made
        mine.forget(made)
        return _tried(mine.find)

    def _most_urgent(
        self, urgent: int, text: str, told: Sequence[int], mesh: Mesh
    ) -> tuple[int, str, list[int]]:
        """What the rank says whose number is the smallest, on every rank.

        Args:
            urgent: this rank's number; 0: its text says why nothing fits.
            text: this rank's.
            told: numbers of which the smallest of all ranks are wanted too.

        Raises:
            ConfigError: of 0.
        """
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        padded = [*told, *[_FAR] * (_TOLD - len(told))]  # of a rank that refuses
        sent = [urgent * _RANKS + mesh.rank, digest, 2**56 - digest, *padded]
        first, low, high, *least = smallest(f"{self.what}'s buckets", sent, mesh, self.timeout)
        urgent, who = divmod(first, _RANKS)
        if urgent <= _LAST and low + high != 2**56:
            self.rounds += 1
            key = f"{self._meeting}, plan {self.rounds}"
            text = says(key, text, mesh, who, self.timeout)
        if not urgent:
            where = f"On rank {mesh.ranks[who]}: " if mesh.world_size > 1 else ""
            self.calls -= 1  # nothing runs: on no rank is this a call
            self.choice = None
            raise ConfigError(f"{where}{text}")
        return urgent, text, least

    def compare(self, collectives: str, mesh: Mesh) -> None:
        """See that all ranks would run the same collectives, before any runs.

        Raises:
            RankMismatchError: they would not.
        """
        if collectives == self.collectives:
            return
        if self.collectives is None:
            lines = [(f"row {i}", line) for i, line in enumerate(collectives.split("\n"), 1)]
            agree(f"the {self.what}'s collectives", lines, mesh, self.timeout, hint=_ALIKE)
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


def _tried(find: Callable[[], E]) -> E | NothingFits:
    try:
        return find()
    except NothingFits as refusal:
        return refusal


def _number(choice: Choice) -> int:
    """How thrifty it is; -1: there is no limit."""
    return -1 if choice.thrift is None else choice.thrift.number


def _of_least(refusal: NothingFits, settled: Choice) -> Choice:
    """Of the Program that holds least."""
    return Choice.of(refusal.program)._replace(update=settled.update)


def _alone(refusal: NothingFits) -> str:
    if refusal.number < 0:
        return str(refusal)
    return (
        f"Config.memory_limit={refusal.limit}: with the collectives that another rank needs this "
        f"one can't stay below it; with its own it would hold {refusal.program.peak_bytes()} bytes "
        "or less. Ranks run the same collectives: give them batches of like shapes, or raise the "
        "limit."
    )


_ALIKE = (
    "Ranks gather and reduce what their functions read, and these read other parameters. The usual "
    "cause is data: give every rank batches of the same structure, with the same strings, numbers "
    "and Nones in them, as the function may go another way for each. Where ranks must differ "
    "(experts), stages 0 and 1 of Config(executor='eager'), and an Engine with "
    "Config(gather_together=...) take it. Else look for code, configuration or a seed that differs."
)
_LAST = MAX_RUNG + 2  # less the number of a plan: how urgent it is; 0 is left for refusals
_RANKS = 2**20  # more than there are
_TOLD = len(Choice(0).told())
_FAR = 2**62
_NEW_PLAN = "a plan for the memory limit"
_FIRST = (
    " Under Config.memory_limit a batch of another shape needs collectives that hold less than "
    "those of the first calls, and not all ranks have such a batch in this call. Let ranks plan "
    "for their largest batch first: step_fn.lower(params, opt_state, largest) before the first "
    "call, on each rank."
)


def signature_of(program: Program, mesh: Mesh, passes: Iterable[tuple[str, Any]] = ()) -> str:
    """The collectives that all ranks must launch alike, one a line, and the users' passes.

    Those over the replicate axis carry shards, which may be uneven, and say nothing new: their
    leaves are those of the reductions over the shard axis. Of a model function's own, whose groups
    and sizes are its affair, the kind is compared where its group is one of the mesh's.
    """
    lines = [f"pass {name}" for name, _ in passes]
    for row in program.collectives():
        if not row.leaves:
            if row.group in (mesh.shard_group, mesh.replicate_group):
                lines.append(f"{row.kind} {row.phase}, called by the model function")
        elif row.group != mesh.replicate_group or mesh.shard_size == 1:
            lines.append(f"{row.kind} {row.phase} {row.bytes} bytes: {', '.join(row.leaves)}")
    return "\n".join(lines)
