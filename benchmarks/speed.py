"""Time of a step at world 1 beside plain torch: the same model, batch and fused AdamW, interleaved.

    python -m benchmarks.speed                       # gpt2
    python -m benchmarks.speed --models gpt27 --rounds 10 --threads 2

Each round runs both, one after the other, in changing order; the ratio is the median over rounds of
fzero's time over plain torch's, with the quartiles behind it, so what else the machine does cancels
out as far as it lasts longer than a round. For worlds above 1 see benchmarks/README.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import fzero
from benchmarks.models import SIZES, batch_of, fzero_step, plain_step


def main() -> None:
    """Print one row per model and stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt2"], choices=SIZES)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 3])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| model | stage | staged out in s | plain ms | fzero ms | fzero / plain |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        size = SIZES[name]
        batch = batch_of(size, size.rows)
        for stage in args.stages:
            opt = fzero.optim.adamw(1e-3, weight_decay=0.01)
            ours = fzero_step(size, batch, opt, fzero.Config(stage=stage))
            plain = plain_step(size, batch)
            staging = seconds(ours)
            rounds = [one_round(plain, ours, turned=i % 2 == 1) for i in range(args.rounds + 2)][2:]
            ratios = [b / a for a, b in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4)
            columns = [statistics.median(column) * 1e3 for column in zip(*rounds, strict=True)]
            times = " | ".join(f"{ms:.1f}" for ms in columns)
            print(
                f"| {name} | {stage} | {staging:.1f} | {times} | "
                f"{middle:.3f} [{low:.3f}, {high:.3f}] |",
                flush=True,
            )


def one_round(
    plain: Callable[[], object], ours: Callable[[], object], *, turned: bool
) -> tuple[float, float]:
    """Seconds of one step each."""
    if turned:
        second = seconds(ours)
        return seconds(plain), second
    return seconds(plain), seconds(ours)


def seconds(step: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
