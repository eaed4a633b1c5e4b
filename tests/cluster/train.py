"""A training run for made-up machines: `train.py WAY STEPS [FOLDER]`, where WAY says how.

    step    make_train_step at stage 3 over all ranks
    engine  the Engine at stage 3 over all ranks
    hsdp    make_train_step on a mesh of machines x ranks: shards inside, replicas across

Each rank prints a line a step, and one at the end. With FOLDER it saves each step there, and goes
on from the newest.
"""

import datetime
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fzero

WIDTH = 256


def main(way: str, steps: int, folder: str | None) -> None:
    limit = datetime.timedelta(seconds=float(os.environ.get("FZERO_LIMIT", "60")))
    dist.init_process_group("gloo", timeout=limit)
    rank = dist.get_rank()
    mesh = None
    if way == "hsdp":
        inside = int(os.environ["LOCAL_WORLD_SIZE"])
        shape = (dist.get_world_size() // inside, inside)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    cfg = fzero.Config(stage=3, mesh=mesh)
    step, state = _trainer(way, model, fzero.optim.sgd(0.5, momentum=0.9), cfg, folder)
    say(f"rank {rank} starts at step {state()}")
    while (number := state()) < steps:
        rows = torch.Generator().manual_seed(1000 * number + rank)
        loss = step(torch.randn(8, WIDTH, generator=rows))
        say(f"rank {rank} step {number + 1} loss {loss:.9f}")
        if "FZERO_PAUSE" in os.environ:  # so that somebody can pull a cable in between
            time.sleep(float(os.environ["FZERO_PAUSE"]))
    say(f"rank {rank} done")


def say(text: str) -> None:
    """Print a line at once: ranks share a log, and `print` writes the end of a line by itself."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def _trainer(way, model, opt, cfg, folder):
    """`batch -> loss`, and the number of steps so far."""
    if way == "engine":
        engine = fzero.Engine(model, opt, cfg)

        def engine_step(x):
            engine.backward(engine(x).square().mean())
            engine.step()
            return float(engine.metrics["loss"])

        return engine_step, lambda: engine.global_steps
    apply, params = fzero.functionalize(model)
    step_fn = fzero.make_train_step(lambda p, x: apply(p, x).square().mean(), opt, cfg)
    now: list[Any] = [*step_fn.init(params)]
    if folder is not None and fzero.checkpoint.latest(folder) is not None:
        now[:] = fzero.checkpoint.load(folder, *now)

    def step(x):
        now[:] = step_fn(now[0], now[1], x)
        if folder is not None:
            fzero.checkpoint.save(folder, *now, keep=2, overwrite=True)
        return float(now[1].metrics["loss"])

    return step, lambda: int(now[1].step)


if __name__ == "__main__":
    began = time.monotonic()
    try:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    except BaseException as error:
        rank = os.environ["RANK"]
        say(f"rank {rank} ended with {type(error).__name__}: {error}")
        raise
