"""Noise in an update is a function of seed, step and the element of the whole leaf."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero import tree
from fzero.errors import TraceError
from fzero.optim.base import Optimizer
from tests.ranks import run_ranks

SHAPES = {"a": (5, 3), "b": (3,), "c": (2, 7), "d": (), "e": (1, 3), "f": (4,)}
KINDS = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "empty_like().normal_": lambda g: torch.empty_like(g).normal_(std=2.0),
    # of "e" one of two ranks has nothing, and draws nothing
    "dropout": lambda g: torch.nn.functional.dropout(g, 0.5),
    "guarded": lambda g: torch.rand_like(g) if g.numel() else g,
    "of a product": lambda g: torch.randn_like(g * 2) + torch.empty_like(g).bernoulli_(0.3),
}


def noisy(kind: str) -> Optimizer:
    """Updates that are noise alone."""

    def update(grads: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, Any]:
        return tree.map(KINDS[kind], grads), state

    return fzero.optim.as_optimizer(Optimizer(lambda params: (), update))


class Foreign:
    """The same by an optimizer of somebody else's, which gets whole leaves."""

    def init(self, params: Any) -> Any:
        return ()

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return tree.map(torch.randn_like, grads), state


def loss_of(params: Any, batch: Tensor) -> Tensor:
    return sum(x.sum() for x in params.values()) * batch.mean()


def after_steps(kind: str, stage: int, steps: int = 2, **cfg: Any) -> dict[str, Tensor]:
    opt: Any = noisy(kind) if kind in KINDS else Foreign()
    if kind == "foreign, masked":
        opt = fzero.optim.masked(opt, lambda params: dict.fromkeys(params, True))
    step_fn = fzero.make_train_step(loss_of, opt, fzero.Config(stage=stage, **cfg))
    params, state = step_fn.init({k: torch.zeros(s) for k, s in SHAPES.items()})
    for _ in range(steps):
        # what the process draws besides is of no account
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 5)
        params, state = step_fn(params, state, torch.ones(2))
    return fzero.unshard(params)


def _all_stages(kind: str) -> list[dict[str, Tensor]]:
    return [after_steps(kind, stage) for stage in range(4)]


@pytest.mark.parametrize(
    "kind",
    [
        "randn_like",
        "of a product",
        "dropout",
        "guarded",
        "foreign",
        "foreign, masked",
        *(pytest.param(k, marks=pytest.mark.slow) for k in list(KINDS)[1:3]),
    ],
)
def test_noise_does_not_depend_on_ranks_or_stage(kind: str) -> None:
    alone = after_steps(kind, 3)
    for found in [_all_stages(kind), *run_ranks(2, _all_stages, kind)]:
        for params in found:
            for name in SHAPES:
                assert torch.equal(params[name], alone[name]), (kind, name)


def test_noise_is_another_in_every_step_leaf_and_seed() -> None:
    one, two = after_steps("randn_like", 3, steps=1), after_steps("randn_like", 3, steps=2)
    assert not torch.equal(two["a"] - one["a"], one["a"])
    assert not torch.equal(one["a"].flatten()[:3], one["b"])
    assert not torch.equal(one["a"], after_steps("randn_like", 3, steps=1, seed=1)["a"])


class Started:
    """Somebody else's, which starts with noise."""

    def init(self, params: Any) -> Any:
        return tree.map(torch.randn_like, params)

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return state, state


def _first_states(kind: str) -> list[dict[str, Tensor]]:
    """Parameters after one update by the noise with which the state began, at every stage."""
    opt: Any = Started()
    if kind == "of fzero":
        opt = fzero.optim.as_optimizer(
            Optimizer(opt.init, lambda grads, state, params=None, **_: (state, state))
        )
    found: list[dict[str, Tensor]] = []
    for stage in range(4):
        step_fn = fzero.make_train_step(loss_of, opt, fzero.Config(stage=stage))
        full = {k: torch.zeros(s) for k, s in SHAPES.items()}
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 5)
        before = torch.get_rng_state()
        params, state = step_fn.init(full)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(fzero.unshard(step_fn(params, state, torch.ones(2))[0]))
    return found


@pytest.mark.parametrize("kind", ["of fzero", "foreign"])
def test_noise_of_a_first_state_does_not_depend_on_ranks_or_stage(kind: str) -> None:
    alone = _first_states(kind)[0]
    assert not torch.equal(alone["a"][:1], alone["a"][1:2])
    for found in [_first_states(kind), *run_ranks(2, _first_states, kind)]:
        for params in found:
            for name in SHAPES:
                assert torch.equal(params[name], alone[name]), name


def _of_no_leaf() -> str:
    def update(grads: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, Any]:
        return tree.map(lambda g: g * torch.rand(g.shape), grads), state

    opt = fzero.optim.as_optimizer(Optimizer(lambda params: (), update))
    step_fn = fzero.make_train_step(loss_of, opt)
    params, state = step_fn.init({k: torch.zeros(s) for k, s in SHAPES.items()})
    with pytest.raises(TraceError, match="randn_like") as caught:
        step_fn(params, state, torch.ones(2))
    return str(caught.value)


def test_noise_of_no_known_leaf_is_refused() -> None:
    first, second = run_ranks(2, _of_no_leaf)
    assert "rand" in first
    assert first == second
