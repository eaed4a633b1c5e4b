"""The evaluation example runs, alone and on two ranks, and never puts the model together."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.launch import ROOT, run_example

TINY = ["--size", "tiny", "--steps", "20", "--batch", "2", "--length", "24"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_says_how_good_the_model_is_and_what_a_rank_holds(ranks: int, tmp_path: Path) -> None:
    printed = run_example("evaluate_and_generate", ranks, tmp_path, *TINY)

    # Rank 0 alone speaks: one summary.
    ((after, before),) = re.findall(
        r"validation: ([\d.]+) bits per byte; untrained: ([\d.]+)", printed
    )
    assert float(after) < float(before) - 1
    assert "one Program for 23 bytes of 4 prompts" in printed
    # The prompts, of several lengths, are left as they are.
    for prompt in ("|def ", "|class ", "|import os\n|\n|", "|    if not isinstance("):
        assert printed.count(prompt) >= 1
    ((share, whole),) = re.findall(r"holds ([\d.]+) MiB of ([\d.]+) MiB", printed)
    assert float(share) == pytest.approx(float(whole) / ranks, abs=0.01)
    peaks = re.findall(r"(validation|sampling): ([\d.]+) MiB; .* gives: ([\d.]+) MiB", printed)
    assert [name for name, *_ in peaks] == ["validation", "sampling"]
    _, ours, unsharded = peaks[0]  # of so small a model a bucket holds all: sampling saves nothing
    assert float(ours) < float(unsharded)
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_a_sample_is_longer_than_its_prompt() -> None:
    script = str(ROOT / "examples" / "evaluate_and_generate.py")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, *TINY, "--length", "22"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 2
    assert "--length 22 must be more than 22 bytes" in done.stderr


def test_is_short_enough_to_read() -> None:
    example = ROOT / "examples" / "evaluate_and_generate.py"
    assert len(example.read_text().splitlines()) <= 210
