"""A sweep finds the fastest candidate that fits."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fzero.program.machines import HARDWARE
from fzero.simulation.models import MODELS, Shape
from fzero.simulation.report import ROOM, Report
from fzero.simulation.sweep import Candidate, Job, LeftOut, candidates, sweep

SHAPE = Shape(layers=1, width=64, heads=2, kv_heads=2, hidden=64, vocab=64, sequence=16)
JOB = Job(SHAPE, rows=2, sequence=16, world=4, hardware=HARDWARE["h100"])


def test_what_fits_comes_first_and_the_fastest_before_others() -> None:
    those = [
        Candidate(3, remat="none"),
        Candidate(0, remat="none"),
        Candidate(3, remat="full", accum=2),
    ]
    peaks = {one: JOB.run(one).peak_bytes for one in those}
    room = sorted(peaks.values())[-2]  # all but the largest fit
    told: list[str] = []
    small = replace(JOB.hardware, memory=int(room / ROOM) + 1)
    rows = sweep(replace(JOB, hardware=small), those, workers=1, tell=told.append)
    assert len(told) == len(rows) == 3
    fits = []
    times = []
    for one, found in rows:
        assert isinstance(found, Report)
        assert found.peak_bytes == peaks[one]
        fits.append(found.fits)
        times.append(found.seconds)
    assert fits == [True, True, False]
    assert times[0] <= times[1]


def test_candidates_vary_everything_and_leave_out_what_cannot_fit() -> None:
    job = Job(MODELS["llama3-8b"], 4, 8192, 64, HARDWARE["h100"])
    found = candidates(job, 1000)
    assert len(found) == len(set(found)) > 30
    for name in ("stage", "replicate", "accum", "remat", "offload", "activations"):
        assert len({getattr(one, name) for one in found}) > 1
    assert all(job.least_bytes(one) <= ROOM * 80e9 for one in found)
    assert not any(one.stage == 0 and not one.offload for one in found)  # 16 bytes each: 128 GB
    assert len(candidates(job)) == 30


def test_what_bounds_rule_out_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Candidate] = []
    report = JOB.run(Candidate(3))

    def run(job: Job, one: Candidate) -> Report:
        ran.append(one)
        return replace(report, seconds=job.least_seconds(one) * 1.01)

    monkeypatch.setattr(Job, "run", run)
    those = [Candidate(3, remat="full"), Candidate(3, remat="dots"), Candidate(2, remat="full")]
    told: list[str] = []
    rows = sweep(JOB, those, workers=1, tell=told.append)
    assert ran == [those[1]]  # what may be fastest first
    assert [one for one, found in rows if isinstance(found, LeftOut)] == [those[0], those[2]]
    assert sum("left out: it takes at least" in line for line in told) == 2


@pytest.mark.slow
def test_the_bounds_are_below_every_report() -> None:
    for one in (
        Candidate(3),
        Candidate(1, remat="dots"),
        Candidate(0, remat="full"),
        Candidate(2, offload=True),
        Candidate(3, accum=2, activations=True),
    ):
        report = JOB.run(one)
        assert JOB.least_bytes(one) <= report.peak_bytes
        assert JOB.least_seconds(one) <= report.seconds
        assert (report.host_bytes > 0) == (one.offload or one.activations)


def workers_of(parent: int) -> list[int]:
    """The processes that a pool of this process has started."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in found if b"spawn_main" in _command(int(child))]


def _command(process: int) -> bytes:
    """Of a process that runs; a dead one has none, also while nobody has waited for it."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system shows no processes")
@pytest.mark.parametrize(
    ("when", "ending"),
    [("workers start", signal.SIGTERM), ("workers simulate", signal.SIGKILL)],
)
@pytest.mark.quick("workers start-15")
def test_workers_end_with_the_process_that_sweeps(when: str, ending: signal.Signals) -> None:
    options = "--model gpt2 --layers 1 --sequence 16 --world 4 --sweep --workers 2"
    command = [sys.executable, "-m", "fzero.simulate", *options.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as sweeping:
        if when == "workers simulate":
            assert sweeping.stdout is not None
            while not (line := sweeping.stdout.readline()).startswith(b"[1/"):
                assert line, "it ended"
        while len(workers := workers_of(sweeping.pid)) < 2:
            assert sweeping.poll() is None, "it ended"
            time.sleep(0.01)
        sweeping.send_signal(ending)
        sweeping.wait()
    # a worker that starts looks for its parent once it has imported what it is to run
    until = time.monotonic() + 60
    while (left := [one for one in workers if _command(one)]) and time.monotonic() < until:
        time.sleep(0.05)
    for one in left:
        os.kill(one, signal.SIGKILL)
    assert not left
