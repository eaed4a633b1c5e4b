"""Whose turn it is with a module that has other tensors in its slots: [Note: turns].

[Note: turns] A call of a functionalised module puts its tensors into the module itself, where a
second thread would compute with them, and put back what it found there. So each module has a
`Turn`, which whoever changes its slots takes: a thread that finds it taken waits until the call is
over, and then all is as the module has it. It stands among the module's attributes, where every
other `functionalize` of the module, or of one that shares a part with it, finds it; a copy of the
module has another.

A turn is kept for as long as something of the call is in the module: until the call is over, and
if it has left attributes for the function around it to read ([Note: held]), until that is. Not
for longer: threads that a model function starts take turns with their calls.

To wait would be for ever where the other thread waits for this one. Of two that wait for each
other's modules one gets an error. What autograd calls back in a thread of a device does so for the
one that waits for the whole backward, inside its call, and has its turn. What is left (a forward
that waits for a thread which calls the same module) nobody sees: the second thread warns after a
while, and raises in the end.
"""

import contextlib
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from fzero.errors import ShardError, users_line
from fzero.functional.tasks import in_backward_of, in_engines_thread

WARN_AFTER, RAISE_AFTER = 60.0, 600.0  # seconds of one wait
_PAUSE = 0.001  # seconds between two tries
_TICK = 0.05  # seconds between two looks at who waits for whom


class _Actor:
    """A thread, or several of which all but one wait: what holds a turn.

    Args:
        ident: of the first one, as `threading.get_ident()` has it.
    """

    __slots__ = ("ident", "waits_for")

    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.waits_for: Turn | None = None


class _Here(threading.local):
    def __init__(self) -> None:
        self.actor = _Actor(threading.get_ident())


_HERE = _Here()


def actor() -> Any:
    """Who acts in this thread; compared by identity."""
    return _HERE.actor


@contextlib.contextmanager
def acting_for(other: Any) -> Iterator[None]:
    """This thread does something for another one, which waits for it and lends its turns."""
    before, _HERE.actor = _HERE.actor, other
    try:
        yield
    finally:
        _HERE.actor = before


class Turn:
    """A context manager that one thread at a time is inside of, as often as it likes.

    Args:
        what: what it is about, for messages.
        limited: whether who waits for long is told, and ends.

    Examples:
        >>> turn = Turn("the module")
        >>> with turn, turn:
        ...     turn.is_taken
        True
        >>> turn.is_taken
        False
    """

    made_by_functionalize = True  # nothing that a function computes with: see functional.outside
    __slots__ = ("_depth", "_holder", "limited", "what")

    def __init__(self, what: str, *, limited: bool = True) -> None:
        self.what, self.limited = what, limited
        # Of one entry, its owner: it is taken and left in one step each, so an interrupt (Ctrl-C)
        # finds it its owner's or free, and who was interrupted may take it again.
        self._holder: dict[None, _Actor] = {}
        self._depth = 0

    @property
    def is_taken(self) -> bool:
        """Whether somebody is inside."""
        return self._owner is not None

    @property
    def _owner(self) -> _Actor | None:
        return self._holder.get(None)

    def __enter__(self) -> None:
        me = _HERE.actor
        if self._holder.setdefault(None, me) is me or self._wait(me):
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._owner is not _HERE.actor:  # another's, which was lent
            return
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            self._holder.pop(None, None)

    def _wait(self, me: _Actor) -> bool:
        """Wait for the turn; False: its owner lends it.

        Raises:
            ShardError: it would never come.
        """
        began, warned, circled = time.monotonic(), False, False
        looked = began
        me.waits_for = self
        try:
            while True:
                owner = self._owner
                if owner is not None and in_engines_thread() and in_backward_of(owner.ident):
                    return False
                if self._holder.setdefault(None, me) is me:
                    return True
                time.sleep(_PAUSE)
                if time.monotonic() - looked < _TICK:
                    continue
                looked = time.monotonic()
                # looked at twice: an owner may have left between two looks at its links
                found = self._is_last_of_a_circle(me)
                if found and circled:
                    raise ShardError(self._said(owner, "waits for this one"))
                circled, waited = found, time.monotonic() - began
                if not self.limited:
                    continue
                if waited > RAISE_AFTER:
                    raise ShardError(self._said(owner, f"has been for {waited:.0f} s"))
                if waited > WARN_AFTER and not warned:
                    warned = True
                    text = self._said(owner, f"has been for {waited:.0f} s")
                    warnings.warn(text, stacklevel=users_line())
        finally:
            me.waits_for = None

    def _is_last_of_a_circle(self, me: _Actor) -> bool:
        """Whether its owner waits, by however many, for this thread; one of a circle is last."""
        circle, turn = [me], self
        while turn is not None and (owner := turn._owner) is not None:
            if owner is me:
                return me.ident == max(one.ident for one in circle)
            if owner in circle:  # of others
                return False
            circle.append(owner)
            turn = owner.waits_for
        return False

    def _said(self, owner: _Actor | None, how: str) -> str:
        names = {t.ident: t.name for t in threading.enumerate()}
        here = threading.get_ident()
        mine = names.get(here, f"{here}, one of autograd's")
        other = names.get(owner.ident, owner.ident) if owner is not None else "another"
        return (
            f"thread {mine!r} waits for {self.what}, inside of which thread {other!r} {how}. A "
            "functionalised module is in one thread's call at a time. Give each thread a module of "
            "its own, functionalize(copy.deepcopy(module)), or let a forward not wait for a thread "
            "that calls the same module."
        )

    def __deepcopy__(self, memo: Any) -> "Turn":
        return Turn(self.what, limited=self.limited)

    def __reduce__(self) -> Any:
        # who loads the module, weights alone or not, needs nothing of ours; another turn comes
        return set, ()


class Turns:
    """Several, taken in one order by everybody."""

    made_by_functionalize = True
    __slots__ = ("all",)

    def __init__(self, turns: Iterable[Turn]) -> None:
        self.all = sorted(turns, key=id)

    def __enter__(self) -> None:
        with contextlib.ExitStack() as taken:
            for turn in self.all:
                taken.enter_context(turn)
            taken.pop_all()

    def __exit__(self, *_: object) -> None:
        for turn in reversed(self.all):
            turn.__exit__()


def turn_of(attributes: Iterable[dict[str, Any]], what: str) -> "Turn | Turns":
    """The turn of the modules that have these attributes; those that have none yet share one."""
    new = Turn(what)
    found: dict[int, Turn] = {}
    for attrs in attributes:
        turn = attrs.get(_NAME)
        if not isinstance(turn, Turn):
            if turn is not None:  # of a module that was pickled
                attrs.pop(_NAME, None)
            turn = attrs.setdefault(_NAME, new)  # atomic: whoever comes second finds the first's
        found[id(turn)] = turn
    (*turns,) = found.values()
    return turns[0] if len(turns) == 1 else Turns(turns)


def turns_among(holders: Iterable[Any]) -> Turns:
    """The turns of modules whose attributes are among these."""
    found = (holder.get(_NAME) for holder in holders if type(holder) is dict)
    return Turns({id(turn): turn for turn in found if isinstance(turn, Turn)}.values())


_NAME = "_fzero_turn"
