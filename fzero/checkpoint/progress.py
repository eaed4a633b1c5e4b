"""One line about a save or a load that takes long enough to wonder."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

FIRST_SECONDS = 3.0


class Progress:
    """Says on stderr how far a transfer is, once it has taken some seconds.

    On a terminal the line is rewritten each second; elsewhere one is added every 30 seconds.

    Args:
        what: the start of the line.
        total: bytes that will have been told in the end.
        to: where the line goes; None says nothing.
        clock: seconds, for tests.

    Examples:
        >>> import io
        >>> out, now = io.StringIO(), iter([0.0, 1.0, 5.0])
        >>> progress = Progress("saving step 42", 4_000_000, out, lambda: next(now))
        >>> progress(1_000_000)
        >>> progress(1_000_000)
        >>> out.getvalue()
        'fzero: saving step 42: 2.0 of 4.0 MB, 0.4 MB/s\\n'
    """

    def __init__(
        self,
        what: str,
        total: int,
        to: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.to, self.clock = what, total, to, clock
        self._start = self._last = clock()
        self._done, self._open = 0, False
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """So many bytes more are done."""
        # several threads read or write the files of one save
        with self._lock:
            self._done += nbytes
            if self.to is None:
                return
            now = self.clock()
            rewritten = self.to.isatty()
            said = self._last > self._start
            # a terminal's line is rewritten; in a log each one stays, so they come rarely
            pause = FIRST_SECONDS if not said else 1.0 if rewritten else 30.0
            if now - self._last < pause:
                return
            self._last = now
            rate = self._done / (now - self._start)
            text = (
                f"fzero: {self.what}: {_megabytes(self._done)} of {_megabytes(self.total)} MB, "
                f"{_megabytes(rate)} MB/s"
            )
            self.to.write(f"\r{text}" if rewritten else f"{text}\n")
            self.to.flush()
            self._open = rewritten

    def close(self) -> None:
        """End the line, if there is one."""
        # else whatever is printed next would go on in the middle of the rewritten line
        if self._open and self.to is not None:
            self.to.write("\n")
            self._open = False


def progress(what: str, total: int, *, shown: bool) -> Progress:
    """A `Progress` on this process's stderr, if `shown`."""
    return Progress(what, total, sys.stderr if shown else None)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"
