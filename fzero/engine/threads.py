"""Which thread drives an engine: [Note: one thread at a time].

[Note: one thread at a time] An engine's state is that of one pass: a forward, a backward and what
is inside of them. A second thread's gradients would be taken for the first one's, or the first
one's for those of a task that is over. So who begins a pass takes the engine's seat, and a thread
that comes meanwhile is refused, before anything has changed. It can't wait: the first may be
waiting for it, as by `thread.join()` in a hook. It is asked once a forward, a graph task and a
public call; the gradients of a task come unasked. So one thing is not told: gradients that a second
thread brings, by no output, to a task that reduces nothing. They count, with those of that task.

What autograd calls back in a thread of its own (a device's, or one of a pool's for backwards deep
inside each other) is the doing of the thread that called backward: the seat is that one's.

An interrupt may come to the line that would leave the seat, and an exception's traceback may hold a
task that is over. Then who comes next finds the seat taken by a thread that is not inside: its
frames tell.
"""

import sys
import threading
import weakref
from typing import Any, NamedTuple, Protocol

from torch import nn

from fzero.engine.backward_state import BackwardState
from fzero.errors import BackwardError
from fzero.functional.tasks import is_autograds_thread, is_backward, thread_of_task


class Driven(Protocol):
    """What a seat is of: an engine's driver."""

    module: nn.Module
    state: BackwardState

    def abandoned(self) -> None:
        """Who had the seat is gone: nothing of its pass goes on."""
        ...


class _Holder(NamedTuple):
    thread: int | None  # None: one that autograd's thread has not found
    where: str


class Seat:
    """Taken by the thread that is inside a pass of an engine, or changes something of it.

    Args:
        driver: of the engine; it holds the seat.
    """

    __slots__ = ("_driver", "_holder", "_lock", "_tasks")

    def __init__(self, driver: "weakref.ref[Any]") -> None:
        self._driver: weakref.ref[Driven] = driver
        self._holder: _Holder | None = None
        self._tasks: set[int] = set()  # graph tasks of who has it
        # held while it changes hands; again by the same thread where the collector ends a task
        self._lock = threading.RLock()

    @property
    def thread(self) -> int | None:
        """The one that has it."""
        holder = self._holder
        return None if holder is None else holder.thread

    def is_taken_by_another(self) -> bool:
        """Whether it is neither free nor this thread's."""
        holder = self._holder
        return holder is not None and not _is_of(holder, _acting())

    def take(self, where: str, what: str, task: int = -1) -> bool:
        """Have it from now on; who has it already may take it again.

        Args:
            where: what begins, for others' messages: "a forward".
            what: happened, for one's own: "engine(...) was called".
            task: the running graph task, in which it happened; -1 is none.

        Returns:
            Whether it was free.

        Raises:
            BackwardError: another thread is inside.
        """
        if task in self._tasks:
            return False
        me = _acting()
        with self._lock:
            free = self._is_free(me, what)
            if free:
                self._holder = _Holder(me, where)
            if task != -1:
                self._tasks.add(task)
        return free

    def refuse(self, what: str) -> None:
        """Only that: raise if another thread is inside.

        Raises:
            BackwardError: it is.
        """
        if self._holder is not None:
            with self._lock:
                self._is_free(_acting(), what)

    def leave(self) -> None:
        """It is free; to be called for who has it."""
        with self._lock:
            self._tasks.clear()
            self._holder = None

    def _is_free(self, me: int | None, what: str) -> bool:
        """Whether nobody has it; False: this thread does."""
        holder = self._holder
        if holder is None or _is_of(holder, me):
            return holder is None
        if self._is_inside(holder.thread):
            raise BackwardError(
                f"{what} in thread {_name(me)!r} while thread {_name(holder.thread)!r} is inside "
                f"{holder.where} of this engine, which one thread at a time may drive. Put one "
                "lock around forward, backward and step() together in each thread, or give each an "
                "engine of its own. Nothing was changed, and the other thread loses nothing."
            )
        driver = self._driver()
        if driver is not None:
            driver.abandoned()
        self.leave()
        return True

    def _is_inside(self, thread: int | None) -> bool:
        """Whether a thread is in a call of the engine's, or in the backward of a task of it."""
        driver, frames = self._driver(), sys._current_frames()
        if driver is None:
            return False
        tops = [frames.get(thread)] if thread is not None else [*frames.values()]
        for top in tops:
            frame = top
            while frame is not None:
                if driver.state.task is not None and is_backward(frame):
                    return True
                names = frame.f_code.co_varnames
                if thread is not None and ("driver" in names or names[:1] == ("self",)):
                    there = frame.f_locals
                    me = there.get("self")
                    if there.get("driver") is driver or me is driver:
                        return True
                    if frame.f_code is _CALL and me is driver.module:
                        return True
                frame = frame.f_back
        return False


_CALL = getattr(nn.Module.__call__, "__code__", None)


def _acting() -> int | None:
    """The thread in whose name this one acts; None: that of whoever has the seat."""
    return thread_of_task() if is_autograds_thread() else threading.get_ident()


def _is_of(holder: _Holder, me: int | None) -> bool:
    return me is None or holder.thread == me


def _name(thread: int | None) -> str:
    names = {t.ident: t.name for t in threading.enumerate()}
    return names.get(thread, f"{thread}" if thread is not None else "of autograd's own")
