"""Run programs one after the other, and shrink those that differ."""

import argparse
import ast
import collections
import datetime
import os
import re
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fuzz import programs
from benchmarks.fuzz.programs import Outcome


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="random programs against plain PyTorch")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=None, help="end after so long")
    parser.add_argument("--program", help="one program, as printed; it isn't shrunk")
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    runner = Runner(rank, world)
    if args.program:
        print(rank, *runner(ast.literal_eval(args.program)))
        return runner.close()
    counts: Any = collections.Counter()
    found, begin = 0, time.monotonic()
    for seed in range(args.seed, args.seed + args.count):
        if runner.any(args.minutes and time.monotonic() - begin > 60 * args.minutes):
            break
        program = programs.draw(seed)
        outcome = runner(program)
        if os.environ.get("FUZZ_SHOW") and outcome.kind == "refused" and rank == 0:
            print(f"seed {seed} refused: {outcome.why[:400]}", flush=True)
        counts[outcome.kind, re.sub(r"[\d.]+|'.*?'|`.*?`", "*", outcome.why)[:90]] += 1
        if outcome.kind in ("differs", "raised"):
            found += 1
            small = program
            if not args.no_shrink:
                small = programs.shrink(
                    program, lambda p, kind=outcome.kind: runner(p).kind == kind
                )
            if rank == 0:
                print(f"seed {seed} {outcome.kind}: {outcome.why[:300]}")
                print(f"    --program {str(small)!r}", flush=True)
    if rank == 0:
        for (kind, why), number in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"{number:6d} {kind} {why}")
        kinds = collections.Counter()
        for (kind, _), number in counts.items():
            kinds[kind] += number
        print(dict(kinds), f"{time.monotonic() - begin:.0f} s")
    runner.close()
    sys.exit(bool(found))


_PATIENCE = datetime.timedelta(seconds=120)


class Runner:
    """Runs programs on this rank; what ranks found is told to all, apart from the process group."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.number = rank, world, 0
        if world > 1:
            self.store = dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world,
                is_master=False, wait_for_workers=False,
            )  # fmt: skip
            self._join()

    def _join(self) -> None:
        for _ in range(5):
            store = dist.PrefixStore(f"group {self.number}", self.store)
            try:
                dist.init_process_group(
                    "gloo", store=store, rank=self.rank, world_size=self.world, timeout=_PATIENCE
                )
            except RuntimeError as error:  # a busy machine refuses a connection now and then
                print(f"rank {self.rank} tries again: {error}"[:200], flush=True)
            if all(self._tell("1" if dist.is_initialized() else "")):
                return
            if dist.is_initialized():
                dist.destroy_process_group()
        raise RuntimeError("no process group after five tries")

    def any(self, here: Any) -> bool:
        """Whether it holds on rank 0."""
        return bool(self._tell("1" if here else "")[0])

    def _tell(self, text: str) -> list[str]:
        if self.world == 1:
            return [text]
        self.number += 1
        self.store.set(f"fuzz {self.number} {self.rank}", text or " ")
        keys = [f"fuzz {self.number} {rank}" for rank in range(self.world)]
        return [self.store.get(key).decode().strip() for key in keys]

    def __call__(self, program: programs.Program) -> Outcome:
        mine = programs.run(program, self.rank, self.world)
        all_ranks = [Outcome(*text.split("\n", 1)) for text in self._tell("\n".join(mine) + " ")]
        order = ("differs", "raised", "refused", "invalid", "same")
        worst = min(all_ranks, key=lambda outcome: order.index(outcome.kind))
        if self.world > 1 and worst.kind != "same":  # nobody knows what is half done
            self._tell("")
            dist.destroy_process_group()
            self._join()
        return Outcome(worst.kind, worst.why.strip())

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
