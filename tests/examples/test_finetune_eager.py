"""The fine-tuning example runs, alone and on two ranks, with both kinds of checkpoints."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

WHY = "examples/finetune_eager.py needs transformers: pip install -e '.[examples]'"
pytest.importorskip("transformers", minversion="5.23", reason=WHY)
load_file = pytest.importorskip("safetensors.torch", reason=WHY).load_file

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "finetune_eager.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
TINY = ["--size", "tiny", "--base-steps", "8", "--steps", "20"]


class Run(NamedTuple):
    printed: str
    progress: str
    adapters: dict[str, Tensor]


def run(launcher: list[str], out: Path, *flags: str) -> Run:
    command = [sys.executable, *launcher, str(EXAMPLE), "--out", str(out), *TINY, *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    return Run(done.stdout, done.stderr, load_file(out / "adapters.safetensors"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run([], tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(TORCHRUN, tmp_path_factory.mktemp("two_ranks"), "--stage", "3", "--reentrant")


@pytest.mark.parametrize("which", ["alone", pytest.param("two_ranks", marks=pytest.mark.slow)])
def test_says_what_was_trained_and_how_well(which: str, request: pytest.FixtureRequest) -> None:
    printed, progress, adapters = request.getfixturevalue(which)

    # Rank 0 alone speaks: one summary, one sample.
    ((trained, everything),) = re.findall(r"trained ([\d,]+) of ([\d,]+) parameters", printed)
    assert int(trained.replace(",", "")) == sum(x.numel() for x in adapters.values())
    assert int(trained.replace(",", "")) < int(everything.replace(",", ""))
    ((after, before),) = re.findall(
        r"manual: ([\d.]+) bits per byte; before fine-tuning: ([\d.]+)", printed
    )
    assert float(after) < float(before) < 8.0  # log2(256): what knowing nothing costs
    assert printed.count("sample:\nThe statement ") == 1
    assert "adapters, prose: 100%" in progress
    assert "Warning" not in progress


@pytest.mark.parametrize("which", ["alone", pytest.param("two_ranks", marks=pytest.mark.slow)])
def test_every_adapter_of_every_layer_was_trained(
    which: str, request: pytest.FixtureRequest
) -> None:
    adapters = request.getfixturevalue(which).adapters
    names = {name.split(".", 2)[2] for name in adapters}
    assert len(adapters) == 2 * 7 * 2  # layers, matrices of each, parts of an adapter
    assert len(names) == 28
    ups = {name: x for name, x in adapters.items() if ".up." in name}
    assert [name for name, x in ups.items() if not torch.any(x)] == []  # they start at zero


def test_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150
