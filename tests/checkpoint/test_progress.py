"""A line about a long transfer, and none about a short one."""

import io
import itertools

from fzero.checkpoint.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _said(out: io.StringIO | None, seconds: int, each: float) -> str:
    clock = itertools.count(0.0, each)
    progress = Progress("saving step 3", 10**9, out, lambda: next(clock))
    for _ in range(int(seconds / each)):
        progress(10**6)
    progress.close()
    return "" if out is None else out.getvalue()


def test_a_short_transfer_says_nothing() -> None:
    assert _said(io.StringIO(), 2, 0.1) == ""
    assert _said(None, 100, 0.1) == ""


def test_a_terminal_has_one_line_that_changes() -> None:
    said = _said(Terminal(), 10, 0.5)
    assert said.count("\n") == 1
    assert said.endswith("\n")
    assert 6 <= said.count("\r") <= 9
    assert "saving step 3: 6.0 of 1,000.0 MB, 2.0 MB/s" in said


def test_a_line_ends_once() -> None:
    out, now = Terminal(), iter([0.0, 5.0])
    progress = Progress("saving", 100, out, lambda: next(now))
    progress(1)
    progress.close()
    progress.close()
    assert out.getvalue().count("\n") == 1


def test_a_log_gets_a_line_now_and_then() -> None:
    said = _said(io.StringIO(), 100, 1)
    assert "\r" not in said
    assert 3 <= said.count("\n") <= 4
