"""Mixed precision by hand, in one process: what ranks that shard must come to.

It shares no code with the library: master weights in float32, a low copy of them for forward and
backward, gradients of all ranks added up in float32, a loss scale by its own rule, torch's SGD.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.numerics.test_loss_scale import Model as ScaleRule

ROWS, WIDTH, HIDDEN = 4, 6, 9
STEPS, LR, MOMENTUM = 20, 0.125, 0.9
Params = dict[str, Tensor]


def start() -> Params:
    """Leaves that two ranks split evenly, unevenly and not at all."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"bias": (HIDDEN,), "down": (HIDDEN, 3), "gain": (), "up": (WIDTH, HIDDEN)}
    return {k: torch.randn(shape, generator=generator) / 2 for k, shape in shapes.items()}


def loss_of(params: Params, x: Tensor) -> Tensor:
    """A loss in the dtype of the parameters."""
    x = x.to(params["up"].dtype)
    hidden = torch.tanh(x @ params["up"] + params["bias"]) * params["gain"]
    return (hidden @ params["down"] - x[:, :3]).square().mean()


def batch(step: int, rank: int, micro: int, poisoned: bool) -> Tensor:
    """One micro-batch; a poisoned one has an infinite number."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    if poisoned:
        x[1, 2] = torch.inf
    return x


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        dtype: that the model computes in.
        accum: micro-batches per step.
        scale: fields of the loss scale, or None.
        poison: by step, the rank whose batch is infinite.
    """

    dtype: torch.dtype
    accum: int = 1
    scale: Any = None
    poison: dict[int, int] = field(default_factory=dict)

    def batches(self, step: int, rank: int) -> list[Tensor]:
        """What one rank gets in one step."""
        poisoned = self.poison.get(step) == rank
        return [batch(step, rank, m, poisoned and m == 0) for m in range(self.accum)]


@dataclass
class Trained:
    """What training left.

    Args:
        masters: by name.
        scales: the loss scale of every step.
        skipped: whether each step was.
        losses, norms: of every step.
    """

    masters: Params
    scales: list[float]
    skipped: list[bool]
    losses: list[float]
    norms: list[float]


def train(case: Case, world: int, *, ranks_first: bool, mean_last: bool = False) -> Trained:
    """Training by hand.

    Args:
        ranks_first: add up over ranks in every micro-batch, or once for their sums. In float32 that
            is not the same.
        mean_last: divide the sum of gradients, instead of each loss. In float16 that is not the
            same: larger numbers overflow earlier, and vanish later.
    """
    masters = {name: x.clone() for name, x in start().items()}
    sgd = torch.optim.SGD(masters.values(), LR, MOMENTUM, foreach=False)
    rule = ScaleRule(case.scale) if case.scale else None
    trained = Trained(masters, [], [], [], [])
    for step in range(STEPS):
        scale = rule.scale if rule else 1.0
        by_rank = [case.batches(step, rank) for rank in range(world)]
        share = 1 / (world * case.accum)
        factor = scale if mean_last else scale * share
        grads = [[gradients(case, masters, x, factor) for x in micro] for micro in by_rank]
        if ranks_first:
            summed = _sum([_sum(column) for column in zip(*grads, strict=True)])
        else:
            summed = _sum([_sum(micro) for micro in grads])
        total = [grad * (share if mean_last else 1.0) / scale for grad in summed]
        before = {name: x.clone() for name, x in masters.items()}
        finite = all(bool(grad.isfinite().all()) for grad in total)
        if finite:
            for p, grad in zip(masters.values(), total, strict=True):
                p.grad = grad
            sgd.step()
        low = {name: x.detach().to(case.dtype) for name, x in before.items()}
        losses = [loss_of(low, x) for micro in by_rank for x in micro]
        norm = torch.stack([g.double().square().sum() for g in total]).sum().sqrt()
        trained.scales.append(scale)
        trained.skipped.append(not finite)
        trained.losses.append(torch.stack(losses).double().mean().item())
        trained.norms.append(norm.item())
        if rule:
            rule.step(finite)
    return trained


def gradients(case: Case, masters: Params, x: Tensor, factor: float) -> list[Tensor]:
    """Gradients of one micro-batch's loss times a factor, in float32."""
    low = {k: m.detach().to(case.dtype).requires_grad_() for k, m in masters.items()}
    (loss_of(low, x).float() * factor).backward()
    return [grad.float() for p in low.values() if (grad := p.grad) is not None]


def _sum(terms: Sequence[list[Tensor]]) -> list[Tensor]:
    """Sums from left to right."""
    total = terms[0]
    for term in terms[1:]:
        total = [a + b for a, b in zip(total, term, strict=True)]
    return total
