"""Pages that a step frees are not cleared anew for the next one, and go back with the Program."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from fzero.program.heap import made_by
from tests.program.test_codegen import recorded

ON_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

HEAD = """
import gc, resource, torch
import fzero

def faults(run):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""

SMALL = (
    HEAD
    + """
def blocks():
    # as a step does: several blocks, of which none is left
    blocks = [torch.zeros(2**19) for _ in range(24)]

step_fn = fzero.make_train_step(lambda w, x: (w * x).mean(), fzero.optim.sgd(0.1))
step_fn(*step_fn.init(torch.ones(4)), torch.ones(4))
for _ in range(3):
    faults(blocks)
print(sum(faults(blocks) for _ in range(10)))
"""
)

LARGE = (
    HEAD
    + """
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

def model_fn(w, x):
    y = (x * w).exp()  # 40 MiB each, above all that glibc would keep
    return ((y * w).sin() * y).mean()

step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1))
state, x = step_fn.init(torch.ones(10)), torch.zeros(2**20, 10)
other = fzero.make_train_step(lambda w, x: (w * x).exp().mean(), fzero.optim.sgd(0.1))
others = other.init(torch.ones(10))

def step():
    global state
    state = step_fn(*state, x)

for _ in range(4):
    step()
other(*others, torch.zeros(2**20, 10))  # it needs less, and takes nothing away
step()
print(sum(faults(step) for _ in range(5)))
held = resident()
del step_fn
gc.collect()
print(held - resident())
"""
)


def run(script: str, **given: str) -> list[int]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    env.pop("LD_PRELOAD", None)
    env.pop("GLIBC_TUNABLES", None)
    command = [sys.executable, "-c", script]
    out = subprocess.run(
        command, env=env | given, capture_output=True, text=True, timeout=120, check=True
    )
    return [int(line) for line in out.stdout.split()]


@ON_GLIBC
def test_pages_stay() -> None:
    (faults,) = run(SMALL)
    # 48 MiB in pages of 4 KiB, ten times: 120,000 where they are given back
    assert faults < 1_000


@ON_GLIBC
@pytest.mark.skipif(
    platform.libc_ver()[1] in {f"2.{minor}" for minor in range(35)},
    reason="this glibc maps blocks above 32 MiB, whatever it is told",
)
def test_pages_of_large_steps_stay_as_long_as_their_program() -> None:
    faults, freed = run(LARGE)
    # a few blocks find no gap at first; 770,000 where all are given back
    assert faults < 100_000
    assert freed > 3 * 40 * 2**20 // 4096 // 2


@ON_GLIBC
@pytest.mark.slow
def test_who_has_set_a_threshold_keeps_it() -> None:
    faults, _ = run(LARGE, MALLOC_TRIM_THRESHOLD_="131072")
    assert faults > 200_000


def test_what_a_graph_makes() -> None:
    x = torch.ones(8)
    graph = recorded(lambda x: ((x.exp() + 1).sin().repeat(2),), x).graph
    assert made_by(graph) == (96, 64)  # two of 32 bytes at once, or one and its copies


def test_what_is_elsewhere_takes_none() -> None:
    x = torch.ones(8, device="meta")
    assert made_by(recorded(lambda x: (x.exp() + 1,), x).graph) == (0, 0)
