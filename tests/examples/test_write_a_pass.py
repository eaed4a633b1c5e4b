"""The example of a pass: fewer bytes, a small error that is measured, and the same training."""

import json
from pathlib import Path

import pytest

from tests.examples.launch import ROOT, run_example


def _results(out: Path, *flags: str) -> dict[str, dict]:
    printed = run_example("write_a_pass", 2, out, "--steps", "20", "--width", "128", *flags)
    assert "int8" in printed
    return json.loads((out / "results.json").read_text())


@pytest.mark.slow
def test_a_quarter_of_the_bytes_and_the_same_training(tmp_path: Path) -> None:
    found = _results(tmp_path)
    plain, small = found["as it is"], found["int8"]
    assert 3.5 < plain["gathered"] / small["gathered"] <= 4
    assert small["sent"] < plain["sent"]
    # rounded to the nearest of 255 steps of a block: half a step is 1/254 of its largest number
    assert 0 == plain["error"] < small["error"] < 1 / 254 * 2
    assert small["loss"][0] == pytest.approx(plain["loss"][0], rel=0.01)
    assert small["loss"][-1] == pytest.approx(plain["loss"][-1], rel=0.1)
    assert small["loss"][-1] < 0.8 * small["loss"][0]


@pytest.mark.slow
def test_half_of_bfloat16s_bytes(tmp_path: Path) -> None:
    found = _results(tmp_path, "--precision", "bf16")
    assert 1.8 < found["as it is"]["gathered"] / found["int8"]["gathered"] <= 2
    assert found["int8"]["loss"][-1] == pytest.approx(found["as it is"]["loss"][-1], rel=0.1)


def test_is_short_enough_to_read() -> None:
    assert len((ROOT / "examples" / "write_a_pass.py").read_text().splitlines()) <= 170
