"""Machines that are network namespaces: own addresses, joined by nothing but `wire.py`.

with machines(2, delay=0.05) as cluster:
    jobs = cluster.torchrun(["train.py"], ranks=1)
    cluster.cut(2)

Nothing outside of these namespaces is touched, and they are gone at the end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

WIRE = Path(__file__).with_name("wire.py")


def refusal() -> str:
    """Why no machines can be made here; empty if they can."""
    name = f"fzero-{uuid.uuid4().hex[:6]}"
    try:
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no `ip` (iproute2)"
    if done.returncode:
        return f"network namespaces can't be made: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return "" if os.path.exists("/dev/net/tun") else "there is no /dev/net/tun"


class Job:
    """Processes of one machine.

    Args:
        process: `torchrun` itself.
        log: the file of what they print.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self.log = process, log

    @property
    def text(self) -> str:
        """What they have printed so far."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """The exit code."""
        return self.process.wait(timeout)

    def wait_for(self, words: str, timeout: float) -> None:
        """Return once these words were printed."""
        end = time.monotonic() + timeout
        while words not in self.text:
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(f"{words!r} was not printed:\n{self.text[-3000:]}")
            time.sleep(0.1)


class Cluster:
    """Machines, numbered from 1.

    Args:
        names: of their namespaces.
        wire: the process that joins them.
        folder: for logs.
    """

    def __init__(self, names: Sequence[str], wire: "subprocess.Popen[str]", folder: Path) -> None:
        self.names, self.wire, self.folder = list(names), wire, folder
        self.jobs: list[Job] = []

    def torchrun(
        self, command: Sequence[str], *, ranks: int = 1, options: Sequence[str] = ()
    ) -> list[Job]:
        """Start a program on all machines, so many ranks on each."""
        numbers = range(1, len(self.names) + 1)
        return [self.torchrun_on(i, command, ranks=ranks, options=options) for i in numbers]

    def torchrun_on(
        self, number: int, command: Sequence[str], *, ranks: int = 1, options: Sequence[str] = ()
    ) -> Job:
        """Start one machine's part; the first machine has the rendezvous."""
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29400"]
        settings = f"is_host={int(number == 1)},join_timeout=120,keep_alive_interval=1"
        meeting += ["--rdzv-conf", settings]
        meeting += ["--local-addr", f"10.77.0.{number}", "--nnodes", str(len(self.names))]
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        log = self.folder / f"machine{number}-{len(self.jobs)}.log"
        # groups of gloo meet on this device's address
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            process = subprocess.Popen(
                # a name of its own, by which fzero tells hosts apart
                [
                    *["ip", "netns", "exec", self.names[number - 1], "unshare", "--uts"],
                    *["sh", "-c", f'hostname machine{number} && exec "$@"', "sh"],
                    *[*run, *meeting, *options, *command],
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.jobs.append(Job(process, log))
        return self.jobs[-1]

    def kill(self, number: int) -> None:
        """End all that runs on a machine at once, as when the power goes."""
        _kill_all_in(self.names[number - 1])

    def cut(self, number: int) -> None:
        """Pull a machine's cable: nothing reaches it or leaves it, and nobody is told."""
        self._tell(f"cut {number}")

    def join(self, number: int) -> None:
        """Put it back."""
        self._tell(f"join {number}")

    def sent(self, number: int) -> int:
        """Bytes that a machine has sent to others so far."""
        show = ["ip", "netns", "exec", self.names[number - 1], "cat", "/proc/net/dev"]
        text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
        (line,) = (row for row in text.splitlines() if row.strip().startswith("eth0:"))
        return int(line.split(":")[1].split()[8])

    def _tell(self, line: str) -> None:
        assert self.wire.stdin is not None
        self.wire.stdin.write(line + "\n")
        self.wire.stdin.flush()


@contextlib.contextmanager
def machines(
    count: int, folder: Path, *, delay: float = 0.0, loss: float = 0.0, mtu: int = 60_000
) -> Iterator[Cluster]:
    """So many machines on one network.

    Args:
        count: of machines.
        folder: for logs.
        delay: seconds that each packet takes.
        loss: share of the packets that never arrive.
        mtu: most bytes of a packet.
    """
    run = uuid.uuid4().hex[:6]
    names = [f"fzero-{run}-{i}" for i in range(1, count + 1)]
    wire = None
    cluster = None
    try:
        for name in names:
            _ip("netns", "add", name)
        wire = subprocess.Popen(
            [sys.executable, str(WIRE), *names, "--delay", str(delay), "--loss", str(loss)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert wire.stdout is not None
        if wire.stdout.readline() != "ready\n":
            raise OSError("the network between the machines did not start")
        for i, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "mtu", str(mtu), "up")
            _ip("-n", name, "link", "set", "lo", "up")
        cluster = Cluster(names, wire, folder)
        yield cluster
    finally:
        for name in names:
            _kill_all_in(name)
        for job in cluster.jobs if cluster else []:
            job.process.wait()
        if wire is not None:
            wire.kill()
            wire.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _kill_all_in(name: str) -> None:
    # by namespace: torchrun gives its workers sessions of their own, and dies without them
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
