"""`Config(executor="inductor")` beside the generated function: results, time per step, first step.

    python -m benchmarks.inductor                    # GPTs at stages 0 and 3, then docs/models.md
    python -m benchmarks.inductor --gpts gpt27 --cases none --rounds 20

For a GPT: operators in compiled stretches, the largest difference of a parameter after two steps of
SGD, milliseconds of a step of each (medians, interleaved), their ratio, and seconds of CPU,
compilers included, from the state to the end of the first step: of a process that finds an empty
cache, of the next one, and of one that runs the generated function. For the models of
docs/models.md: gradients of one step at stage 3, the largest difference over the largest gradient.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import fzero
from benchmarks.models import SIZES, Step, batch_of, fzero_step
from benchmarks.speed import seconds
from fzero.errors import TraceError


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpts", nargs="*", default=["gpt2", "gpt27"], choices=SIZES)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 3])
    parser.add_argument("--cases", nargs="*", default=[], help="of docs/models.md; none: no table")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--first", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.first:
        name, stage, executor = args.first
        print(first_step(name, int(stage), executor))
        return
    for name in args.gpts:
        for stage in args.stages:
            print(_row(gpt(name, stage, args.rounds)), flush=True)
    if args.cases != ["none"]:
        for row in models(args.cases):
            print(_row(row), flush=True)


def gpt(name: str, stage: int, rounds: int) -> list[str]:
    """A row of the first table."""
    # AdamW divides by the size of a gradient, and would show how small some are
    sgd = [step_of(name, stage, one, fzero.optim.sgd(0.1)) for one in ("traced", "inductor")]
    steps = {one: step_of(name, stage, one) for one in ("traced", "inductor")}
    for _ in range(2):
        for step in (*sgd, *steps.values()):
            step()
    pairs = zip(*(fzero.unshard(step.params).values() for step in sgd), strict=True)
    off = max(float((a - b).abs().max()) for a, b in pairs)
    del sgd
    said = steps["inductor"].lower().log[-1].removeprefix("inductor: ")
    times = [{one: seconds(step) for one, step in steps.items()} for _ in range(rounds)]
    generated, compiled = (
        statistics.median(row[one] for row in times) * 1e3 for one in ("traced", "inductor")
    )
    ratio = statistics.median(row["inductor"] / row["traced"] for row in times)
    with tempfile.TemporaryDirectory() as cache:
        firsts = [apart(name, stage, "inductor", cache) for _ in range(2)]
        firsts.append(apart(name, stage, "traced", cache))
    cells = [f"{generated:.1f}", f"{compiled:.1f}", f"{ratio:.2f}", *(f"{s:.1f}" for s in firsts)]
    return [name, str(stage), said, f"{off:.0e}", *cells]


def step_of(name: str, stage: int, executor: Any, opt: Any = None) -> Step:
    """A step of a GPT; AdamW, if nothing else is said."""
    torch.manual_seed(1)
    size = SIZES[name]
    opt = opt or fzero.optim.adamw(1e-3, weight_decay=0.01)
    cfg = fzero.Config(stage=stage, executor=executor)
    return fzero_step(size, batch_of(size, size.rows), opt, cfg)


def first_step(name: str, stage: int, executor: str) -> float:
    """Seconds of CPU of this process and its children."""
    step = step_of(name, stage, executor)
    before = os.times()
    step()
    time.sleep(1)  # compilers that are not waited for
    return sum(os.times()[:4]) - sum(before[:4])


def apart(name: str, stage: int, executor: str, cache: str) -> float:
    """`first_step` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.inductor", "--first", name, str(stage), executor]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return float(done.stdout)


def models(names: list[str]) -> Any:
    """Rows of the second table."""
    from tests.models.compare import batch_of as batch_of_case
    from tests.models.compare import error, scale, stepped
    from tests.models.zoo import CASES

    for case in CASES:
        if not case.installed or not case.stages_out or (names and case.name not in names):
            continue
        batch = batch_of_case(case)
        try:
            wanted = stepped(case, batch, lower=False, stage=3)
            found = stepped(case, batch, lower=False, stage=3, executor="inductor")
        except TraceError as refusal:
            yield [case.name, type(refusal).__name__]
            continue
        yield [case.name, f"{error(found, wanted) / scale(wanted):.0e}"]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
