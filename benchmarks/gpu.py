"""All that needs a GPU, in one command: results, memory and speed there, as JSON and a plot.

    python -m benchmarks.gpu                        # one CUDA device, NCCL, a 350M GPT in bf16
    python -m benchmarks.gpu --device cpu --toy     # the same in full on a CPU at toy sizes

Writes `gpu.json` and, with matplotlib, `gpu.png` into `--out`. Parts, in this order; each is left
out, and says so, when `--seconds` (480) are over, and one that fails does not keep the others from
running (the exit status is then 1):

- results: 3 steps of SGD at stages 0 to 3, on CUDA also as CUDA graphs, and of the Engine in
  float32, on a process group of one rank (NCCL, on a CPU gloo), against plain PyTorch: the largest
  difference of a parameter;
- memory: one rank of 8 that aren't there (a fake process group), stages 0 to 3: the peak that the
  Program predicts beside `torch.cuda.max_memory_allocated`, both for a second step, and what it
  says of the bytes that the caching allocator reserves;
- speed: milliseconds of a step, tokens per second and the peak, of plain PyTorch under autocast,
  FSDP2, FSDP2 compiled, `Config(executor="traced")` in both layouts and `"inductor"`, on CUDA with
  `cuda_graph=True`, too, and of the Engine; all with AdamW, bf16 computation and float32 masters,
  and seconds to the end of the first step;
- host: the same of a small model, whose kernels are short, without what is compiled;
- simulation: milliseconds and the peak that `fzero.simulate` gives for the large model's step;
- offload: a step with masters and optimizer state in pinned host memory beside one without.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fzero
from benchmarks.allocations import measure
from benchmarks.memory import one_rank_of
from benchmarks.models import GPT, Batch, Size, batch_of, fzero_step
from fzero.distributed.dtensor import local_tensor
from fzero.simulation import HARDWARE
from fzero.tree import leaves

TOY = Size(vocabulary=64, width=32, layers=2, heads=4, tokens=16, rows=2)
SMALL = Size(vocabulary=1024, width=256, layers=4, heads=4, tokens=128, rows=4)
LARGE = Size(vocabulary=24576, width=1024, layers=24, heads=16, tokens=1024, rows=8)  # 353M

Row = dict[str, Any]


class Bench:
    """What all parts share.

    Args:
        device: "cuda" or "cpu".
        small: of the model whose results and memory are looked at.
        large: of the model whose speed is.
        rounds: measured steps.
    """

    def __init__(self, device: str, small: Size, large: Size, rounds: int) -> None:
        self.device, self.small, self.large, self.rounds = device, small, large, rounds
        self.cuda = device == "cuda"

    # -------------------------------------------------------------------------------- results
    def results(self) -> list[Row]:
        """One row per stage, on CUDA another as CUDA graphs, and one of the Engine."""
        wanted = self._plain_params()
        rows = []
        for cuda_graph, stage in itertools.product((False, True)[: 1 + self.cuda], (0, 1, 2, 3)):
            cfg = fzero.Config(stage, cuda_graph=cuda_graph)
            with torch.device(self.device):
                batch = self._batch(self.small)
                step = fzero_step(self.small, batch, fzero.optim.sgd(0.1), cfg)
            for _ in range(3):
                step()
            name = f"stage {stage}, CUDA graph" if cuda_graph else f"stage {stage}"
            row = self._compared(name, fzero.unshard(step.params), wanted)
            if cuda_graph:  # or why it could not be captured
                row["log"] = [x for x in step.lower().log if x.startswith("CUDA graph")]
            rows.append(row)
        module = self._module(self.small)
        engine: Any = fzero.Engine(module, fzero.optim.sgd(0.1), fzero.Config(stage=3))
        for _ in range(3):
            engine.backward(engine(*self._batch(self.small)))
            engine.step()
        rows.append(self._compared("Engine, stage 3", engine.full_params(), wanted))
        return rows

    def _plain_params(self) -> dict[str, torch.Tensor]:
        module = self._module(self.small)
        opt = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(3):
            module(*self._batch(self.small)).backward()
            opt.step()
            opt.zero_grad()
        return dict(module.state_dict())

    def _compared(self, name: str, found: Any, wanted: dict[str, torch.Tensor]) -> Row:
        off = max(float((found[k] - x).abs().max()) for k, x in wanted.items())
        return {"name": name, "largest difference": off, "ok": off < 1e-4}

    def _module(self, size: Size) -> GPT:
        torch.manual_seed(0)
        with torch.device(self.device):
            return GPT(size)

    def _batch(self, size: Size) -> Batch:
        torch.manual_seed(7)
        with torch.device(self.device):
            return batch_of(size, size.rows)

    # --------------------------------------------------------------------------------- memory
    def memory(self) -> list[Row]:
        """One row per stage, as one rank of 8; the process group is gone by then."""
        rows = []
        for stage in (0, 1, 2, 3):
            with one_rank_of(8):
                peak, step = self._peak(lambda stage=stage: self._adamw(self.small, stage=stage))
                predicted = step.lower().peak_bytes()
            off = peak / predicted - 1
            row: Row = {"stage": stage, "world": 8, "peak": peak, "predicted": predicted}
            if self.cuda:
                row |= {"reserved": torch.cuda.memory_reserved()}
            row |= {"predicted reserved": step.lower().reserved_bytes()}
            rows.append(row | {"off": off})
            del step
        return rows

    def _adamw(self, size: Size, eps: float = 1e-8, **config: Any) -> Any:
        with torch.device(self.device):
            batch = self._batch(size)
            opt = fzero.optim.adamw(1e-3, eps=eps, weight_decay=0.01)
            return fzero_step(size, batch, opt, fzero.Config(**config))

    def _peak(self, build: Callable[[], Any]) -> tuple[int, Any]:
        """Most bytes that are allocated during a second step, and the step."""
        if not self.cuda:
            held, step = measure(build)
            return held.peak, step
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        step = build()
        step()
        self._sync()
        torch.cuda.reset_peak_memory_stats()
        step()
        self._sync()
        return torch.cuda.max_memory_allocated() - before, step

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    # ---------------------------------------------------------------------------------- speed
    def speed(self) -> list[Row]:
        """One row per way to run a step of the large model; what can't be had says why."""
        size = self.large
        ways = self._ways(size) | {
            "FSDP2, compiled": lambda: self._fsdp_step(size, compiled=True),
            "fzero, inductor": lambda: self._adamw(size, precision="bf16", executor="inductor"),
        }
        if self.cuda:
            ways["fzero, inductor, CUDA graph"] = lambda: self._adamw(
                size, precision="bf16", executor="inductor", cuda_graph=True
            )
        return self._raced(ways, size)

    def host(self) -> list[Row]:
        """The same of the small model, whose kernels are short: what the host needs for a step."""
        return self._raced(self._ways(self.small), self.small)

    def _ways(self, size: Size) -> dict[str, Callable[[], Any]]:
        ways: dict[str, Callable[[], Any]] = {
            "plain PyTorch, autocast": lambda: self._plain_step(size),
            "FSDP2": lambda: self._fsdp_step(size),
            "fzero, generated": lambda: self._adamw(size, precision="bf16"),
            "fzero, generated, flat": lambda: self._adamw(size, precision="bf16", layout="flat"),
            "fzero, Engine": lambda: self._engine_step(size),
        }
        if self.cuda:
            ways["fzero, generated, CUDA graph"] = lambda: self._adamw(
                size, precision="bf16", cuda_graph=True
            )
        return ways

    def _raced(self, ways: dict[str, Callable[[], Any]], size: Size) -> list[Row]:
        rows = []
        for name, build in ways.items():
            try:
                rows.append({"name": name, **self._timed(build, size)})
            except Exception as error:  # a peer that this torch or machine lacks
                rows.append({"name": name, "error": _first_line(error)})
            if self.cuda:
                torch.cuda.empty_cache()
        return rows

    def simulation(self) -> list[Row]:
        """What `fzero.simulate` says of the large model's step on this device, if it knows it."""
        known = [name for name in HARDWARE if name.upper() in torch.cuda.get_device_name().upper()]
        if not known:
            return []
        with torch.device("meta"):
            apply, params = fzero.functionalize(GPT(self.large))
            batch = batch_of(self.large, self.large.rows)
        report = fzero.simulate(
            lambda params, batch: apply(params, *batch),
            fzero.optim.adamw(1e-3, weight_decay=0.01),
            fzero.Config(precision="bf16"),
            params,
            batch,
            1,
            known[0],
        )
        return [{"name": known[0], "ms": report.seconds * 1e3, "peak": report.peak_bytes}]

    def _timed(self, build: Callable[[], Any], size: Size) -> Row:
        gc.collect()  # of the way before, whose hooks hold it in a circle
        if self.cuda:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        step = build()
        start = time.perf_counter()
        step()
        self._sync()
        first = time.perf_counter() - start
        step()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(self.rounds):
            self._sync()
            start = time.perf_counter()
            step()
            self._sync()
            times.append(time.perf_counter() - start)
        middle = statistics.median(times)
        tokens = size.rows * size.tokens
        row = {"ms": middle * 1e3, "tokens per second": tokens / middle, "first step s": first}
        if self.cuda:
            row["peak"] = torch.cuda.max_memory_allocated() - before
        return row

    def _plain_step(self, size: Size) -> Callable[[], None]:
        module = self._module(size)
        opt = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        batch = self._batch(size)

        def step() -> None:
            with torch.autocast(self.device, dtype=torch.bfloat16):
                loss = module(*batch)
            loss.backward()
            opt.step()
            opt.zero_grad()

        return step

    def _engine_step(self, size: Size) -> Callable[[], None]:
        opt = fzero.optim.adamw(1e-3, weight_decay=0.01)
        engine: Any = fzero.Engine(self._module(size), opt, fzero.Config(3, precision="bf16"))
        batch = self._batch(size)

        def step() -> None:
            engine(*batch).backward()
            engine.step()

        return step

    def _fsdp_step(self, size: Size, *, compiled: bool = False) -> Callable[[], None]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        module: nn.Module = self._module(size)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in module.blocks:  # pyright: ignore
            if compiled:
                block.compile()
            fully_shard(block, mp_policy=policy)
        fully_shard(module, mp_policy=policy)
        opt = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        batch = self._batch(size)

        def step() -> None:
            module(*batch).backward()
            opt.step()
            opt.zero_grad()

        return step

    # -------------------------------------------------------------------------------- offload
    def offload(self) -> list[Row]:
        """Two rows: with and without."""
        rows, finals = [], []
        for where in (None, "cpu"):
            peak, step = self._peak(
                # a bias of keys has no gradient but noise, of which AdamW would make whole steps
                lambda where=where: self._adamw(
                    self.small, eps=1e-4, precision="bf16", offload=where
                )
            )
            start = time.perf_counter()
            step()
            self._sync()
            row: Row = {"offload": where, "peak": peak, "ms": (time.perf_counter() - start) * 1e3}
            state = leaves((step.opt_state.master, step.opt_state.inner))
            # a CPU keeps no masters beside float32 parameters; moments are there in any case
            held = [x for x in map(local_tensor, state) if x.dim()]
            row["state on"] = str(held[0].device)
            row["pinned"] = self.cuda and all(x.is_pinned() for x in held)
            finals.append(fzero.unshard(step.params))
            rows.append(row)
        # relative to a weight, and to 2**-5 for smaller ones: a step of bfloat16 is up to 2**-7
        off = max(
            float(((finals[0][k] - x).abs() / x.abs().clamp(min=2**-5)).max())
            for k, x in finals[1].items()
        )
        rows[-1]["largest difference, relative"] = off
        rows[-1]["ok"] = off <= 2**-7 and (not self.cuda or rows[-1]["pinned"])
        return rows


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:300]}"


def run(bench: Bench, budget: float) -> Row:
    """All parts, within `budget` seconds."""
    start = time.perf_counter()
    device = torch.cuda.get_device_name() if bench.cuda else "cpu"
    found: Row = {"device": device, "torch": torch.__version__, "failed": []}

    def part(name: str, fn: Callable[[], Any]) -> None:
        spent = time.perf_counter() - start
        if spent > budget:
            found[name] = f"left out: {budget:.0f} s were over"
            return
        try:
            found[name] = fn()
            if any(row.get("ok") is False for row in found[name]):
                found["failed"].append(name)
        except Exception as error:  # the others may run
            traceback.print_exc()
            found[name] = _first_line(error)
            found["failed"].append(name)
        print(f"{name}: {time.perf_counter() - start - spent:.1f} s", file=sys.stderr, flush=True)

    dist.init_process_group(
        "nccl" if bench.cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        part("results", bench.results)
        part("speed", bench.speed)
        part("host", bench.host)
        if bench.cuda:
            part("simulation", bench.simulation)
        part("offload", bench.offload)
    finally:
        dist.destroy_process_group()
    part("memory", bench.memory)
    found["seconds"] = time.perf_counter() - start
    return found


def plot(found: Row, path: Path) -> None:
    """Milliseconds of each way to run a step, and predicted against measured peaks."""
    from fzero.program.plot import new_figure

    figure = new_figure(11, 4)
    left, right = figure.subplots(1, 2)
    speed = [row for row in found["speed"] if "ms" in row] if _rows(found, "speed") else []
    left.barh([row["name"] for row in speed][::-1], [row["ms"] for row in speed][::-1])
    left.set_xlabel("ms per step")
    rows = found["memory"] if _rows(found, "memory") else []
    for offset, key in ((-0.2, "predicted"), (0.2, "peak")):
        at = [row["stage"] + offset for row in rows]
        right.bar(at, [row[key] / 2**20 for row in rows], 0.4, label=key)
    right.set_xlabel("stage, one rank of 8")
    right.set_ylabel("MiB")
    right.legend()
    figure.suptitle(f"{found['device']}, torch {found['torch']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def _rows(found: Row, name: str) -> bool:
    return isinstance(found.get(name), list)


def main(argv: list[str] | None = None) -> int:
    """Run it all; 0 if nothing failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--toy", action="store_true", help="toy sizes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=480, help="when no part starts any more")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu --toy runs the same on a CPU")
    sizes = (TOY, TOY) if args.toy else (SMALL, LARGE)
    found = run(Bench(args.device, *sizes, args.rounds), args.seconds)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(found, indent=1))
    try:
        plot(found, args.out / "gpu.png")
    except fzero.FzeroError as error:  # no matplotlib
        print(error, file=sys.stderr)
    print(json.dumps(found, indent=1))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
