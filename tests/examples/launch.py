"""Examples, run as a user would run them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def run_example(name: str, ranks: int, out: Path, *flags: str) -> str:
    """What `examples/name.py` prints."""
    example = ROOT / "examples" / f"{name}.py"
    launcher = TORCHRUN if ranks == 2 else []
    command = [sys.executable, *launcher, str(example), "--out", str(out), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # this checkout, installed or not
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout
