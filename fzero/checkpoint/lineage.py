"""Which checkpoint came from which: the order of `latest`, and of what `keep` lets go.

[Note: lineage] Step numbers say nothing about order: whoever goes back to step 10 and trains on to
15 has left steps 20 and 30 behind. So each manifest says in which order it was written among those
of its folder, and which of them it came from:

    step    10 ──▶ 20 ──▶ 30        orders 1, 2, 3
             └──▶ 15 ──▶ 20         orders 4, 5; the line of 15 is [10], that of the new 20 [15, 10]

The newest is the one that was written last. Then comes its line, then the others, by order. A
checkpoint without a lineage, of an earlier release, has order 0 and goes by its step.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_HEAD_BYTES = 2**16
# So many entries fit into what `peek` reads, with room to spare.
_LONGEST = 1000
_FIELD = re.compile(r'"lineage": (\{[^{}]*\})')


class Lineage(NamedTuple):
    """Where a checkpoint stands among those of its folder.

    Args:
        order: of writing, from 1; 0 if it is not known.
        line: (step, order) of those that it came from and that were there when it was written, its
            parent first.
    """

    order: int = 0
    line: tuple[tuple[int, int], ...] = ()


UNKNOWN = Lineage()


class Entry(NamedTuple):
    """A checkpoint's folder, its step, and its lineage."""

    folder: Path
    step: int
    lineage: Lineage

    @property
    def key(self) -> tuple[int, int]:
        """What other lineages call it."""
        return self.step, self.lineage.order


def peek(file: Path) -> Lineage | None:
    """The lineage in a manifest, from its first bytes; None if the file cannot be read.

    Nothing else is looked at: manifests of large models have many MiB. Whoever opens the checkpoint
    checks all of it.
    """
    try:
        with file.open("rb") as opened:
            found = _FIELD.search(opened.read(_HEAD_BYTES).decode(errors="replace"))
        return UNKNOWN if found is None else parse(json.loads(found[1]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def parse(found: dict[str, object]) -> Lineage:
    """A lineage from its JSON.

    Raises:
        ValueError, TypeError, KeyError: it is none.

    >>> parse({"order": 4, "line": [[10, 1]]})
    Lineage(order=4, line=((10, 1),))
    """
    order, line = found["order"], found["line"]
    rows = [(step, written) for step, written in line]  # pyright: ignore[reportGeneralTypeIssues]
    for number in (order, *[n for row in rows for n in row]):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
            raise ValueError(f"{number!r} is not a count")
    return Lineage(order, tuple(rows))  # pyright: ignore[reportArgumentType]


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """Checkpoints by how much they are wanted; see [Note: lineage].

    >>> entry = lambda step, order, *line: Entry(Path(str(step)), step, Lineage(order, line))
    >>> left, back = [entry(10, 1), entry(20, 2), entry(30, 3)], entry(15, 4, (10, 1))
    >>> [entry.step for entry in ranked([*left, back])]
    [15, 10, 30, 20]
    """
    by_order = sorted(entries, key=lambda e: (e.lineage.order, e.step), reverse=True)
    if not by_order:
        return []
    newest = by_order[0]
    line = {key: back for back, key in enumerate((newest.key, *newest.lineage.line))}
    # Stable: those that are not in the line stay by order.
    return sorted(by_order, key=lambda e: line.get(e.key, len(line)))


def family(entries: Sequence[Entry]) -> set[tuple[int, int]]:
    """The keys of the newest one and of all that have to do with it, however far off.

    Two belong together that one line names, or whose lines name one that has gone. Others are of
    another run, which this one has not gone on from. Of those without a lineage nobody knows: they
    are taken for one run.

    >>> entry = lambda step, order, *line: Entry(Path(str(step)), step, Lineage(order, line))
    >>> old = [entry(30, 3, (20, 2)), entry(40, 4, (30, 3), (20, 2))]
    >>> sorted(family([*old, entry(4, 5)])), sorted(family([*old, entry(25, 5, (20, 2))]))
    ([(4, 5)], [(25, 5), (30, 3), (40, 4)])
    """
    ties: list[set[tuple[int, int]]] = []
    for entry in entries:
        tie = {entry.key, *entry.lineage.line}
        if any(order == 0 for _, order in tie):
            tie.add((-1, 0))
        apart = [other for other in ties if other.isdisjoint(tie)]
        ties = [*apart, tie.union(*(other for other in ties if not other.isdisjoint(tie)))]
    newest = ranked(entries)[0].key
    of_it = next(tie for tie in ties if newest in tie)
    return {entry.key for entry in entries} & of_it


def following(entries: Sequence[Entry], step: int, parent: int | None) -> Lineage:
    """The lineage of a checkpoint of `step` to be written beside `entries`.

    Args:
        step: its own; one that is there will be replaced.
        parent: the step of the one that it comes from; None, or one that is gone: a new line.
    """
    order = 1 + max((entry.lineage.order for entry in entries), default=0)
    there = {entry.step: entry for entry in entries}
    if parent is None or parent not in there:
        return Lineage(order)
    # One of this step will be replaced, and a line names only what stays.
    staying = {entry.key for entry in entries if entry.step != step}
    line = (there[parent].key, *there[parent].lineage.line)
    return Lineage(order, tuple(key for key in line if key in staying)[:_LONGEST])


class Heads:
    """What this process has read and written last in each run's folder.

    A training state is a plain value and can't tell where it came from, so this belongs to the
    process.
    """

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._resumed: dict[str, int] = {}
        self._met: set[str] = set()

    def loaded(self, path: Path, step: int, *, state: bool) -> None:
        """A checkpoint was read: what is saved next comes from it.

        Args:
            path: the folder of the run.
            step: the checkpoint's.
            state: whether the optimizer's state was read too. Parameters alone may be a teacher's
                or an average's, and change nothing for a run that goes on.
        """
        run = os.path.realpath(path)
        self._resumed[run] = step
        if state or run not in self._at:
            self._at[run] = step

    def saved(self, path: Path, step: int) -> None:
        """A checkpoint was published."""
        self._at[os.path.realpath(path)] = step

    def parent(self, path: Path) -> int | None:
        """The step of the checkpoint below `path` that the next one comes from."""
        return self._at.get(os.path.realpath(path))

    def meets_others(self, path: Path) -> bool:
        """Whether this is the first time that other runs' checkpoints are met there."""
        run = os.path.realpath(path)
        first = run not in self._met
        self._met.add(run)
        return first

    def resumed(self, path: Path) -> int | None:
        """The step of the one that was read last, which `keep` never lets go."""
        return self._resumed.get(os.path.realpath(path))
