"""Small functions as Programs, before any pass or after all."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import zero
from fzero.distributed.mesh import Axes, Axis, resolve_mesh
from fzero.layout import Layout, plan_layout
from fzero.layout.flats import plan_flats
from fzero.program import Program
from fzero.program.trace import trace_program

Leaves = tuple[Tensor, ...]


def mlp_leaves(widths: Sequence[int], seed: int = 0) -> tuple[list[str], list[Tensor]]:
    """A weight and a bias for each pair of widths."""
    generator = torch.Generator().manual_seed(seed)
    names, leaves = [], []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        names += [f"{i}.weight", f"{i}.bias"]
        leaves += [torch.randn(fan_out, fan_in, generator=generator) / fan_in**0.5]
        leaves += [torch.randn(fan_out, generator=generator)]
    return names, leaves


def mlp_loss(leaves: Leaves, x: Tensor, *, dropout: float = 0.0) -> tuple[Tensor, Leaves]:
    """Mean square of the MLP's output; something is changed in place on the way."""
    for weight, bias in zip(leaves[::2], leaves[1::2], strict=True):
        x = torch.tanh(F.linear(x, weight, bias).mul_(1.5))
        if dropout:
            x = F.dropout(x, dropout)
    return x.square().mean(), ()


class Recorded:
    """The stage-3 gradient function of an MLP on this rank, as it was recorded."""

    def __init__(
        self, widths: Sequence[int], *, rows: int = 3, dropout: float = 0.0, flat: bool = False
    ) -> None:
        names, full = mlp_leaves(widths)
        mesh = resolve_mesh(None, "cpu")
        self.layout: Layout = plan_layout(names, full, mesh.world_size)
        if flat:
            self.layout = plan_flats(self.layout, 2**20)
        axes = Axes(Axis(mesh.shard_group, mesh.shard_size, mesh.shard_rank))
        generator = torch.Generator().manual_seed(1 + mesh.rank)
        batch = torch.randn(rows, widths[0], generator=generator)
        shards = [
            leaf.split(x, mesh.shard_rank).contiguous()
            for x, leaf in zip(full, self.layout, strict=True)
        ]

        def loss_fn(leaves: Leaves, x: Tensor) -> tuple[Tensor, Any]:
            return mlp_loss(leaves, x, dropout=dropout)

        def flat_fn(*flat: Tensor) -> Leaves:
            grads_of = zero.zero3(zero.scaled(loss_fn, 1.0), self.layout, axes)
            grads, (_, (loss, _)) = grads_of(flat[:-1], (), flat[-1])
            return (*[grad.contiguous() for grad in grads], loss)

        self.inputs = [*shards, batch]
        self.program: Program = trace_program(
            "gradients", [("torch.func", flat_fn)], self.inputs, [*names, "batch"]
        )


def chain_loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Mean square of a chain of layers."""
    for w in p.values():
        x = torch.tanh(x @ w)
    return x.square().mean()


def settled_by_ranks(
    field: str, layers: int, bucket_mb: float, rank: int
) -> tuple[tuple[int, ...], list[float]]:
    """A field of the Program of three steps, and their losses, where one rank has small batches."""
    params = {f"w{i:02d}": torch.eye(32, dtype=torch.float64) for i in range(layers)}
    cfg = fzero.Config(stage=3, bucket_mb=bucket_mb)
    step_fn = fzero.make_train_step(chain_loss, fzero.optim.sgd(0.1), cfg)
    state = step_fn.init(params)
    losses = []
    for number in range(3):
        # one rank has room where the other has none
        rows = 2 if torch.distributed.get_rank() == rank else 600
        state = step_fn(*state, torch.full((rows, 32), 0.1 * (number + 1), dtype=torch.float64))
        losses.append(state[1].metrics["loss"].item())
    part = next(iter(step_fn._executors._traced))[1].program
    return getattr(part, field), losses
