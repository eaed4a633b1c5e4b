"""What a step costs its host beside the Programs that it runs, by the number of leaves.

    python -m benchmarks.host
    python -m benchmarks.host --leaves 100 1000 4000 --stages 2 3 --steps 150

Leaves are matrices of 4 x 4, on one rank, so that hardly anything else is there. A row for each
number of leaves and stage: the calling thread's processor time, in milliseconds, medians over steps
with quartiles behind, of the whole call, and of what is left of it without its Programs, which are
what torch's kernels cost with their dispatch. `us a leaf` is the host's part, by leaf: loops of
the interpreter's C code, and freeing gradients. `instructions` is what one step runs of Python's
byte code outside of its Programs, counted. Three steps come before those that count.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
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
            tracer = sys.gettrace()
            sys.settrace(None)  # what a Program runs is none of the host's
            start = time.thread_time()
            results = run(*inputs)
            self.seconds += time.thread_time() - start
            sys.settrace(tracer)
            return results

        return timed


compiled = recorded.compile_program


def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Hardly any work for each leaf."""
    for weight in params.values():
        x = x + torch.tanh(x @ weight)
    return x.square().mean()


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[CodeType, int]]]:
    """How many instructions of byte code this thread runs inside, by function and line."""
    found: Counter[tuple[CodeType, int]] = Counter()

    def tell(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            found[frame.f_code, frame.f_lineno] += 1
        return tell

    before = sys.gettrace()
    # Python 3.12 looks whether any frame asks for instructions when a tracer is set, not later
    sys._getframe().f_trace_opcodes = True
    sys.settrace(tell)
    try:
        yield found
    finally:
        sys.settrace(before)


def measured(leaves: int, cfg: fzero.Config, steps: int) -> tuple[list[float], list[float], int]:
    """Seconds of each step, and of its host's part; instructions of one more step."""
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
        with counted() as instructions:
            step_fn(params, opt_state, batch)
    return whole[3:], host[3:], instructions.total()


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
    print("| leaves | stage | step ms | host ms | us a leaf | instructions |")
    print("|---|---|---|---|---|---|", flush=True)
    for leaves in args.leaves:
        for stage in args.stages:
            whole, host, run = measured(leaves, fzero.Config(stage=stage), args.steps)
            each = statistics.median(host) * 1e6 / leaves
            cells = leaves, stage, _ms(whole), _ms(host), f"{each:.2f}", run
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _ms(seconds: Sequence[float]) -> str:
    low, middle, high = (1e3 * x for x in statistics.quantiles(seconds, n=4))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
