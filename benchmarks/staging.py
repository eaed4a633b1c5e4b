"""What it costs to stage a step out, in seconds of CPU, and to start from saved Programs.

    python -m benchmarks.staging
    python -m benchmarks.staging --models gpt:12 chain:1500 --worlds 2 8

A model is `gpt:LAYERS` or `chain:LEAVES` (linear layers). Columns: leaves; world (one process plays
one rank of a fake group); CPU seconds of `make_fx` alone on the step's gradient function, which is
as far as torch goes; of staging the whole step out, update and passes included; their ratio; and of
a new process, from a step function and its state to the end of the first step, recorded and from
saved Programs. AdamW, stage 3. Times are those of this machine, which should have nothing else to
do; ratios say more.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from benchmarks.memory import one_rank_of
from benchmarks.models import GPT, Size, batch_of
from fzero import zero
from fzero.optim import as_optimizer
from fzero.program.interop import unchecked
from fzero.state.init import start
from fzero.state.opt_state import LocalState
from fzero.state.sharding import locals_of
from fzero.step.gradients import gradient_fn
from fzero.step.traced import signature_for
from fzero.transforms.frames import take_apart
from fzero.tree import leaves

CFG = fzero.Config(stage=3)


class Case(NamedTuple):
    """A model function, its parameters and a batch."""

    model_fn: Callable[..., Tensor]
    params: dict[str, Tensor]
    batch: Any


def case_of(model: str) -> Case:
    """Of `gpt:LAYERS` or `chain:LEAVES`."""
    kind, _, count = model.partition(":")
    torch.manual_seed(0)
    if kind == "gpt":
        size = Size(vocabulary=256, width=64, layers=int(count), heads=4, tokens=16, rows=2)
        apply, params = fzero.functionalize(GPT(size))
        return Case(lambda params, batch: apply(params, *batch), params, batch_of(size, 2))
    layers = int(count) // 3
    shapes = {"weight": (64, 64), "bias": (64,), "scale": (64,)}
    params = {f"{i}.{k}": torch.randn(v) / 8 for i in range(layers) for k, v in shapes.items()}

    def chain(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for i in range(layers):
            x = F.linear(x, params[f"{i}.weight"], params[f"{i}.bias"])
            x = torch.tanh(x * params[f"{i}.scale"])
        return x.square().mean()

    return Case(chain, params, torch.randn(8, 64))


def make_fx_alone(case: Case) -> float:
    """CPU seconds that torch takes to record the gradient function of the step."""
    opt = as_optimizer(fzero.optim.adamw(1e-3))
    plan, params, opt_state = start(CFG, opt, case.params)
    local = LocalState.of(opt_state, dtensors=False)
    batch, frame = take_apart(case.batch)
    signature = signature_for(plan, local, frame)
    fn = gradient_fn(case.model_fn, signature, zero.vjp)
    flat = [*locals_of(leaves(params)), *batch]
    begin = time.process_time()
    with unchecked:
        make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
    return time.process_time() - begin


def staged(case: Case) -> float:
    """CPU seconds of staging the whole step out."""
    step_fn = fzero.make_train_step(case.model_fn, fzero.optim.adamw(1e-3), CFG)
    state = step_fn.init(case.params)
    begin = time.process_time()
    step_fn.lower(*state, case.batch)
    return time.process_time() - begin


def first_step(case: Case, folder: str) -> tuple[float, float]:
    """CPU and wall seconds to the end of the first step; Programs from the folder, or to it."""
    step_fn = fzero.make_train_step(case.model_fn, fzero.optim.adamw(1e-3), CFG)
    state = step_fn.init(case.params)
    begin = time.process_time(), time.perf_counter()
    step_fn.load_programs(folder)
    step_fn(*state, case.batch)
    end = time.process_time(), time.perf_counter()
    if not list(Path(folder).iterdir()):
        step_fn.save_programs(folder)
    return end[0] - begin[0], end[1] - begin[1]


def apart(what: str, model: str, world: int, folder: str = "") -> list[float]:
    """A measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.staging", "--one", what, "--models", model]
    command += ["--worlds", str(world), "--folder", folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(x) for x in done.stdout.split()]


def one(what: str, model: str, world: int, folder: str) -> list[float]:
    """That measurement, here."""
    with one_rank_of(world):
        if what == "first_step":
            return list(first_step(case_of(model), folder))
        staged(case_of("chain:3"))  # what torch imports at its first recording is no staging
        case = case_of(model)
        return [{"make_fx": make_fx_alone, "staged": staged}[what](case)]


def main() -> None:
    """Print a row per model and world."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ["gpt:6", "gpt:12", "gpt:24", "gpt:48", "chain:375", "chain:1500"]
    parser.add_argument("--models", nargs="+", default=models)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 8])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(*one(args.one, args.models[0], args.worlds[0], args.folder))
        return
    head = ("model", "leaves", "world", "make_fx", "staged", "ratio", "first step", "from saved")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for model in args.models:
        count = len(case_of(model).params)
        for world in args.worlds:
            (alone,), (whole,) = apart("make_fx", model, world), apart("staged", model, world)
            with tempfile.TemporaryDirectory() as folder:
                fresh, again = (apart("first_step", model, world, folder) for _ in range(2))
            print(
                f"| {model} | {count} | {world} | {alone:.2f} | {whole:.2f} | "
                f"{whole / alone:.2f} | {fresh[0]:.2f} | {again[0]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
