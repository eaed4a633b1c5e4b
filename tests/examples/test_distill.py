"""The distillation example runs, alone and on two ranks: the student comes near the teacher."""

import re
from pathlib import Path

import pytest

from tests.examples.launch import ROOT, run_example

TINY = ["--teacher-steps", "30", "--steps", "30", "--width", "64", "--batch", "4"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_student_learns_in_one_program_a_step(ranks: int, tmp_path: Path) -> None:
    printed = run_example("distill", ranks, tmp_path, *TINY)

    # Rank 0 alone speaks: one summary.
    ((teacher, student, average),) = re.findall(
        r"teacher ([\d.]+), student ([\d.]+), average of its weights ([\d.]+)", printed
    )
    for found in (teacher, student, average):
        assert float(found) < 7  # 8 is what knowing nothing costs
    (kinds,) = re.findall(r"one Program a step, [\d.]+ MiB at its peak: (.*)", printed)
    if ranks == 2:  # the trees travel once each way, in buckets
        assert "all_gather" in kinds
        assert "reduce_scatter" in kinds
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_is_short_enough_to_read() -> None:
    assert len((ROOT / "examples" / "distill.py").read_text().splitlines()) <= 210
