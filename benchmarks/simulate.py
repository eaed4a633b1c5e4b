"""What `fzero.simulate` says, beside what others measured.

    python -m benchmarks.simulate                    # all published runs
    python -m benchmarks.simulate --runs 0 3         # some of them

Runs of torchtitan with FSDP2 alone, as its repository publishes them: docs/performance.md (64 A100
80GB, 8,192 tokens a sequence with Llama 3 and 4,096 with Llama 2) and
benchmarks/llama3_h100_202412_torchtitan.md (H100 with 96 GB of HBM2e at 2.4 TB/s, limited to 500
W); memory with one row is from its pull request 996. Parameters travel in bfloat16, gradients are
reduced in float32. Memory there is what the caching allocator has reserved. Columns: GiB and
tokens/s of a device, measured and simulated; of memory what tensors take, what the allocator makes
of that, and the same with what they keep and a Program does not: the logits in bfloat16, and the
output of each layer's last product, which backward does not read.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import fzero
from fzero.program.machines import HARDWARE
from fzero.simulation.layers import simulate_layers
from fzero.simulation.models import MODELS, Shape, build

GIB = 2**30

# At 500 W instead of 700 its clocks fall: eight tenths of what the preset reaches are assumed.
_h100 = HARDWARE["h100"]
TETON = replace(
    _h100,
    name="H100 96GB, 500 W",
    memory=96 * 10**9,
    memory_bandwidth=0.85 * 2.4e12,
    low_flops=0.8 * (_h100.low_flops or 0),
    attention_flops=0.8 * (_h100.attention_flops or 0),
)
LLAMA2_13B = Shape(40, 5120, 40, 40, 13824, 32000, 4096)
LLAMA2_70B = Shape(80, 8192, 64, 8, 28672, 32000, 4096)


class Run(NamedTuple):
    """A published run.

    Args:
        name: of the model.
        shape: the model's.
        rows: sequences of a rank.
        again: what was recomputed: "none", "full", or "op": all but attention and every second
            product.
        world: ranks.
        hardware: that they were.
        speed: tokens/s of a device, if it was published.
        gib: of memory reserved on a device, if that was.
    """

    name: str
    shape: Shape
    rows: int
    again: str
    world: int
    hardware: fzero.Hardware
    speed: float | None
    gib: float | None = None

    @property
    def kept_besides(self) -> int:
        """Bytes that torchtitan keeps to the end of forward and a Program gives up."""
        tokens = self.rows * self.shape.sequence
        outputs = self.shape.layers * self.shape.width if self.again == "op" else 0
        return 2 * tokens * (self.shape.vocab + outputs)


RUNS = [
    Run("Llama 3 8B", MODELS["llama3-8b"], 2, "op", 8, TETON, 5762, 82.4),
    Run("Llama 3 8B", MODELS["llama3-8b"], 2, "op", 128, TETON, 5605, 67.0),
    Run("Llama 3 8B", MODELS["llama3-8b"], 1, "op", 8, TETON, None, 49.58),
    Run("Llama 3 8B", MODELS["llama3-8b"], 1, "op", 64, HARDWARE["a100"], 2973),
    Run("Llama 3 70B", MODELS["llama3-70b"], 1, "full", 64, HARDWARE["a100"], 331),
    Run("Llama 2 13B", LLAMA2_13B, 2, "none", 64, HARDWARE["a100"], 2162),
    Run("Llama 2 70B", LLAMA2_70B, 2, "full", 64, HARDWARE["a100"], 353),
]


def every_second_product() -> Callable[[Any], bool]:
    """torchtitan's selective checkpointing by operator: of each layer's seven products, the first,
    third, fifth and seventh are kept, and attention."""
    seen = itertools.count()
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def keeps(operator: Any) -> bool:
        if operator is torch.ops.aten.mm.default:
            return next(seen) % 7 % 2 == 0
        return operator is attention

    return keeps


def simulated(run: Run) -> fzero.Report:
    """What `fzero` would need for the same step."""
    low, wide = torch.bfloat16, torch.float32
    cfg = fzero.Config(
        stage=3, clip_norm=1.0, precision=fzero.Precision(param=low, reduce=wide, master=wide)
    )

    def make(layers: int) -> Any:
        policy = every_second_product() if run.again == "op" else None
        again = run.again != "none"
        return build(run.shape, run.rows, layers=layers, policy=policy, again=again)

    opt = fzero.optim.adamw(3e-4, weight_decay=0.1)
    if run.gib is None:
        return simulate_layers(make, run.shape.layers, opt, cfg, run.world, run.hardware)
    # where the allocator's gaps are asked for, all layers have to be there
    model_fn, params, batch = make(run.shape.layers)
    return fzero.simulate(model_fn, opt, cfg, params, batch, run.world, run.hardware)


def main() -> None:
    """Print one row for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", type=int, default=list(range(len(RUNS))))
    args = parser.parse_args()
    columns = ["model", "ranks", "rows", "computed again", "GiB", "tensors", "reserved"]
    columns += ["with what they keep", "off", "tokens/s", "simulated", "off", "seconds to simulate"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for run in [RUNS[i] for i in args.runs]:
        start = time.process_time()
        report = simulated(run)
        spent = time.process_time() - start
        cells = [run.name, f"{run.world} x {run.hardware.name}", str(run.rows), run.again]
        cells += [str(run.gib or ""), f"{report.peak_bytes / GIB:.1f}", *_memory(run, report)]
        speed = report.tokens_per_second / run.world
        cells += [f"{run.speed or 0:,.0f}", f"{speed:,.0f}", _off(speed, run.speed)]
        print("| " + " | ".join([*cells, f"{spent:.0f}"]) + " |", flush=True)


def _memory(run: Run, report: fzero.Report) -> list[str]:
    if report.reserved_bytes is None:
        return ["", "", ""]
    kept = report.reserved_bytes + run.kept_besides
    return [f"{x / GIB:.1f}" for x in (report.reserved_bytes, kept)] + [_off(kept / GIB, run.gib)]


def _off(found: float, published: float | None) -> str:
    return f"{found / published - 1:+.0%}" if published else ""


if __name__ == "__main__":
    main()
