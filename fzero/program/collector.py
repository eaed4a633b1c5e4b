"""The garbage collector, out of the way while much is made and little of it is garbage."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection of cycles inside, if there are any outside.

    Recording makes some hundred objects for each node, which all live on: a third of its time goes
    by in looking for cycles among them.

    >>> with collector_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
