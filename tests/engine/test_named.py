"""Cases that other libraries are known to get wrong, as their users would type them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fzero
from tests.engine.parity import SGD, STAGES, build, data, here
from tests.ranks import run_ranks


class Dot(nn.Module):
    """The logits of one weight each, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.w * x
        return logits.sum(), logits


X = torch.arange(1.0, 5.0, dtype=torch.float64)


def grad_of(engine: fzero.Engine, name: str = "w") -> Tensor:
    grad = engine.full_grad(name)
    assert grad is not None
    return grad


def outputs_and_accumulation() -> None:
    for stage in STAGES:
        for route in range(4):
            engine = fzero.Engine(build(Dot), SGD(), fzero.Config(stage=stage, accum_steps=4))
            for _ in range(4):
                loss, logits = engine(X)
                if route == 0:
                    loss.backward()
                elif route == 1:
                    logits.sum().backward()
                elif route == 2:
                    ((loss + logits.sum()) / 2).backward()
                else:
                    engine.backward(loss)
            assert torch.equal(grad_of(engine), X)


def retained() -> None:
    for stage in STAGES:
        engine = fzero.Engine(build(Dot), SGD(), fzero.Config(stage=stage))
        loss, _ = engine(X)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        assert torch.equal(grad_of(engine), 2 * X)


def two_forwards_two_backwards() -> None:
    for stage in STAGES:
        engine = fzero.Engine(build(Dot), SGD(), fzero.Config(stage=stage))
        (a, _), (b, _) = engine(X), engine(2 * X)
        a.backward()
        b.backward()
        assert torch.equal(grad_of(engine), 3 * X)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, logits: Tensor) -> Tensor:
        return (self.v * logits).sum()


def chained() -> None:
    for stage in STAGES:
        cfg = fzero.Config(stage=stage, accum_steps=2)
        a, b = fzero.Engine(build(Dot), SGD(), cfg), fzero.Engine(build(Outer), SGD(), cfg)
        for i in (1, 2):
            _, logits = a(i * X)
            b(logits).backward()
        assert torch.equal(grad_of(a), 1.5 * 2.0 * X)
        assert torch.equal(grad_of(b, "v"), 1.5 * X)
        a.step()
        b.step()
        torch.testing.assert_close(a.full_params()["w"], 1 - 0.1 * 3.0 * X)


def half_precision() -> None:
    for stage in STAGES:
        cfg = fzero.Config(stage=stage, precision="fp16", loss_scale=64.0, accum_steps=2)
        engine = fzero.Engine(Dot(), SGD(), cfg)
        for _ in range(2):
            _, logits = engine(X.float())
            engine.scale(logits).backward(torch.ones_like(logits))
        assert torch.equal(grad_of(engine).double(), X)


NAMED = [outputs_and_accumulation, retained, two_forwards_two_backwards, chained, half_precision]


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.__name__)
@pytest.mark.parametrize("world", [1, 2])
def test_named(world: int, case: Callable[[], None]) -> None:
    if world == 1:
        case()
    else:
        run_ranks(world, case)


def functional_gradients() -> None:
    for stage in STAGES:
        module = build(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)))
        names = [name for name, _ in module.named_parameters()]
        engine = fzero.Engine(module, SGD(), fzero.Config(stage=stage))
        x = data(here()[0])
        full = engine.full_params()

        def loss(params: dict[str, Tensor], x: Tensor, module: nn.Module = module) -> Tensor:
            return functional_call(module, params, (x,)).square().mean()

        want = torch.func.grad(loss, argnums=(0, 1))(full, x)
        found = torch.func.grad(loss)(dict(engine.module.named_parameters()), x)
        for name in names:
            torch.testing.assert_close(found[name], want[0][name], rtol=0, atol=1e-12)
        dx = torch.func.grad(lambda x, module=module: module(x).square().mean())(x)
        torch.testing.assert_close(dx, want[1], rtol=0, atol=1e-12)
        # and nothing of it has become the engine's
        assert engine.full_grad(names[0]) is None


@pytest.mark.parametrize("world", [1, 2])
def test_torch_func_through_the_module(world: int) -> None:
    if world == 1:
        functional_gradients()
    else:
        run_ranks(world, functional_gradients)
