"""Ctrl-C at a line that a test chooses."""

import contextlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class AtLine:
    """An interrupt at the n-th line of a package's own code that runs.

    Args:
        package: whose code.
        number: n, from 1.
        without: names of functions whose lines don't count.
    """

    def __init__(self, package: ModuleType, number: int, without: Collection[str] = ()) -> None:
        assert package.__file__ is not None
        self._here, self._without = str(Path(package.__file__).parent), without
        self.left, self.where = number, ""

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        mine = code.co_filename.startswith(self._here) and code.co_name not in self._without
        return self._line if mine else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """While it is entered; `where` is the line afterwards, or empty if there was none."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                yield
        finally:
            sys.settrace(before)
