"""fzero under Ray Train: what torchrun would start, started by a Ray cluster.

    python examples/launch/ray_train.py --workers 2        # pip install 'ray[train]>=2.60'

Ray starts the processes, on as many hosts as it has, and joins them to one process group; the
function that runs on each is the same as in a script.
"""

import argparse
from typing import Any

import torch
from torch import nn

import fzero


def train(settings: dict[str, int]) -> float:
    """One worker: stage 3 over all of them. Returns the mean loss of the last batches."""
    from ray import train as ray_train  # pyright: ignore[reportMissingImports]

    rank = ray_train.get_context().get_world_rank()
    torch.manual_seed(0)
    apply, params = fzero.functionalize(
        nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    )

    def model_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return (apply(params, batch) - batch.sum(-1, keepdim=True)).square().mean()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.adamw(3e-3), fzero.Config(stage=3))
    params, opt_state = step_fn.init(params)
    rows = torch.Generator().manual_seed(rank)
    for _ in range(settings["steps"]):
        batch = torch.randn(32, 8, generator=rows)
        params, opt_state = step_fn(params, opt_state, batch)
        ray_train.report({"loss": float(opt_state.metrics["loss"])})
    return float(opt_state.metrics["loss"])


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--workers", type=int, default=2)
    cli.add_argument("--steps", type=int, default=50)
    cli.add_argument("--gpu", action="store_true")
    options = cli.parse_args()
    try:
        from ray.train import ScalingConfig  # pyright: ignore[reportMissingImports]
        from ray.train.torch import (  # pyright: ignore[reportMissingImports]
            TorchConfig,
            TorchTrainer,
        )
    except ModuleNotFoundError as error:
        cli.error(f"{error}: pip install 'ray[train]>=2.60'")
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps},
        torch_config=TorchConfig(backend="nccl" if options.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
    )
    # What `train` returned on rank 0. Reported metrics stay with the result only where they came
    # with a checkpoint.
    loss = trainer.fit().return_value
    print(f"loss after {options.steps} steps: {loss:.4f}")


if __name__ == "__main__":
    main()
