"""Which attributes of which objects a function reads, while it runs.

A `__getattribute__` that stands in the objects' classes meanwhile writes them down. So an attribute
that the function merely could read is of no account.
"""

import contextlib
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fzero.functional.library import HEAP_TYPE, is_library

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()


class Reads:
    """Watches which attributes of which objects are read between entering and leaving it.

    Args:
        met: told of every value that is read for the first time, before its reader has it.

    Examples:
        >>> class Settings:
        ...     scale, unread = 2.0, 3.0
        >>> settings, first = Settings(), []
        >>> with Reads(first.append) as reads:
        ...     _ = reads.watch(settings), settings.scale, settings.scale
        >>> first, reads.names[id(settings)]
        ([2.0], {'scale': 2.0})
    """

    def __init__(self, met: Callable[[Any], None]) -> None:
        self.met = met
        self.names: dict[int, dict[str, Any]] = {}  # by object: attribute and its first value
        self.objects: dict[int, Any] = {}  # kept, so that their ids stay theirs
        self._patched: dict[type, Any] = {}
        self._known: dict[type, bool] = {}
        self._owner = threading.get_ident()
        self._busy = False

    def __enter__(self) -> "Reads":
        return self

    def __exit__(self, *error: object) -> None:
        for cls, original in self._patched.items():
            if original is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = original
        self._patched.clear()

    def watch(self, value: Any) -> bool:
        """Watch all objects of `value`'s class. False if Python lets nobody change the class."""
        cls = type(value)
        if cls not in self._known:
            self._known[cls] = self._patch(cls)
        return self._known[cls]

    def _patch(self, cls: type) -> bool:
        # in the class below `object`: also what a class's own __getattribute__ asks for is seen
        for base in reversed(cls.__mro__):
            if base in self._patched:
                return True
            if base is object or not base.__flags__ & HEAP_TYPE or base.__module__ == "typing":
                continue
            own = base.__dict__.get("__getattribute__")
            try:
                base.__getattribute__ = self._spy(base.__getattribute__)  # pyright: ignore
            except TypeError:  # of a class that can't be changed
                continue
            self._patched[base] = own
            return True
        return False

    def _spy(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def __getattribute__(this: Any, name: str) -> Any:
            # `met` looks into objects itself, and other threads are not what is recorded
            if self._busy or threading.get_ident() != self._owner:
                return original(this, name)
            if name[:2] == "__":
                if name in _READ_ALL and _asked_by_user(sys._getframe(1)):
                    with contextlib.suppress(AttributeError):  # slots are read by name
                        self._all(this, original(this, "__dict__"))
                return original(this, name)
            names = self.names.get(id(this))
            if names is None:
                self.objects[id(this)] = this
                names = self.names[id(this)] = {}
            if name in names:
                return original(this, name)
            names[name] = MISSING  # also if there is no such attribute
            value = names[name] = original(this, name)
            self._meet(value)
            return value

        return __getattribute__

    def _all(self, this: Any, attributes: Mapping[str, Any]) -> None:
        self.objects[id(this)] = this
        self.names.setdefault(id(this), {})["__dict__"] = MISSING  # which there are counts, too
        for name, value in attributes.items():
            self.names.setdefault(id(this), {}).setdefault(name, value)
            self._meet(value)

    def names_of(self, value: Any, place: str) -> Iterable[str]:
        """The attributes of an object that were read; `place` is where a walk met it."""
        return self.names.get(id(value), ())

    def keep(self, objects: Mapping[int, Any]) -> None:
        """Keep the names that were read of these objects; forget all else, the values too."""
        self.names = {
            ident: dict.fromkeys(names, MISSING)
            for ident, names in self.names.items()
            if objects.get(ident) is self.objects[ident]
        }
        self.objects = {ident: self.objects[ident] for ident in self.names}

    def _meet(self, value: Any) -> None:
        self._busy = True
        try:
            self.met(value)
        finally:
            self._busy = False


def _asked_by_user(frame: Any) -> bool:
    """Whether code of the user's asks, or has Python's library ask (`copy`, `argparse`)."""
    while frame is not None and frame.f_code.co_filename.startswith(_PYTHONS):
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_code.co_filename)


_READ_ALL = ("__dict__", "__getstate__")  # the latter is asked by who copies, and reads in C
_PYTHONS = (sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")
