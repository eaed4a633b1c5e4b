"""What a step costs its host beside the Programs that it runs, by the number of leaves.

    python -m benchmarks.host
    python -m benchmarks.host --leaves 100 1000 4000 --stages 2 3 --steps 150

Leaves are matrices of 4 x 4, on one rank, so that hardly anything else is there. A row for each
number of leaves and stage: the calling thread's processor time, in milliseconds, medians over steps
with quartiles behind, of the whole call, and of what is left of it without its Programs, which are
what torch's kernels cost with their dispatch. `us a leaf` is the host's part, by leaf. Three steps
come before those that count.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fzero
from fzero.transforms import recorded


class Clock:
    """Adds up the thread's processor time in the Programs that are compiled while it looks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def compile_program(self, program: fzero.Program) -> Callable[..., list[Any]]:
        """What it compiles to, timed."""
        run = compiled(program)

        def timed(*inputs: Any) -> list[Any]:
            start = time.thread_time()
            results = run(*inputs)
            self.seconds += time.thread_time() - start
            return results

        return timed


compiled = recorded.compile_program


def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Hardly any work for each leaf."""
    for weight in params.values():
        x = x + torch.tanh(x @ weight)
    return x.square().mean()


def measured(leaves: int, cfg: fzero.Config, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of its host's part."""
    clock = Clock()
    torch.manual_seed(0)
    with mock.patch.object(recorded, "compile_program", clock.compile_program):
        step_fn = fzero.make_train_step(model_fn, fzero.optim.adamw(1e-3), cfg)
        params = {f"layers.{i}.weight": torch.randn(4, 4) / 4 for i in range(leaves)}
        params, opt_state = step_fn.init(params)
        batch = torch.randn(2, 4)
        whole, host = [], []
        for _ in range(steps + 3):
            clock.seconds = 0.0
            start = time.thread_time()
            params, opt_state = step_fn(params, opt_state, batch)
            whole.append(time.thread_time() - start)
            host.append(whole[-1] - clock.seconds)
    return whole[3:], host[3:]


def main() -> None:
    """Print one row per number of leaves and stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--leaves", nargs="+", type=int, default=[100, 1000, 4000], help="how many")
    parser.add_argument("--stages", nargs="+", type=int, default=[3], help="by default 3")
    parser.add_argument("--steps", type=int, default=150, help="that count, at least 2")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: one has no quartiles")
    torch.set_num_threads(1)
    print("| leaves | stage | step ms | host ms | us a leaf |")
    print("|---|---|---|---|---|", flush=True)
    for leaves in args.leaves:
        for stage in args.stages:
            whole, host = measured(leaves, fzero.Config(stage=stage), args.steps)
            each = statistics.median(host) * 1e6 / leaves
            print(f"| {leaves} | {stage} | {_ms(whole)} | {_ms(host)} | {each:.2f} |", flush=True)


def _ms(seconds: Sequence[float]) -> str:
    low, middle, high = (1e3 * x for x in statistics.quantiles(seconds, n=4))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
