"""Which ranks are gone: what a collective that failed does not say.

A backend tells that a connection broke, or that time ran out, and not whose fault it was. So each
process leaves its name in the store while all is well, and whoever sees a collective fail looks
which of the processes are still there.
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

# A connection breaks a moment before its process counts as ended.
GRACE_SECONDS = 2.0

# Some without their first letter: backends write "Connection" and "connection".
_OF_COLLECTIVES = ("gloo", "NCCL", "onnection", "TCPStore", "recvValue", "sendBytes")

# Gloo has two: an operation whose time is up closes its connections, and ends with it all others
# that are in flight. Which of them is waited for first is chance.
_TIME_IS_UP = ("imed out", "Application timeout")


@dataclass(frozen=True)
class Processes:
    """The processes of some ranks.

    Args:
        names: of each rank's process: host, pid, and when it started.
    """

    names: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def gone(self) -> dict[int, str]:
        """The ranks on this host whose process ended or is stopped, and which of the two."""
        here = own_name()["host"]
        states = {rank: _state(name) for rank, name in self.names.items() if name["host"] == here}
        return {rank: state for rank, state in states.items() if state}

    def elsewhere(self) -> list[int]:
        """The ranks on other hosts, of which nothing is known here."""
        here = own_name()["host"]
        return [rank for rank, name in self.names.items() if name["host"] != here]


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective or the store may have raised it: backends have no class of their own.

    >>> is_of_collective(RuntimeError("shape mismatch")), is_of_collective(dist.DistError("x"))
    (False, True)
    """
    known = isinstance(error, dist.DistError) or any(s in str(error) for s in _OF_COLLECTIVES)
    return known or time_is_up(error)


def time_is_up(error: BaseException) -> bool:
    """Whether a collective ended since others did not come by its limit.

    >>> time_is_up(RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
    True
    >>> time_is_up(RuntimeError("Application timeout caused pair closure"))
    True
    """
    return any(s in str(error) for s in _TIME_IS_UP)


def own_name() -> dict[str, str]:
    """This process: its host, pid, and when it started."""
    boot, space = "", ""
    with contextlib.suppress(OSError):  # another system than Linux
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        space = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    # host names repeat, among containers above all; pids are of one namespace and one boot
    host = f"{socket.gethostname()} {boot} {space}"
    # pids are given out again: only with its start does one name a process
    return {"host": host, "pid": str(pid), "started": _stat(pid)[1]}


def _state(name: Mapping[str, str]) -> str:
    """What became of a process: "ended", "is stopped", or "" where it goes on."""
    state, started = _stat(int(name["pid"]))
    if not name["started"]:
        return ""  # no way to tell on this system
    # a zombie has ended, though nobody has asked for its exit status yet
    if started != name["started"] or state in "ZX":
        return "ended"
    return "is stopped" if state in "Tt" else ""


def _stat(pid: int) -> tuple[str, str]:
    """A process's state and when it started, in ticks since boot; "X" and "" without it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # its name may hold anything
    except OSError:
        return "X", ""
    # fields 3 and 22 of proc(5): the first two are cut off
    return fields[0], fields[19]
