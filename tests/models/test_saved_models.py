"""Modules of torch start from Programs that another process saved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = ("LSTM", "Transformer", "BatchNorm1d", "spectral_norm", "Loss")


@pytest.mark.slow
def test_a_new_process_computes_the_same_and_stages_nothing(tmp_path: Path) -> None:
    rows = {}
    for flag in ("--save", "--load"):
        file = tmp_path / f"{flag}.json"
        command = [sys.executable, "-m", "benchmarks.survey", flag, str(tmp_path / "programs")]
        command += ["--libraries", "torch", "--json", str(file), "--only", *MODELS]
        subprocess.run(command, check=True, capture_output=True)
        rows[flag] = {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}
    saved = {n for n, row in rows["--save"].items() if row["kind"] == "traced"}
    assert len(saved) > 20
    assert not [n for n in saved if "saved" in rows["--save"][n]]  # none was refused
    assert {n: row for n, row in rows["--load"].items() if row["kind"] != "loaded"} == {}
    assert saved == rows["--load"].keys()
