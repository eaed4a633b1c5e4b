"""The shapes of known models have as many parameters as their authors say, and train."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fzero
from fzero.simulation.models import MODELS, REMAT, build, resolve_model


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.1244), ("gpt2-medium", 0.355), ("gpt2-large", 0.774), ("gpt2-xl", 1.558),
        ("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85),
        ("qwen3-30b-a3b", 30.53), ("qwen3-235b-a22b", 235.09),
    ],
)  # fmt: skip
def test_presets_have_the_parameters_that_were_published(name: str, billions: float) -> None:
    _, params, _ = build(MODELS[name], 1)
    assert {x.device.type for x in params.values()} == {"meta"}
    assert sum(x.numel() for x in params.values()) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("remat", REMAT)
def test_small_ones_compute_a_loss(name: str, remat: str) -> None:
    shape = replace(MODELS[name], layers=1, width=8, heads=2, hidden=8, vocab=16, sequence=16)
    shape = replace(shape, kv_heads=min(shape.kv_heads, 2), head_dim=4)
    shape = replace(shape, experts=min(shape.experts, 4), active=min(shape.active, 2))
    model_fn, params, _ = build(shape, 2, policy=REMAT[remat], again=remat != "none")
    torch.manual_seed(0)
    real: Any = {k: torch.rand(x.shape).requires_grad_() for k, x in params.items()}
    tokens = torch.randint(16, (2, 16))
    loss = model_fn(real, (tokens, tokens))
    grads = torch.autograd.grad(loss, list(real.values()), allow_unused=True)
    assert loss.isfinite()
    assert all(g is not None and g.isfinite().all() for g in grads)


def test_near_names_are_told() -> None:
    with pytest.raises(fzero.ConfigError, match="Did you mean 'llama3-8b'"):
        resolve_model("llama-8b")
