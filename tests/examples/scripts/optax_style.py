"""A loop in the habit of JAX: pure functions, a transform and an update of one's own, one `jit`."""

import json
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fzero

STEPS = 5


class CenteredState(NamedTuple):
    """As an optax transform would keep it."""

    mean: Any
    square: Any


def scale_by_centered_rms(decay=0.9, eps=1e-3):
    """Gradients over the root of their variance: a transform that nobody ships."""

    def init(params):
        zeros = fzero.tree_map(torch.zeros_like, params)
        return CenteredState(zeros, fzero.tree_map(torch.zeros_like, params))

    def update(grads, state, params=None):
        mean = fzero.tree_map(lambda m, g: decay * m + (1 - decay) * g, state.mean, grads)
        square = fzero.tree_map(lambda s, g: decay * s + (1 - decay) * g * g, state.square, grads)
        out = fzero.tree_map(
            lambda g, m, s: g / ((s - m * m).clamp(min=0).sqrt() + eps), grads, mean, square
        )
        return out, CenteredState(mean, square)

    return fzero.optim.Optimizer(init, update)


def init_params(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {"in": {"w": normal(6, 9), "b": normal(9)}, "out": [normal(9, 3), normal(3)]}


def loss_fn(params, batch):
    x, y = batch
    h = torch.tanh(x @ params["in"]["w"] + params["in"]["b"])
    w, b = params["out"]
    return (h @ w + b - y).square().mean()


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :3].sin()


def main(out, stage):
    cfg = fzero.Config(stage=stage)
    opt = fzero.optim.chain(
        fzero.optim.clip_by_global_norm(0.7),
        scale_by_centered_rms(),
        fzero.optim.scale(-0.02),
    )
    params = fzero.shard(init_params(), cfg)
    state, ema = opt.init(params), fzero.tree_map(torch.clone, params)
    gradients = fzero.value_and_grad(loss_fn, cfg)

    def train_step(params, state, ema, batch):
        loss, grads = gradients(params, batch)
        updates, state = opt.update(grads, state, params)
        # an update of one's own: what points away from the average goes half as far
        away = fzero.tree_vdot(updates, fzero.tree_map(torch.sub, params, ema))
        factor = torch.where(away > 0, 0.5, 1.0)
        params = fzero.apply_updates(params, fzero.tree_map(lambda u: factor * u, updates))
        ema = fzero.tree_map(lambda e, p: 0.8 * e + 0.2 * p, ema, params)
        return params, state, ema, loss, fzero.tree_norm(grads)

    run = fzero.jit(train_step, cfg, donate_argnums=(0, 1, 2))
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses, norms = [], []
    for step in range(STEPS):
        params, state, ema, loss, norm = run(params, state, ema, batch_of(step, rank))
        losses.append(loss.item())
        norms.append(norm.item())
    full = fzero.unshard({"params": params, "ema": ema})
    if rank == 0:
        torch.save(full, f"{out}/full.pt")
        with open(f"{out}/seen.json", "w") as file:
            json.dump({"loss": losses, "norm": norms}, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
