"""The example of spectra finds the eigenvalues of the dense Hessian, alone and on two ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hessian_spectrum.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
WIDTH, ROWS, STEPS, TOP = 3, 64, 20, 5
FLAGS = {"width": WIDTH, "rows": ROWS, "steps": STEPS, "top": TOP, "lanczos": 70, "probes": 1}


def _run(launcher: list[str], out: Path) -> tuple[str, dict[str, dict[str, list[list[float]]]]]:
    flags = [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, *launcher, str(EXAMPLE), "--out", str(out), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # this checkout, installed or not
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((out / "spectrum.json").read_text())


def _dense() -> dict[str, Tensor]:
    """All eigenvalues, smallest first, before training and after: plain torch, the whole batch."""
    digits = load_digits()
    x, y = torch.tensor(digits.data)[:ROWS] / 16, torch.tensor(digits.target)[:ROWS]
    torch.manual_seed(0)
    layers = nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10)
    model = nn.Sequential(*layers).double()

    def eigenvalues() -> Tensor:
        names, parts = zip(*model.named_parameters(), strict=True)
        shapes, sizes = [p.shape for p in parts], [p.numel() for p in parts]

        def loss(flat: Tensor) -> Tensor:
            rows = zip(names, flat.split(sizes), shapes, strict=True)
            values = {name: part.view(shape) for name, part, shape in rows}
            return F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

        flat = torch.cat([p.detach().flatten() for p in parts])
        return torch.linalg.eigvalsh(torch.func.hessian(loss)(flat))

    found = {"before training": eigenvalues()}
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return found | {"after training": eigenvalues()}


@pytest.mark.parametrize(
    "launcher",
    [[], pytest.param(TORCHRUN, marks=pytest.mark.slow)],
    ids=["alone", "two ranks"],
)
@pytest.mark.slow
def test_the_eigenvalues_are_those_of_the_dense_hessian(
    launcher: list[str], tmp_path: Path
) -> None:
    printed, found = _run(launcher, tmp_path)

    for when, dense in _dense().items():
        top, errors = zip(*found[when]["top"], strict=True)
        assert top == pytest.approx(dense.flip(0)[:TOP].tolist(), abs=1e-6)
        assert max(errors) < 1e-6
        lowest, _ = found[when]["bottom"][0]
        assert lowest == pytest.approx(dense[0].item(), abs=1e-6)
    assert (tmp_path / "spectrum.png").read_bytes().startswith(b"\x89PNG")
    # rank 0 alone speaks
    assert len(re.findall("after training, the largest:", printed)) == 1


def test_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 170
