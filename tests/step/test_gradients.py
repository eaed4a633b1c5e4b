"""A step's gradients are those of `value_and_grad`, bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fzero
from fzero import tree
from fzero.optim.base import Optimizer
from tests.ranks import run_ranks

SHAPES = {"up": (7, 15), "gain": (), "out": (15, 5), "bias": (5,)}


def _loss(p: Any, x: Tensor, dropout: float) -> Tensor:
    h = nn.functional.dropout(torch.tanh(x.to(p["up"].dtype) @ p["up"]), dropout)
    return ((h @ p["out"] + p["bias"]).square().mean() * p["gain"].exp()).sin()


def _keeps_gradients() -> Optimizer:
    """Changes nothing; its state is the gradients that it was given."""
    return fzero.optim.as_optimizer(
        Optimizer(
            init=lambda params: tree.map(lambda x: torch.zeros_like(x, dtype=_wide(x)), params),
            update=lambda grads, *_, **__: (tree.map(torch.zeros_like, grads), grads),
        )
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _both(stage: int, options: dict[str, Any], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Losses and gradients of a step, beside those of `value_and_grad`, as full tensors."""
    cfg = fzero.Config(stage=stage, frozen=["bias"], bucket_mb=0.0003, **options)
    # how masks are numbered depends on how often a Program has the model function in it
    dropout = 0.0 if cfg.accum_steps > 1 else 0.3
    generator = torch.Generator().manual_seed(1)
    full = {k: torch.randn(s, generator=generator, dtype=dtype) / 3 for k, s in SHAPES.items()}
    rows = torch.randn(dist.get_world_size(), 4, 7, generator=generator, dtype=dtype)
    batch = rows[dist.get_rank()]
    step_fn = fzero.make_train_step(lambda p, x: _loss(p, x, dropout), _keeps_gradients(), cfg)
    params, opt_state = step_fn.init(full)
    loss, grads = fzero.value_and_grad(lambda p, x: _loss(p, x, dropout), cfg)(params, batch)
    _, opt_state = step_fn(params, opt_state, batch)
    found = zip(tree.leaves(opt_state.inner), tree.leaves(grads), strict=True)
    return [(opt_state.metrics["loss"], loss), *((_full(a), _full(b)) for a, b in found)]


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("options", [{}, {"accum_steps": 2}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_steps_gradients_are_those_of_value_and_grad(
    stage: int, options: dict[str, Any], world: int
) -> None:
    dtype = torch.float32 if "precision" in options else torch.float64
    for rank in run_ranks(world, _both, stage, options, dtype):
        for ours, theirs in rank:
            assert torch.count_nonzero(theirs)
            # a sum over ranks once a step, and not once a micro-batch, rounds in another order
            once = stage < 2 and "accum_steps" in options
            torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-12 * once, atol=0)
