"""Process groups that are never destroyed: what lets a process end that has given up waiting."""

import ctypes
from typing import Any


def keep_alive(group: Any) -> None:
    """Hold a reference to `group` for ever.

    Gloo's destructor waits for the operations that are under way. One that was given up may end
    with the process group's timeout only, half an hour later: so the destructor must not run, and
    the process ends without it. Counting a reference that nobody has is C Python's own way to make
    an object immortal; what a module keeps, it lets go when the interpreter ends.

    >>> keep_alive(object())
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
