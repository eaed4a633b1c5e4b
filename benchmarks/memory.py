"""Bytes that a step holds: measured by the allocator, and what the Program said before.

    python -m benchmarks.memory                              # gpt2 at worlds 1, 2 and 8
    python -m benchmarks.memory --models gpt27 --worlds 8 --stages 3 --accum 1 4 --clip

One process plays one rank of each world (a fake process group: collectives allocate and move
nothing), so the figures are the same on every machine. Columns, in MiB: what the rank holds between
steps, that in units of (parameters + optimizer state + batch) / world, the peak of a step as it was
measured and as `program.peak_bytes()` predicts it, and what the peak adds to what is held between
steps, in units of the unsharded parameters.
"""

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fzero
from benchmarks.allocations import LocalState, measure
from benchmarks.models import GPT, SIZES, Step, batch_of, fzero_step, plain_step

MIB = 2**20


@contextlib.contextmanager
def one_rank_of(world: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of a world that isn't there."""
    if world == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Print one row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--models", nargs="+", default=["gpt2"], choices=SIZES)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 8])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--accum", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--clip", action="store_true", help="clip gradients as well")
    parser.add_argument("--sgd", action="store_true", help="SGD instead of AdamW: no state")
    args = parser.parse_args()
    columns = ["model", "world", "stage", "micro-batches"]
    columns += ["held", "x ideal", "peak", "predicted", "off", "added"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, world in itertools.product(args.models, args.worlds):
        rows = max(SIZES[name].rows // world, 1)
        if world == 1 and not args.sgd:
            size = SIZES[name]
            held, _ = measure(lambda: plain_step(size, batch_of(size, rows)))  # noqa: B023
            _print([name, "1", "plain torch", "1"], held, None, name, 1, adam=True)
        for stage, accum in itertools.product(args.stages, args.accum):
            cfg = fzero.Config(stage=stage, accum_steps=accum, clip_norm=1.0 if args.clip else None)
            opt = fzero.optim.sgd(0.1) if args.sgd else fzero.optim.adamw(1e-3, weight_decay=0.01)
            with one_rank_of(world):
                held, predicted = measured(name, opt, cfg, rows)
            labels = [name, str(world), str(stage), str(accum)]
            _print(labels, held, predicted, name, world, adam=not args.sgd)


def measured(
    name: str, opt: fzero.optim.Optimizer, cfg: fzero.Config, rows: int
) -> tuple[LocalState, int]:
    """What a step of a model holds, and the peak that its Program predicts."""
    size = SIZES[name]

    def build() -> Step:
        return fzero_step(size, batch_of(size, rows * cfg.accum_steps), opt, cfg)

    held, step = measure(build)
    return held, step.lower().peak_bytes()


def _print(
    labels: Sequence[str],
    held: LocalState,
    predicted: int | None,
    name: str,
    world: int,
    *,
    adam: bool,
) -> None:
    with torch.device("meta"):
        params = sum(p.nbytes for p in GPT(SIZES[name]).parameters())
    ideal = params * (3 if adam else 1) / world
    said = ["", ""]
    if predicted is not None:
        said = [f"{predicted / MIB:.2f}", f"{predicted / held.peak - 1:+.2%}"]
    figures = [
        f"{held.between / MIB:.2f}",
        f"{held.between / ideal:.4f}",
        f"{held.peak / MIB:.2f}",
        *said,
        f"{(held.peak - held.between) / params:.3f}",
    ]
    print("| " + " | ".join([*labels, *figures]) + " |", flush=True)


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is, and every default."""


if __name__ == "__main__":
    main()
