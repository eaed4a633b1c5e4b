"""A sweep finds the fastest candidate that fits."""

from dataclasses import replace

import pytest

from fzero.simulation.machines import HARDWARE
from fzero.simulation.models import MODELS, Shape
from fzero.simulation.report import ROOM, Report
from fzero.simulation.sweep import Candidate, Job, candidates, sweep

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
    for name in ("stage", "replicate", "accum", "remat", "offload"):
        assert len({getattr(one, name) for one in found}) > 1
    assert all(job.least_bytes(one) <= ROOM * 80e9 for one in found)
    assert not any(one.stage == 0 and not one.offload for one in found)  # 16 bytes each: 128 GB
    assert len(candidates(job)) == 30


@pytest.mark.slow
def test_the_bound_is_below_every_peak() -> None:
    for one in (Candidate(3), Candidate(1), Candidate(0), Candidate(2, offload=True)):
        assert JOB.least_bytes(one) <= JOB.run(one).peak_bytes
