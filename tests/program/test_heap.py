"""Pages that a step frees are not cleared anew for the next one."""

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
import fzero

def faults():
    # as a step does: several blocks, of which none is left
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(2**19) for _ in range(24)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step_fn = fzero.make_train_step(lambda w, x: (w * x).mean(), fzero.optim.sgd(0.1))
step_fn(*step_fn.init(torch.ones(4)), torch.ones(4))
for _ in range(3):
    faults()
print(sum(faults() for _ in range(10)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_stay() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    env.pop("LD_PRELOAD", None)
    run = [sys.executable, "-c", SCRIPT]
    out = subprocess.run(run, env=env, capture_output=True, text=True, timeout=120, check=True)
    # 48 MiB in pages of 4 KiB, ten times: 120,000 where they are given back
    assert int(out.stdout) < 1_000
