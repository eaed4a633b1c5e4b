"""`python -m benchmarks.gpu` runs in full where there is no GPU, at toy sizes."""

import json
from pathlib import Path

import pytest

from tests.ranks import run_fresh


def _run(out: str) -> int:
    from benchmarks.gpu import main

    return main(["--device", "cpu", "--toy", "--rounds", "1", "--out", out])


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_at_toy_sizes(tmp_path: Path) -> None:
    assert run_fresh(1, _run, str(tmp_path), timeout=500) == [0]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failed"] == []
    assert [row["ok"] for row in found["results"]] == [True] * 5
    assert all(abs(row["off"]) < 0.02 for row in found["memory"])
    # of a peer that this torch lacks it says so; what is ours has a figure
    assert all("ms" in row for row in found["speed"] if row["name"].startswith("fzero"))
    assert found["offload"][1]["ok"]
    assert (tmp_path / "gpu.png").stat().st_size > 1000
