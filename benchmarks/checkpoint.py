"""Saves and loads against a raw write and read of the same bytes on the same disk.

    python -m benchmarks.checkpoint --folder /disk/to/try
    torchrun --nproc_per_node 2 -m benchmarks.checkpoint --stage 3

Rounds are interleaved: raw write, save, raw read, load, copy, asynchronous save. Times are on the
slowest rank; a write ends when the bytes are on the disk (fsync). Reads come from the page cache,
both alike. "Extra memory" is the most that a call allocates at once beside what is there: tensors
by the allocator's events, Python's buffers by tracemalloc. "Blocked" is what training waits for an
asynchronous save to return; "copy" is a plain clone of the same tensors.
"""

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fzero
from benchmarks.models import SIZES, batch_of, fzero_step
from fzero import checkpoint, tree
from fzero.distributed.dtensor import local_tensor

MIB = 2**20
PIECE = 4 * MIB


def main() -> None:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt39", choices=SIZES)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    size = SIZES[args.model]
    cfg = fzero.Config(stage=args.stage)
    step = fzero_step(size, batch_of(size, size.rows), fzero.optim.adamw(1e-3), cfg)
    params, opt_state = step.params, step.opt_state
    rank = dist.get_rank() if dist.is_initialized() else 0
    run = args.folder / "fzero-benchmark"
    if rank == 0:
        shutil.rmtree(run, ignore_errors=True)  # of a run that was cut short
    together()
    mine = checkpoint.save(run / "first", params, opt_state) / f"rank-{rank:05d}.safetensors"
    share = mine.stat().st_size
    locals_ = [local_tensor(x) for x in tree.leaves((params, opt_state))]
    held = sum(x.nbytes for x in locals_)
    data = bytearray(os.urandom(PIECE))
    seconds: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], Any]) -> None:
        together()
        started = time.perf_counter()
        act()
        seconds.setdefault(name, []).append(slowest(time.perf_counter() - started))

    def save(number: int, **how: Any) -> None:
        checkpoint.save(run / "saves", params, opt_state, step=number, **how)

    for number in range(args.rounds):
        timed("raw write", lambda: raw_write(run / f"raw-{rank}", share, data))
        timed("save", lambda: save(3 * number))  # noqa: B023
        timed("raw read", lambda: raw_read(run / f"raw-{rank}", data))
        timed("load", lambda: checkpoint.load(run / "first", params, opt_state))
        timed("copy", lambda: [x.clone() for x in locals_])
        timed("blocked", lambda: save(3 * number + 1, asynchronous=True))  # noqa: B023
        checkpoint.wait()
        together()
        if rank == 0:
            shutil.rmtree(run / "saves")
    numbers = itertools.count()
    extra = {
        "save": extra_bytes(lambda: save(next(numbers))),
        "asynchronous save": extra_bytes(
            lambda: (save(next(numbers), asynchronous=True), checkpoint.wait())
        ),
        "load": extra_bytes(lambda: checkpoint.load(run / "first", params, opt_state)),
    }
    together()
    if rank == 0:
        middle = {name: statistics.median(times) for name, times in seconds.items()}
        best = {name: min(times) for name, times in seconds.items()}
        world = dist.get_world_size() if dist.is_initialized() else 1
        print(f"{args.model}, stage {args.stage}, {world} ranks, {share / MIB:.0f} MiB a rank")
        pairs = (("save", "raw write"), ("load", "raw write"), ("load", "raw read"))
        for name, baseline in pairs:
            ratios = [a / b for a, b in zip(seconds[name], seconds[baseline], strict=True)]
            low, mid, high = statistics.quantiles(ratios, n=4)
            speeds = [
                f"{what} {share * world / best[what] / 1e9:.2f} GB/s (median "
                f"{share * world / middle[what] / 1e9:.2f})"
                for what in (name, baseline)
            ]
            print(
                f"{', '.join(speeds)}; time ratio of the best {best[name] / best[baseline]:.2f}, "
                f"median of the rounds' {mid:.2f} (quartiles {low:.2f} to {high:.2f})"
            )
        for name in ("blocked", "copy", "save"):
            print(f"{name}: {best[name] * 1e3:.0f} ms (median {middle[name] * 1e3:.0f})")
        for name, nbytes in extra.items():
            print(f"extra memory, {name}: {nbytes / MIB:.1f} MiB ({held / MIB:.0f} MiB are held)")
        shutil.rmtree(run)


def raw_write(path: Path, nbytes: int, data: bytearray) -> None:
    """As many bytes to a new file, as fast as the disk takes them."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for start in range(0, nbytes, PIECE):
        os.write(file, memoryview(data)[: nbytes - start])
    os.fsync(file)
    os.close(file)


def raw_read(path: Path, data: bytearray) -> None:
    """The same file again, into one buffer."""
    with path.open("rb", buffering=0) as file:
        while file.readinto(data):
            pass


def together() -> None:
    """Start at the same moment on all ranks."""
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds: float) -> float:
    """The most that any rank took."""
    if not dist.is_initialized():
        return seconds
    worst = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def extra_bytes(act: Callable[[], Any]) -> int:
    """The most that `act` allocates at once: tensors, and Python's own buffers."""
    # Never stopped: CPython 3.11 can crash if a thread of gloo's frees memory at that moment.
    tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    act()
    python = tracemalloc.get_traced_memory()[1] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        act()
    profiler: Any = prof.profiler  # its events are typed in part only
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak + python


if __name__ == "__main__":
    main()
