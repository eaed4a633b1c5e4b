"""Which ranks are gone: what a collective that failed does not say.

A backend tells that a connection broke, or that time ran out, and not whose fault it was. So each
process leaves its name in the store while all is well, and whoever sees a collective fail looks
which of the processes are still there. Nothing runs in the background, and a step costs nothing.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from fzero.distributed.mesh import default_store
from fzero.errors import RankMismatchError

# A connection breaks a moment before its process counts as ended.
GRACE_SECONDS = 2.0

_OF_COLLECTIVES = ("gloo", "NCCL", "onnection", "imed out", "TCPStore", "recvValue", "sendBytes")


@dataclass(frozen=True)
class Processes:
    """The processes of some ranks.

    Args:
        names: of each rank's process: host, pid, and when it started.
    """

    names: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def gone(self) -> dict[int, str]:
        """The ranks on this host whose process ended or is stopped, and which of the two."""
        here = _own_name()["host"]
        states = {rank: _state(name) for rank, name in self.names.items() if name["host"] == here}
        return {rank: state for rank, state in states.items() if state}

    def elsewhere(self) -> list[int]:
        """The ranks on other hosts, of which nothing is known here."""
        here = _own_name()["host"]
        return [rank for rank, name in self.names.items() if name["host"] != here]

    def blame(self, error: BaseException, grace: float = GRACE_SECONDS) -> str:
        """Who is gone, as a sentence; "" if nobody, or if `error` is not a collective's.

        Args:
            error: what a collective may have raised.
            grace: seconds to wait for a process to be seen ending.
        """
        if not self.names or not is_of_collective(error):
            return ""
        deadline = time.monotonic() + grace
        while not (gone := self.gone()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if gone:
            return " and ".join(f"rank {rank} {what}" for rank, what in gone.items())
        far = self.elsewhere()
        return f"no process on this host is gone; look at ranks {far} on other hosts" if far else ""


def meet(ranks: Sequence[int]) -> Processes:
    """The processes of these ranks, which all must call it.

    >>> meet([0]).gone()
    {}
    """
    if len(ranks) == 1 or not dist.is_initialized() or dist.get_backend() == "fake":
        return Processes()
    store = default_store()
    store.set(f"fzero/process/{dist.get_rank()}", json.dumps(_own_name()))
    return Processes({r: json.loads(store.get(f"fzero/process/{r}")) for r in ranks})


@contextlib.contextmanager
def who_is_gone(processes: Processes) -> Iterator[None]:
    """Raise a RankMismatchError that names the ranks that are gone, where a collective fails.

    Args:
        processes: of the ranks that the collectives inside run on.
    """
    try:
        yield
    except RuntimeError as error:
        if blame := processes.blame(error):
            raise RankMismatchError(
                f"a collective failed: {blame}. The other ranks cannot go on without it: look at "
                "its output, or at the system's log if the memory ran out, and start again from "
                "the last checkpoint (torchrun --max-restarts does so by itself)."
            ) from error
        raise


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective or the store may have raised it: backends have no class of their own.

    >>> is_of_collective(RuntimeError("shape mismatch")), is_of_collective(dist.DistError("x"))
    (False, True)
    """
    return isinstance(error, dist.DistError) or any(s in str(error) for s in _OF_COLLECTIVES)


def _own_name() -> dict[str, str]:
    boot, space = "", ""
    with contextlib.suppress(OSError):  # another system than Linux
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        space = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    host = f"{socket.gethostname()} {boot} {space}"
    return {"host": host, "pid": str(pid), "started": _stat(pid)[1]}


def _state(name: Mapping[str, str]) -> str:
    """What became of a process: "ended", "is stopped", or "" where it goes on."""
    state, started = _stat(int(name["pid"]))
    if not name["started"]:
        return ""  # no way to tell on this system
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
    return fields[0], fields[19]
