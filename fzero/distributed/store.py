"""The store that ranks meet at, asked so that its silence ends.

torch asks the store over a connection and waits for the answer. A host that is gone closes it, and
the question fails; where a cable was pulled, or a switch is down, nobody closes anything, and the
question waits for a quarter of an hour. So a thread asks, and who waits goes on without it.
"""

import time
from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fzero.distributed.mesh import default_store

Answer = TypeVar("Answer")


class StoreSilent(RuntimeError):
    """The store has not answered."""


class Asked:
    """The store of the default process group.

    Args:
        store: another one.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = default_store() if store is None else store
        self._unanswered: Thread | None = None

    def __call__(self, question: Callable[[Store], Answer], seconds: float | None = None) -> Answer:
        """What the store answers.

        Args:
            question: asks it.
            seconds: to wait for the answer; None: the process group's timeout.

        Raises:
            StoreSilent: there is none by then, or not yet to an earlier question.
            RuntimeError: as the store raises it: the host that held it is gone.

        >>> store = dist.HashStore()
        >>> Asked(store)(lambda store: store.add("n", 2))
        2
        """
        limit = group_limit() if seconds is None else seconds
        until = time.monotonic() + limit
        if self._unanswered is not None:  # they go over one connection, one after the other
            self._unanswered.join(limit)
            if self._unanswered.is_alive():
                raise _silent(limit)
            self._unanswered = None
        answers: list[tuple[Any, BaseException | None]] = []

        def ask() -> None:
            try:
                answers.append((question(self._store), None))
            except BaseException as error:
                answers.append((None, error))

        # a daemon, or the program could not end while the store is silent
        thread = Thread(target=ask, name="fzero-store", daemon=True)
        thread.start()
        thread.join(max(0.0, until - time.monotonic()))
        if not answers:
            self._unanswered = thread
            raise _silent(limit)
        ((answer, error),) = answers
        if error is not None:
            raise error
        return answer


def group_limit() -> float:
    """Seconds of the default process group's own timeout."""
    if not dist.is_initialized():
        return dist.default_pg_timeout.total_seconds()
    # Private, as in mesh.default_store, whose prefixes don't tell.
    store: Any = dist.distributed_c10d._get_default_store()
    return store.timeout.total_seconds()


def _silent(seconds: float) -> StoreSilent:
    return StoreSilent(
        f"the TCPStore that ranks meet at has not answered for {seconds:.0f} s. It is on the host "
        "of MASTER_ADDR: look whether this host can reach that one."
    )
