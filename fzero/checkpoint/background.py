"""Saves that go on while training does: one at a time, and none forgotten.

The registries below are the only mutable things of this package: what is being written outlives the
call that started it, and so does which checkpoint a run goes on from. Both belong to the process.
"""

import atexit
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch.distributed import ProcessGroup

from fzero.checkpoint.lineage import Heads
from fzero.checkpoint.ranks import Ranks
from fzero.distributed.teardown import before_teardown, is_told
from fzero.errors import CheckpointError, users_line

T = TypeVar("T")


class Going:
    """A save on a thread, which begins once or is called off, and is never in between.

    Args:
        job: what the thread does.
        what: it is, for messages.
    """

    def __init__(self, job: Callable[[], str], what: str) -> None:
        self.job, self.what = job, what
        self.told = ""
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"fzero: {what}")
        self._launched = False
        self._taken: dict[str, str] = {}  # `setdefault` is one step: whoever is first has it

    def start(self) -> None:
        """Start the thread; if an interrupt comes out of it, `runs` tells whether it has begun."""
        self.thread.start()
        self._launched = True
        if not self.runs():
            raise CheckpointError(
                f"{self.what} was called off: a signal's handler waited for it, or destroyed its "
                "process group, before it had begun. Save again."
            )

    def runs(self) -> bool:
        """Whether the thread has begun or will; if its start was cut short, asking settles it."""
        if self._launched:
            return self._taken.get("by") != "nobody"
        return self._taken.setdefault("by", "nobody") == "thread"

    def join(self) -> None:
        """Return once it is over, or called off."""
        if self.runs():
            self.thread.join()

    def _run(self) -> None:
        if self._taken.setdefault("by", "thread") != "thread":
            return
        try:
            self.told = self.job()
        # whatever ends the thread, the next save has to hear of it
        except BaseException as error:
            self.error = error


class Background:
    """At most one save that is going on, and what became of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of what follows
        self._turn, self._whose = threading.Lock(), 0
        self.going: Going | None = None
        # by the group that they have beside: with it this one goes, and its threads and sockets
        self._ranks: weakref.WeakKeyDictionary[ProcessGroup, Ranks] = weakref.WeakKeyDictionary()

    def in_turn(self, act: Callable[[], T]) -> T:
        """What `act` returns, on one thread at a time, with no save going on.

        Raises:
            CheckpointError: the thread has it already: a signal's handler came in between.
        """
        if self._whose == threading.get_ident() and self._turn.locked():
            raise CheckpointError(
                "save was called while this thread was in a save: by a signal's handler, it seems. "
                "Let the handler set a flag, and save after the step: "
                "fzero.checkpoint.StopOnSignal does that."
            )
        # no context manager of Python's: an interrupt between its turn and ours would keep both
        with self._turn:
            self._whose = threading.get_ident()
            return self._alone(act)

    def _alone(self, act: Callable[[], T]) -> T:
        try:
            self.wait()
            return act()
        finally:
            self._whose = 0

    def start(self, job: Callable[[], str], what: str) -> None:
        """Run `job` on a thread, and warn of what it returns; the last one has been waited for."""
        assert self.going is None
        # The interpreter waits for the thread by itself; this is for what it raised.
        atexit.register(self._at_exit)
        if is_told():  # else the thread finds its group destroyed, and says so
            before_teardown(self)
        with self._lock:  # nobody calls off what is just about to begin
            self.going = Going(job, what)
            self.going.start()

    def runs(self, job: Callable[[], str]) -> bool:
        """Whether a thread has begun `job`; if not, none will."""
        going = self.going
        return going is not None and going.job is job and going.runs()

    def wait(self) -> None:
        """Return once nothing is being written; raise or warn as the last save did."""
        with self._lock:  # whoever else waits, waits as long
            going = self.going
            if going is None:
                return
            going.join()
            try:
                if going.error is not None:
                    raise going.error
                if going.told:
                    warnings.warn(going.told, stacklevel=users_line())
            finally:
                # only now: an interrupt until here leaves it to be told by the next call
                self.going = None
                atexit.unregister(self._at_exit)

    def release(self) -> None:
        """Return once nothing is being written, for its groups are about to be destroyed.

        What the save raised is kept for `wait`: torch has its groups left to destroy.
        """
        with self._lock:
            if self.going is not None:
                self.going.join()

    def apart_from(self, ranks: Ranks) -> Ranks | None:
        """The ranks with a group of its own, made once; None if there can be none."""
        if ranks.group is None:
            return ranks
        apart = self._ranks.get(ranks.group) or ranks.apart()
        if apart is None:
            return None
        self._ranks[ranks.group] = apart
        return replace(apart, timeout=ranks.timeout)

    def _at_exit(self) -> None:
        what = "" if self.going is None else self.going.what
        try:
            self.wait()
        except Warning as told:  # a user's filter makes errors of them
            sys.stderr.write(f"fzero: {what}: {told}\n")
        except BaseException as error:
            # Nobody is left to raise it to.
            sys.stderr.write(f"fzero: {what} failed: {error}\n")


_background = Background()
heads = Heads()


def in_turn(act: Callable[[], T]) -> T:
    """What `act` returns: one save at a time, whichever threads they are on.

    Raises what the last one raised.
    """
    return _background.in_turn(act)


def start(job: Callable[[], str], what: str) -> None:
    """Run a save's `job` on a thread; what it returns is warned of at the next call."""
    _background.start(job, what)


def is_ending() -> bool:
    """Whether the interpreter waits for no thread any more that starts now: `atexit` has begun."""
    return not threading.main_thread().is_alive()


def runs(job: Callable[[], str]) -> bool:
    """Whether a thread has begun `job`, which `start` was to have it do; if not, none will."""
    return _background.runs(job)


def apart_from(ranks: Ranks) -> Ranks | None:
    """`ranks` with a group of its own, for a thread beside training; all its ranks must call it.

    None if there can be none.
    """
    return _background.apart_from(ranks)


def wait() -> None:
    """Return once an asynchronous save is finished; on every rank that started one.

    Raises:
        CheckpointError: it failed.

    Examples:
        >>> import tempfile, torch, fzero
        >>> run = tempfile.mkdtemp()
        >>> _ = fzero.checkpoint.save(run, {"w": torch.ones(2)}, step=1, asynchronous=True)
        >>> fzero.checkpoint.wait()
        >>> fzero.checkpoint.latest(run).name
        'step-00000001'
    """
    _background.wait()
