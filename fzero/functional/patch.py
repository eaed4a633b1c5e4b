"""Names of other packages, replaced for as long as somebody needs it."""

import threading
from collections.abc import Callable
from typing import Any

Part = tuple[Any, str, Callable[[Any], Any]]
ABSENT = object()


class Patch:
    """A context manager that replaces names; the last one to leave puts the originals back.

    What stands in a module or a class is the process's, so the count of users is too. A
    replacement must ask for itself whether the thread that calls it is concerned.

    Args:
        parts: (owner, name, replacement of the original). A name that its owner lacks is left out;
            one whose replacement is `ABSENT` is taken away.

    Examples:
        >>> import math
        >>> with Patch((math, "sqrt", lambda sqrt: lambda x: sqrt(x) + 1)):
        ...     math.sqrt(4.0)
        3.0
        >>> math.sqrt(4.0)
        2.0
    """

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        self.lock = threading.Lock()
        self.users = 0
        self.originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self.lock:
            if not self.users:
                try:
                    for part in self.parts:
                        self._replace(*part)
                except BaseException:
                    self._restore()
                    raise
            self.users += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                self._restore()

    def _replace(self, owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        if name in vars(owner):  # as it stands there: a classmethod stays one
            original = vars(owner)[name]
            new = replacement(original)
            self.originals.append((owner, name, original))
            delattr(owner, name) if new is ABSENT else setattr(owner, name, new)

    def _restore(self) -> None:
        while self.originals:
            setattr(*self.originals.pop())
