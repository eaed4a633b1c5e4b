"""Numbers and tables as text, for listings and reports."""

from collections.abc import Iterable, Sequence


def size(nbytes: float) -> str:
    """Bytes with a unit.

    >>> size(0), size(1536), size(5 * 2**30)
    ('0 B', '1.5 KiB', '5 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{_figures(nbytes)} {unit}"
        nbytes /= 1024
    return f"{_figures(nbytes)} GiB"


def count(number: float) -> str:
    """A large number with a unit.

    >>> count(12), count(2.5e9)
    ('12', '2.5 G')
    """
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < 1000:
            return f"{_figures(number)}{unit}"
        number /= 1000
    return f"{_figures(number)} P"


def seconds(time: float) -> str:
    """A time with a unit.

    >>> seconds(0.0123), seconds(2)
    ('12.3 ms', '2 s')
    """
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if time * factor >= 1:
            return f"{_figures(time * factor)} {unit}"
    return f"{_figures(time * 1e6)} us"


def _figures(number: float) -> str:
    # 4 figures, and never 1.023e+03
    return f"{number:.4g}" if abs(number) < 1000 else f"{number:.0f}"


def table(rows: Iterable[Sequence[str]], align: str) -> list[str]:
    """Lines of columns.

    Args:
        rows: their cells.
        align: "l" or "r" for each column.

    >>> table([["a", "1"], ["bc", "23"]], "lr")
    ['  a    1', '  bc  23']
    """
    rows = [list(row) for row in rows]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(align))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
