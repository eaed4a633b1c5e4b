"""The launch file for Ray Train starts two workers, which train what one process would."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
STEPS = 20

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'fzero[dev-peers]' brings it",
)


@pytest.mark.slow
@needs_ray
def test_two_workers_of_ray_train_the_model_of_one_process(tmp_path: Path) -> None:
    script = ROOT / "examples" / "launch" / "ray_train.py"
    command = [sys.executable, str(script), "--workers", "2", "--steps", str(STEPS)]
    # the driver and its workers: this checkout, installed or not, and what finds Ray
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (found,) = re.findall(rf"loss after {STEPS} steps: ([\d.]+)", done.stdout)
    assert float(found) == pytest.approx(_plain(workers=2), abs=1e-4)


def test_without_ray_it_says_what_it_takes_and_what_to_install() -> None:
    script = str(ROOT / "examples" / "launch" / "ray_train.py")
    without = (
        "import runpy, sys; sys.modules['ray'] = None; "
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    said = [
        subprocess.run(
            [sys.executable, "-c", without, *flags],
            capture_output=True,
            text=True,
            timeout=100,
            env=env,
        )
        for flags in (["--help"], [])
    ]
    assert said[0].returncode == 0
    assert "--workers" in said[0].stdout
    assert said[1].returncode == 2
    assert "pip install 'ray[train]>=2.60'" in said[1].stderr


def _plain(workers: int) -> float:
    """The loss of the last batch of all workers, in plain PyTorch."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    opt = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.01)
    rows = [torch.Generator().manual_seed(rank) for rank in range(workers)]
    loss = torch.zeros(())
    for _ in range(STEPS):
        x = torch.cat([torch.randn(32, 8, generator=one) for one in rows])
        loss = (module(x) - x.sum(-1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()
