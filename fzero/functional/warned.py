"""What Python's warnings do in one thread, whatever they do in others."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Literal


@contextlib.contextmanager
def warned_here(action: Literal["error", "ignore"], beginning: str = "") -> Iterator[None]:
    """Warnings of this thread raise inside, or are not told.

    Before Python 3.14 `warnings.catch_warnings` does that to all threads: a warning in a loader's
    would be raised there. And of two that overlap, the one that leaves last puts the other's
    filters back, for good. So this is one filter more, which asks for the thread: what stands for
    the pattern of a text there is an object that matches here alone. The filters, a public list,
    are otherwise as they are; whoever copied them meanwhile has one that never matches again.

    Args:
        action: as `warnings.simplefilter` takes it.
        beginning: of the texts that are meant.

    Examples:
        >>> with warned_here("error", "old"):
        ...     warnings.warn("old: call the other one")
        Traceback (most recent call last):
        UserWarning: old: call the other one
    """
    here = _Here(beginning)
    entry: Any = (action, here, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, entry)
    try:
        yield
    finally:
        here.thread = None
        with contextlib.suppress(ValueError):  # somebody has put other filters there
            filters.remove(entry)


class _Here:
    """In the place of a compiled pattern."""

    def __init__(self, beginning: str) -> None:
        self.beginning = beginning
        self.thread: int | None = threading.get_ident()

    def match(self, text: str) -> bool:
        return self.thread == threading.get_ident() and text.startswith(self.beginning)
