"""fzero over several machines: what crosses the network, and what happens when it breaks.

`pytest -m slow -rP tests/cluster` prints the seconds of the table in docs/machines.md.
"""

import os
import re
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.cluster.machines import Cluster, Job, machines, refusal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(refusal()), reason=f"no made-up machines here: {refusal()}"),
]

ROOT = Path(__file__).parents[2]
TRAIN = str(Path(__file__).with_name("train.py"))
LIMIT = 15  # seconds: the process group's timeout in these runs
RESTARTS = ("--max-restarts", "3", "--monitor-interval", "1")
# Else torchrun's rendezvous tells the address of the first round to those alone who were there.
OWN_STORE = mock.patch.dict(os.environ, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@pytest.fixture(autouse=True)
def environment():
    """What the ranks of all machines inherit."""
    given = {"FZERO_LIMIT": str(LIMIT), "FZERO_PAUSE": "0.1", "PYTHONPATH": str(ROOT)}
    with mock.patch.dict(os.environ, given):
        yield


def _losses(jobs: list[Job]) -> dict[tuple[int, int], float]:
    """By rank and step."""
    lines = re.findall(
        r"^rank (\d+) step (\d+) loss ([\d.]+)$", "".join(j.text for j in jobs), re.M
    )
    return {(int(rank), int(step)): float(loss) for rank, step, loss in lines}


def _seconds_until(
    jobs: list[Job], words: str, times: int, limit: float, what: str = ""
) -> list[float]:
    """How long it takes each machine to print these words so many times."""
    began, found = time.monotonic(), [0.0] * len(jobs)
    while not all(found):
        assert time.monotonic() - began < limit, [job.text[-2000:] for job in jobs]
        for i, job in enumerate(jobs):
            if not found[i] and job.text.count(words) >= times:
                found[i] = time.monotonic() - began
        time.sleep(0.1)
    if what:
        print(f"{what}: every rank has, after {', '.join(f'{x:.0f}' for x in found)} s by machine")
    return found


def _went_on(jobs: list[Job]) -> dict[tuple[int, int], float]:
    """The losses of a run that started again from its checkpoint of step 5, or a later one."""
    codes = [job.wait(240) for job in jobs]
    assert codes == [0] * len(jobs), [job.text[-3000:] for job in jobs]
    started = re.findall(r"rank 0 starts at step (\d+)", jobs[0].text)
    assert len(started) > 1
    assert int(started[-1]) >= 5
    return _losses(jobs)


def _finished(cluster: Cluster, command: list[str], ranks: int = 1) -> list[Job]:
    jobs = cluster.torchrun(command, ranks=ranks)
    codes = [job.wait(150) for job in jobs]
    assert codes == [0] * len(jobs), [job.text[-3000:] for job in jobs]
    return jobs


@pytest.mark.parametrize("way", ["step", "engine"])
def test_two_machines_train_as_two_ranks_of_one(way: str, tmp_path: Path) -> None:
    with machines(2, tmp_path) as cluster:
        apart = _losses(_finished(cluster, [TRAIN, way, "4"]))
    with machines(1, tmp_path) as cluster:
        together = _losses(_finished(cluster, [TRAIN, way, "4"], ranks=2))
    assert len(apart) == 8
    assert apart == together


def test_a_slow_link_that_loses_packets_changes_no_number(tmp_path: Path) -> None:
    with machines(2, tmp_path) as cluster:
        fast = _losses(_finished(cluster, [TRAIN, "step", "3"]))
    with machines(2, tmp_path, delay=0.05, loss=0.01, mtu=9000) as cluster:
        slow = _losses(_finished(cluster, [TRAIN, "step", "3"]))
    assert slow == fast


def test_with_shards_inside_of_machines_gradients_alone_cross(tmp_path: Path) -> None:
    sent = []
    for steps in (4, 12):
        with machines(2, tmp_path) as cluster:
            _finished(cluster, [TRAIN, "hsdp", str(steps)], ranks=2)
            sent.append(cluster.sent(1))
    width = 256
    parameters = 2 * (width * width + width)
    # each rank's shard of the gradients is summed with its replica's: a ring of two sends it once
    a_step = 4 * parameters
    measured = (sent[1] - sent[0]) / 8
    assert a_step <= measured <= 1.05 * a_step


@pytest.mark.parametrize(
    ("way", "count", "ranks"), [("engine", 2, 1), ("hsdp", 2, 2), ("step", 3, 1)]
)
def test_a_cable_that_is_pulled_ends_every_rank_by_name(
    way: str, count: int, ranks: int, tmp_path: Path
) -> None:
    with machines(count, tmp_path) as cluster:
        jobs = cluster.torchrun([TRAIN, way, "100000"], ranks=ranks)
        jobs[0].wait_for("step 3", 90)
        cluster.cut(count)
        words = "ended with RankMismatchError"
        _seconds_until(jobs, words, ranks, LIMIT + 120, f"{words} (cable, {way})")
    *others, alone = jobs
    first = (count - 1) * ranks  # of the ranks that are cut off
    missing = f"rank {first}" if ranks == 1 else f"ranks {first}-{first + ranks - 1}"
    for job in others:
        assert re.search(rf"rank [0-{first - 1}] waited {LIMIT} s", job.text)
        assert f"Of {missing}, on another host" in job.text
    assert "neither the others' messages came nor an answer of the store" in alone.text


def test_a_cable_that_is_back_in_time_costs_nothing(tmp_path: Path) -> None:
    with machines(2, tmp_path) as cluster:
        jobs = cluster.torchrun([TRAIN, "step", "40"])
        jobs[0].wait_for("step 3", 90)
        cluster.cut(2)
        time.sleep(LIMIT / 2)
        cluster.join(2)
        codes = [job.wait(120) for job in jobs]
        interrupted = _losses(jobs)
    assert codes == [0, 0], [job.text[-3000:] for job in jobs]
    with machines(2, tmp_path) as cluster:
        assert interrupted == _losses(_finished(cluster, [TRAIN, "step", "40"]))


def test_a_cable_that_is_back_too_late_costs_the_steps_since_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    command = [TRAIN, "hsdp", "40", str(tmp_path / "run")]
    with OWN_STORE, machines(2, tmp_path) as cluster:
        jobs = cluster.torchrun(command, ranks=2, options=RESTARTS)
        jobs[0].wait_for("step 5", 90)
        cluster.cut(2)
        _seconds_until(jobs, "ended with RankMismatchError", 2, LIMIT + 40)
        cluster.join(2)
        _seconds_until(jobs, "starts at step", 4, 120, "gone on (cable back too late)")
        again = _went_on(jobs)
    with machines(2, tmp_path) as cluster:
        assert again == _losses(_finished(cluster, command[:3], ranks=2))


def test_a_machine_that_dies_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    with OWN_STORE, machines(2, tmp_path) as cluster:
        command = [TRAIN, "step", "60", str(tmp_path / "run")]
        jobs = cluster.torchrun(command, options=RESTARTS)
        jobs[0].wait_for("step 5", 90)
        cluster.kill(2)
        _seconds_until(jobs[:1], "ended with", 1, LIMIT + 40, "ended (machine killed)")
        time.sleep(6)  # until torchrun counts the dead machine out
        jobs.append(cluster.torchrun_on(2, command, options=RESTARTS))
        _seconds_until(jobs[2:], "starts at step", 1, 120, "gone on (machine replaced)")
        again = _went_on([jobs[0], jobs[2]]) | _losses(jobs[1:2])
    with machines(2, tmp_path) as cluster:
        assert again == _losses(_finished(cluster, [TRAIN, "step", "60"]))


def test_without_the_machine_of_the_rendezvous_torchrun_ends_and_its_ranks_with_it(
    tmp_path: Path,
) -> None:
    with machines(2, tmp_path) as cluster:
        jobs = cluster.torchrun([TRAIN, "step", "100000"], options=RESTARTS)
        jobs[1].wait_for("step 3", 90)
        cluster.kill(1)
        began = time.monotonic()
        code = jobs[1].wait(LIMIT + 40)
        print(f"torchrun has ended (rendezvous killed): {time.monotonic() - began:.0f} s")
        alive = subprocess.run(
            ["ip", "netns", "pids", cluster.names[1]], capture_output=True, text=True
        )
    assert code != 0
    assert "RendezvousConnectionError" in jobs[1].text
    assert not alive.stdout.split()


@pytest.mark.parametrize(
    "command",
    [
        ["train_lm.py", "--size", "tiny", "--steps", "4", "--batch", "4"],
        ["finetune_eager.py", "--base-steps", "2", "--steps", "3", "--batch", "2"],
    ],
    ids=lambda command: command[0],
)
def test_the_examples_run_across_machines(command: list[str], tmp_path: Path) -> None:
    name, *flags = command
    flags += ["--out", str(tmp_path / "out")]
    with machines(2, tmp_path) as cluster:
        _finished(cluster, [str(ROOT / "examples" / name), *flags])
