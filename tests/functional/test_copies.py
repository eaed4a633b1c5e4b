"""`copy.deepcopy` while a function is staged out: values, aliases and attributes as in torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero


def _kept(params: Any, x: Tensor) -> Tensor:
    both = torch.ones(4)
    first, second = copy.deepcopy([both, both])
    assert first is second
    return (x @ params["w"] * first).sum()


def _attributes(params: Any, x: Tensor) -> Tensor:
    scale: Any = torch.full((4,), 2.0)
    scale.is_scaled, scale.about = True, {"rows": [1, 2]}
    made = copy.deepcopy({"s": scale})["s"]
    assert made.about == scale.about
    assert made.about is not scale.about
    return (x @ params["w"] * (3 if getattr(made, "is_scaled", False) else 1)).sum()


def _aliases(params: Any, x: Tensor) -> Tensor:
    whole = torch.arange(8.0).view(2, 4)
    found = copy.deepcopy([whole, whole[1], whole.t()])
    found[0].add_(1)
    return (x @ params["w"] * found[1] * found[2][:, 0]).sum()


def _aliases_from_a_part(params: Any, x: Tensor) -> Tensor:
    whole = torch.arange(8.0).view(2, 4)
    row, again = copy.deepcopy((whole[1], whole))
    again.mul_(2)
    return (x @ params["w"] * row).sum() + whole.sum()


def _vmap(params: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row @ params["w"] + copy.deepcopy(torch.ones(4)))(x).sum()


def _hook(params: Any, x: Tensor) -> Tensor:
    y = x @ params["w"]
    y.register_hook(lambda g: copy.deepcopy(g) * 2)
    return y.sum()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return copy.deepcopy(grad) * 2


def _function(params: Any, x: Tensor) -> Tensor:
    found: Any = _Doubled.apply(x @ params["w"])
    return found.sum()


def _saved(params: Any, x: Tensor) -> Tensor:
    def pack(t: Tensor) -> Tensor:
        return copy.deepcopy(t.detach())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return (x @ params["w"]).exp().sum()


def _island(params: Any, x: Tensor) -> Tensor:
    @fzero.opaque
    def part(y: Tensor) -> Tensor:
        return y * copy.deepcopy(torch.full((4,), 2.0))

    return part(x @ params["w"]).sum()


CASES = (
    *(_kept, _attributes, _aliases, _aliases_from_a_part, _vmap),
    *(_hook, _function, _saved, _island),
)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_a_copy_is_the_one_that_torch_makes(fn: Callable[..., Tensor], stage: int) -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    found = []
    for executor in ("traced", "eager"):
        cfg = fzero.Config(stage, executor=executor)  # pyright: ignore
        step_fn = fzero.make_train_step(fn, fzero.optim.sgd(0.1), cfg)
        params, state = step_fn.init({"w": torch.eye(4) + 0.1})
        params, state = step_fn(params, state, x)
        found.append((state.metrics["loss"], fzero.unshard(params)["w"]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_torchs_own_copy_is_there_again() -> None:
    original = Tensor.__deepcopy__
    step_fn = fzero.make_train_step(_kept, fzero.optim.sgd(0.1), fzero.Config(0))
    params, state = step_fn.init({"w": torch.eye(4)})
    step_fn(params, state, torch.ones(2, 4))
    assert Tensor.__deepcopy__ is original
    module = copy.deepcopy(nn.Linear(2, 2))
    assert module.weight.requires_grad


def test_what_is_no_leaf_is_refused_as_in_torch() -> None:
    def loss(params: Any, x: Tensor) -> Tensor:
        return copy.deepcopy(x @ params["w"]).sum()

    for executor in ("traced", "eager"):
        cfg = fzero.Config(0, executor=executor)  # pyright: ignore
        step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.1), cfg)
        params, state = step_fn.init({"w": torch.eye(4)})
        with pytest.raises(Exception, match=r"created explicitly by the user|deepcopy"):
            step_fn(params, state, torch.ones(2, 4))
