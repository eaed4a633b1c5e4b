"""The training example runs, alone and on two ranks, and leaves what it promises."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
TINY = ["--size", "tiny", "--steps", "3", "--batch", "2"]


def run(launcher: list[str], out: Path, *flags: str) -> tuple[str, list[dict[str, float]]]:
    """What the example printed, and its rows of metrics."""
    command = [sys.executable, *launcher, str(EXAMPLE), "--out", str(out), *TINY, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, rows


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [([], ["--stage", "3"]), (TORCHRUN, ["--stage", "3", "--accum", "2"])],
    ids=["python", "torchrun"],
)
def test_runs_and_writes_what_it_promises(
    tmp_path: Path, launcher: list[str], flags: list[str]
) -> None:
    printed, rows = run(launcher, tmp_path, *flags)

    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) and row["tokens_per_s"] > 0 for row in rows)
    assert math.isfinite(rows[-1]["valid_bits_per_byte"])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    # Rank 0 alone speaks: one summary, one sample.
    (ours, bigram), *others = re.findall(
        r"validation: ([\d.]+) bits per byte; byte bigram: ([\d.]+)", printed
    )
    assert not others
    assert float(ours) == pytest.approx(rows[-1]["valid_bits_per_byte"], abs=1e-3)
    assert 2 < float(bigram) < 6
    assert printed.count("sample:\ndef ") == 1


def test_the_same_seed_gives_the_same_losses(tmp_path: Path) -> None:
    first, second = (run([], tmp_path / name)[1] for name in ("first", "second"))
    assert [row["loss"] for row in first] == [row["loss"] for row in second]


def test_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150
