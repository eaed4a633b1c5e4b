"""Gloo's worker threads, and the end of a process.

[Note: workers at the end] A worker says that a collective is done before it lets go of its tensors.
Whoever waited may go on and drop the same tensors, which leaves the last reference to the worker;
to end such a tensor it needs Python's lock. If the interpreter is ending by then, Python stops the
thread that asks, inside of a destructor that must not be left, and the process is aborted
("terminate called without an active exception"; pytorch/pytorch#117762) after its last line. Where
cores are busy that is no rarity: 11 of 25 runs of a plain all-reduce were aborted on two cores that
had 20 processes to run. So a process that has run collectives waits, before its interpreter ends,
until no worker is at work. Torch offers nothing public for that but destroying the group, and the
program that holds a reference to it keeps its threads.
"""

import time
from pathlib import Path

_THREAD = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_PAUSE = 0.001  # seconds; a thread that was about to ask for Python's lock gets it meanwhile
_LOOKS = 2  # in a row that find no worker at work: between two states it looks like neither


def rest(limit: float = 2.0, tasks: Path = _TASKS) -> None:
    """Wait until no worker thread of gloo is at work; see [Note: workers at the end].

    One that waits for another rank is not at work: that rank may never come.

    Args:
        limit: most seconds to wait.
        tasks: where the system shows this process's threads; where it has no such place, nothing
            is waited for.

    Examples:
        >>> rest()
    """
    until, calm = time.monotonic() + limit, 0
    while calm < _LOOKS and time.monotonic() < until:
        time.sleep(_PAUSE)
        calm = calm + 1 if set(states(tasks)) <= {"S"} else 0


def states(tasks: Path = _TASKS) -> list[str]:
    """The states of gloo's workers, in the system's letters: "S" is one that sleeps."""
    found = []
    for stat in tasks.glob("*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended meanwhile
            continue
        name, _, rest_of_line = text.partition("(")[2].rpartition(")")
        if name == _THREAD:
            found.append(rest_of_line.split()[0])
    return found
