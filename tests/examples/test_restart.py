"""The example is stopped and killed, and goes on: by itself, and at other world sizes."""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

import fzero
from fzero.checkpoint.format.folders import steps
from tests.ranks import RanksFailed, run_fresh

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_lm.py"


def _flags(out: Path, count: int) -> list[str]:
    run = ["--out", str(out), "--checkpoint", str(out / "ckpt"), "--resume", "--save-on-signal"]
    return [*run, "--size", "tiny", "--steps", str(count), "--save-every", "4", "--batch", "12"]


def _example(out: Path, count: int, hit: int | None, number: int) -> None:
    """Runs the example; at the step `hit` the last rank sends itself a signal."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    real = fzero.TrainStep.__call__

    def call(self: fzero.TrainStep, params: object, opt_state: fzero.OptState, batch: object):
        if last and int(opt_state.step) == hit:
            if number == signal.SIGKILL:  # saves are written beside the training
                _wait_for(out / "ckpt" / f"step-{hit // 4 * 4:08}")
            os.kill(os.getpid(), number)
        return real(self, params, opt_state, batch)

    sys.argv = [str(EXAMPLE), *_flags(out, count)]
    with mock.patch.object(fzero.TrainStep, "__call__", call), contextlib.suppress(SystemExit):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def _wait_for(step: Path) -> None:
    end = time.monotonic() + 60
    while fzero.checkpoint.latest(step.parent) != step and time.monotonic() < end:
        time.sleep(0.05)


def _losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.mark.slow
def test_the_world_may_change_between_restarts(tmp_path: Path) -> None:
    straight, changing = tmp_path / "straight", tmp_path / "changing"
    run_fresh(1, _example, straight, 14, None, 0, timeout=120)
    # 4 ranks until one of them gets SIGTERM: all save the step that they are in
    run_fresh(4, _example, changing, 14, 5, signal.SIGTERM, timeout=120)
    assert steps(changing / "ckpt")[-1].name == "step-00000006"
    # 2 ranks until one is killed: step 8 was saved
    with pytest.raises(RanksFailed, match=r"rank 0 .*RankMismatchError: .* rank 1 ended|code -9"):
        run_fresh(2, _example, changing, 14, 10, signal.SIGKILL, timeout=120)
    assert steps(changing / "ckpt")[-1].name == "step-00000008"
    run_fresh(3, _example, changing, 14, None, 0, timeout=120)
    assert _losses(changing) == pytest.approx(_losses(straight), rel=1e-5)


@pytest.mark.slow
def test_torchrun_restarts_from_the_latest_checkpoint(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run_fresh(2, _example, straight, 60, None, 0, timeout=120)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, "--max-restarts", "2", str(EXAMPLE), *_flags(killed, 60)]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as agent:
        try:
            deadline = time.monotonic() + 120
            while not steps(killed / "ckpt") and time.monotonic() < deadline:
                time.sleep(0.01)
            workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            os.kill(int(workers[-1]), signal.SIGKILL)
            said, _ = agent.communicate(timeout=120)
        finally:
            if agent.poll() is None:  # it ends its workers, which a kill would leave behind
                agent.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(45)
            agent.kill()
    assert agent.returncode == 0, said[-6000:]
    assert _losses(killed) == _losses(straight)  # bit for bit: the world is the same
