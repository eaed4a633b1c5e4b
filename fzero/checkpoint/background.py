"""Saves that go on while training does: one at a time, and none forgotten.

The registries below are the only mutable things of this package: what is being written outlives the
call that started it, and so does which checkpoint a run goes on from. Both belong to the process.
"""

import atexit
import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch.distributed import ProcessGroup

from fzero.checkpoint.lineage import Heads
from fzero.checkpoint.ranks import Ranks
from fzero.distributed.teardown import before_teardown, is_told
from fzero.errors import CheckpointError, users_line


class Background:
    """At most one save that is going on, and what became of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of what follows
        self._turn, self._whose = threading.Lock(), 0
        self._thread: threading.Thread | None = None
        self._what, self._told = "", ""
        self._error: BaseException | None = None
        self._ranks: dict[tuple[int, ...], tuple[ProcessGroup | None, Ranks]] = {}

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """For one thread at a time, with no save going on.

        Raises:
            CheckpointError: the thread has it already: a signal's handler came in between.
        """
        if self._whose == threading.get_ident():
            raise CheckpointError(
                "save was called while this thread was in a save: by a signal's handler, it seems. "
                "Let the handler set a flag, and save after the step: "
                "fzero.checkpoint.StopOnSignal does that."
            )
        with self._turn:
            self._whose = threading.get_ident()
            try:
                self.wait()
                yield
            finally:
                self._whose = 0

    def start(self, job: Callable[[], str], what: str) -> None:
        """Run `job` on a thread, and warn of what it returns; the last one has been waited for."""
        assert self._thread is None

        def run() -> None:
            try:
                self._told = job()
            # whatever ends the thread, the next save has to hear of it
            except BaseException as error:
                self._error = error

        self._what = what
        self._thread = threading.Thread(target=run, name=f"fzero: {what}")
        # The interpreter waits for the thread by itself; this is for what it raised.
        atexit.register(self._at_exit)
        if is_told():  # else the thread finds its group destroyed, and says so
            before_teardown(self)
        self._thread.start()

    def wait(self) -> None:
        """Return once nothing is being written; raise or warn as the last save did."""
        with self._lock:  # whoever else waits, waits as long
            if self._thread is None:
                return
            self._thread.join()
            error, self._thread, self._error = self._error, None, None
            told, self._told = self._told, ""
            atexit.unregister(self._at_exit)
        if error is not None:
            raise error
        if told:
            warnings.warn(told, stacklevel=users_line())

    def release(self) -> None:
        """Return once nothing is being written, for its groups are about to be destroyed.

        What the save raised is kept for `wait`: torch has its groups left to destroy.
        """
        if (thread := self._thread) is not None:
            thread.join()

    def apart_from(self, ranks: Ranks) -> Ranks | None:
        """The ranks with a group of its own, made once; None if there can be none."""
        group, apart = self._ranks.get(ranks.members, (None, None))
        if apart is None or group is not ranks.group:  # the program may have started another one
            apart = ranks.apart()
            if apart is None:
                return None
            self._ranks[ranks.members] = ranks.group, apart
        return replace(apart, timeout=ranks.timeout)

    def _at_exit(self) -> None:
        try:
            self.wait()
        except Warning as told:  # a user's filter makes errors of them
            sys.stderr.write(f"fzero: {self._what}: {told}\n")
        except BaseException as error:
            # Nobody is left to raise it to.
            sys.stderr.write(f"fzero: {self._what} failed: {error}\n")


_background = Background()
heads = Heads()


def turn() -> contextlib.AbstractContextManager[None]:
    """One save at a time, whichever threads they are on; raises what the last one raised."""
    return _background.turn()


def start(job: Callable[[], str], what: str) -> None:
    """Run a save's `job` on a thread; what it returns is warned of at the next call."""
    _background.start(job, what)


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
