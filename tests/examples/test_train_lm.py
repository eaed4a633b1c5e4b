"""The training example runs, alone and on two ranks, and leaves what it promises."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fzero.checkpoint import sample_order

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_lm.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
TINY = ["--size", "tiny", "--steps", "3", "--batch", "4"]


class Run(NamedTuple):
    out: Path
    printed: str
    rows: list[dict[str, float]]


def run(launcher: list[str], out: Path, *flags: str) -> tuple[str, list[dict[str, float]]]:
    """What the example printed, and its rows of metrics."""
    command = [sys.executable, *launcher, str(EXAMPLE), "--out", str(out), *TINY, *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # this checkout, installed or not
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, rows


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("alone")
    return Run(out, *run([], out))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("two_ranks")
    return Run(out, *run(TORCHRUN, out, "--stage", "3", "--accum", "2"))


@pytest.mark.parametrize("which", ["alone", "two_ranks"])
@pytest.mark.quick("two_ranks")
def test_writes_what_it_promises(which: str, request: pytest.FixtureRequest) -> None:
    out, printed, rows = request.getfixturevalue(which)

    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) and row["tokens_per_s"] > 0 for row in rows)
    assert math.isfinite(rows[-1]["valid_bits_per_byte"])
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    # Rank 0 alone speaks: one summary, one sample.
    (ours, bigram), *others = re.findall(
        r"validation: ([\d.]+) bits per byte; byte bigram: ([\d.]+)", printed
    )
    assert not others
    assert float(ours) == pytest.approx(rows[-1]["valid_bits_per_byte"], abs=1e-3)
    assert 2 < float(bigram) < 6
    assert printed.count("sample:\ndef ") == 1


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses(alone: Run, tmp_path: Path) -> None:
    again = run([], tmp_path)[1]
    assert [row["loss"] for row in again] == [row["loss"] for row in alone.rows]


def test_the_first_losses_are_those_of_an_untrained_model(alone: Run, two_ranks: Run) -> None:
    uniform = math.log(256)
    for rows in (alone.rows, two_ranks.rows):
        assert rows[0]["loss"] == pytest.approx(uniform, abs=0.5)


def batch_of(world: int, *flags: str) -> int:
    """The batch that the example comes to on one of `world` ranks, without starting them."""
    until_data, _, _ = EXAMPLE.read_text().partition("# ---- data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(EXAMPLE), *flags])
        for name, value in (("WORLD_SIZE", world), ("RANK", world - 1), ("LOCAL_RANK", 0)):
            patch.setenv(name, str(value))
        names: dict[str, Any] = {}
        exec(until_data, names)
    return names["args"].batch


@pytest.mark.parametrize("world", range(1, 18))
def test_the_batch_can_be_shared_among_any_ranks(world: int) -> None:
    batch = batch_of(world)
    whole, *parts = (
        sample_order(3, samples=1000, batch=batch, rank=rank, world=ranks)
        for ranks in (1, world)
        for rank in range(ranks)
    )
    assert torch.equal(torch.cat(parts), whole)
    assert batch == 12 or (12 % world and 12 < batch < 12 + world)
    assert batch_of(world, "--accum", "3") % (3 * world) == 0


def test_a_batch_that_cannot_be_shared_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        batch_of(8, "--batch", "12")
    said = capsys.readouterr().err
    assert "--batch 12 must be a multiple of 8: 8 ranks, --accum" in said


@pytest.mark.parametrize(
    "flags", [["--save-every", "0"], ["--save-every", "-5"], ["--checkpoint", __file__]]
)
def test_what_could_not_be_saved_is_refused_before_training(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        batch_of(1, *flags)
    said = capsys.readouterr().err
    assert "--save-every must be 1 or more steps, and --checkpoint a folder" in said


def test_what_the_launch_files_start_fits_their_ranks() -> None:
    slurm, yaml, page = (
        (ROOT / name).read_text()
        for name in (
            "examples/launch/slurm.sbatch",
            "examples/launch/kubernetes.yaml",
            "docs/machines.md",
        )
    )
    (pods,) = re.findall(r"args: \[(.*)\]", yaml)
    (usage,), (torchrun,) = (
        re.findall(r"^#? *examples/train_lm\.py (.*)$", text, re.M) for text in (slurm, page)
    )
    for flags in (shlex.split(pods.replace(",", " ")), usage.split(), torchrun.split()):
        assert batch_of(16, *flags) == 16
    # the batch script sends a signal that only this flag listens to
    assert "--save-on-signal" in usage


def test_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 190
