"""Universal checkpoints that a real DeepSpeed wrote, into every sharding."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.checkpoint import deepspeed_param_groups, import_deepspeed_universal
from tests.ranks import run_ranks

STEPS = 3  # of real_deepspeed.py

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install fzero[dev-peers]",
    ),
]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda stage: f"zero{stage}")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(f"zero{request.param}")
    script = Path(__file__).with_name("real_deepspeed.py")
    launch = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launch, "--nproc-per-node", "2", script, out, str(request.param)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def _import(out: Path, stage: int, precision: Any) -> tuple[dict[str, Tensor], list[int]]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    cfg = fzero.Config(stage, precision=precision)
    engine = fzero.Engine(module, fzero.optim.adamw(1e-2), cfg)
    engine.state = import_deepspeed_universal(out / "universal", *engine.state)
    opt_state = fzero.unshard(engine.state[1])
    found = {f"fp32 {name}": engine.full_param(name) for name, _ in module.named_parameters()}
    found |= {f"exp_avg {name}": x for name, x in opt_state.inner.mu.items()}
    found |= {f"exp_avg_sq {name}": x for name, x in opt_state.inner.nu.items()}
    return found, [int(opt_state.step), int(opt_state.inner.step)]


@pytest.mark.parametrize(
    ("world", "stage", "precision"), [(1, 0, None), (2, 3, None), (3, 2, "bf16"), (2, 3, "bf16")]
)
def test_values_moments_and_the_count_are_those_that_deepspeed_had(
    world: int, stage: int, precision: Any, written: Path
) -> None:
    expected = torch.load(written / "values.pt", weights_only=True)
    for found, steps in run_ranks(world, _import, written, stage, precision):
        assert steps == [STEPS, STEPS]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value.view_as(found[key]).float()), key


def test_groups_tell_their_rate(written: Path) -> None:
    assert {group["lr"] for group in deepspeed_param_groups(written / "universal")} == {1e-2}
