"""A pass of your own: parameters travel as 8-bit integers, a quarter of float32's bytes.

torchrun --nproc_per_node 2 examples/write_a_pass.py
torchrun --nproc_per_node 2 examples/write_a_pass.py --precision bf16    # half of bfloat16's

At stage 3 every rank gathers each leaf twice a step, before forward and before backward. ZeRO++
(Wang et al., arXiv:2306.10209, section 3.1) sends blocks of int8 with a scale each instead. Here
that is one function from a Program to a Program; shards, their gradients and the optimizer stay as
they are. Unlike there, a block lies in a row of the leaf, so that leaves split over any number of
ranks have the same blocks.
"""

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fzero
from fzero.passes import Axis, LeafLayout

cli = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
cli.add_argument("--steps", type=int, default=200)
cli.add_argument("--batch", type=int, default=64, help="digits of a rank")
cli.add_argument("--width", type=int, default=512, help="of the hidden layers")
cli.add_argument("--block", type=int, default=128, help="numbers that share a scale")
cli.add_argument("--precision", choices=["bf16"])
cli.add_argument("--seed", type=int, default=0)
cli.add_argument("--out", type=Path, default=Path("runs/write_a_pass"))
args = cli.parse_args()
rank, world = (int(os.environ.get(name, d)) for name, d in [("RANK", 0), ("WORLD_SIZE", 1)])


# ---- the pass ----
def quantised(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Rows as int8, and the scale of each block: `rows` is nearest to `int8 * scale`.

    Args:
        rows: (n, columns), floating.

    Returns:
        (n, blocks, block) int8 and (n, blocks, 1) float32; zeros fill the last block up.
    """
    n, columns = rows.shape
    filled = nn.functional.pad(rows.float(), (0, -columns % block)).view(n, -1, block)
    scales = filled.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (filled / scales).round().to(torch.int8), scales


def gathered(shard: Tensor, leaf: LeafLayout, axis: Axis, block: int) -> Tensor:
    """The full leaf from every rank's shard, nearly."""
    assert leaf.dim is not None
    columns = leaf.numel // leaf.shape[leaf.dim]
    small, scales = quantised(shard.movedim(leaf.dim, 0).flatten(1), min(block, columns))
    rows, *rest = (leaf.shape[leaf.dim], *leaf.shape[: leaf.dim], *leaf.shape[leaf.dim + 1 :])
    full = [
        fzero.passes.gather(x, replace(leaf, shape=(rows, *x.shape[1:]), dim=0), axis)
        for x in (small, scales)
    ]
    x = (full[0] * full[1]).flatten(1)[:, :columns]
    return x.view(rows, *rest).movedim(0, leaf.dim).to(shard.dtype)


@dataclass(frozen=True)
class Int8Gather:
    """The pass. A frozen dataclass: ranks compare its fields."""

    block: int = 128

    def __call__(self, program: fzero.Program) -> fzero.Program:
        graph, done = fzero.passes.copy_graph(program.graph), 0
        for node in filter(fzero.passes.is_gather, list(graph.nodes)):
            leaf, axis = fzero.passes.leaf_and_axis(node)
            columns = leaf.numel // leaf.shape[leaf.dim or 0]
            if not leaf.dtype.is_floating_point or columns < 32:
                continue  # biases: a scale for each number would be more than there is to save
            with graph.inserting_before(node):
                new = fzero.passes.inline(graph, gathered, node.args[0], leaf, axis, self.block)
            fzero.passes.replace_value(node, new)
            done += 1
        return program.logged(graph, f"int8 gather: {done} gathers, blocks of {self.block}")


# ---- what it is tried on: digits of 8x8 pixels ----
digits: Any = load_digits()
pixels, labels = torch.tensor(digits.data / 8 - 1).float(), torch.tensor(digits.target)
torch.manual_seed(args.seed)
across = [nn.Linear(64, args.width), nn.GELU(), nn.Linear(args.width, args.width), nn.GELU()]
apply, start = fzero.functionalize(nn.Sequential(*across, nn.Linear(args.width, 10)))


def model_fn(params: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
    """The loss, and the weights that this step has seen."""
    loss = nn.functional.cross_entropy(apply(params, batch[0]).float(), batch[1])
    return loss, {name: x for name, x in params.items() if x.dim() > 1}


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """This rank's digits."""
    draws = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    chosen = torch.randint(len(pixels), (world, args.batch), generator=draws)[rank]
    return pixels[chosen], labels[chosen]


def train(step_fn: fzero.TrainStep) -> dict[str, Any]:
    """A whole training, and what it sent."""
    params, opt_state = step_fn.init(start)
    rows = step_fn.lower(params, opt_state, batch_of(0)).collectives()
    losses, error = [], 0.0
    for step in range(args.steps):
        before = fzero.unshard(params) if step == 0 else {}
        params, opt_state = step_fn(params, opt_state, batch_of(step))
        losses.append(opt_state.metrics["loss"])
        for name, seen in opt_state.metrics["aux"].items() if step == 0 else ():
            seen, exact = seen[0] if seen.dim() > before[name].dim() else seen, before[name]
            error = max(error, float((seen - exact).norm() / exact.norm()))
    full = fzero.unshard(params)
    right = (apply(full, pixels.to(next(iter(full.values())).dtype)).argmax(-1) == labels).float()
    return {
        "gathered": sum(row.bytes for row in rows if row.kind == "all_gather"),
        "sent": sum(row.wire_bytes for row in rows),
        "error": error,
        "loss": [float(x) for x in losses],
        "accuracy": float(right.mean()),
    }


cfg = fzero.Config(stage=3, precision=args.precision, has_aux=True)
plain = fzero.make_train_step(model_fn, fzero.optim.adamw(1e-3), cfg)
results = {"as it is": train(plain), "int8": train(plain.with_pass(Int8Gather(args.block)))}
if rank == 0:
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results))
    print(f"{'':10}{'gathered':>12}{'error':>10}{'last loss':>12}{'accuracy':>10}")
    for name, found in results.items():
        last = sum(found["loss"][-10:]) / len(found["loss"][-10:])
        print(
            f"{name:10}{found['gathered']:>10,} B{found['error']:>10.2%}"
            f"{last:>12.4f}{found['accuracy']:>10.1%}"
        )
    if world == 1:
        print("one rank gathers nothing: use torchrun")
