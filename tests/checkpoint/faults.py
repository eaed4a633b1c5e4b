"""Faults put into `checkpoint.format.disk`: every call that a save makes on the disk, counted."""

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fzero.checkpoint.format import disk

# What can be cut off half-way, with something of it done.
TORN = ("append", "remove")
CALLS = (
    *("make_folder", "create", "append", "sync", "sync_folder"),
    *("rename", "exchange", "remove", "link", "unlink"),
)


@contextlib.contextmanager
def watched(act: Callable[[int, str, tuple[Any, ...]], None]) -> Iterator[list[str]]:
    """Calls `act(number, name, arguments)` before each call on the disk; the names so far."""
    seen: list[str] = []

    def around(name: str) -> Any:
        real = getattr(disk, name)

        def call(*args: Any) -> Any:
            seen.append(name)
            act(len(seen) - 1, name, args)
            return real(*args)

        return mock.patch.object(disk, name, call)

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(around(name))
        yield seen


def killer(at: int, torn: bool) -> Callable[[int, str, tuple[Any, ...]], None]:
    """SIGKILLs this process at the call number `at`: before it, or half-way through."""

    def act(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == at:
            if torn and name == "append":
                file, data = args
                os.write(file, data[: len(data) // 2])
            elif torn and name == "remove":
                next(args[0].iterdir()).unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def full_disk(at: int) -> Callable[[int, str, tuple[Any, ...]], None]:
    """From the call number `at` on, whatever takes room fails."""

    def act(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number >= at and name in ("make_folder", "create", "append", "sync"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return act
