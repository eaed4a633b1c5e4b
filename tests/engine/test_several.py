"""Several engines under one loss: each has the gradients that plain torch has, and steps itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.engine.models import Checkpointed, Net
from tests.engine.parity import LR, SGD, STAGES, Plain, build, compare, data, here
from tests.ranks import run_ranks

Pair = Callable[[Any, Any, int, int], Tensor]


class Second(nn.Module):
    """Takes what `Net` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Recomputed(Checkpointed):
    def __init__(self) -> None:
        super().__init__(["re", "non"])


def independent(a: Any, b: Any, rank: int, i: int) -> Tensor:
    return a(data(rank, i)).square().mean() + b(data(rank, i, columns=5)).square().mean()


def chained(a: Any, b: Any, rank: int, i: int) -> Tensor:
    return b(a(data(rank, i).requires_grad_())).square().mean()


def chained_and_more(a: Any, b: Any, rank: int, i: int) -> Tensor:
    h = a(data(rank, i).requires_grad_())
    return (b(h) + b(h * 2)).square().mean() + h.exp().mean() + b.module.a.weight.sum()


PAIRS: list[Pair] = [independent, chained, chained_and_more]


def each_has_its_gradients(
    pair: Pair, accum: tuple[int, int], scales: tuple[float | None, float | None], micro: int
) -> None:
    rank, world = here()
    makes = (Recomputed if pair is chained else Net, Second)
    total: list[dict[str, Any]] = [{}, {}]
    for other in range(world):
        nets = [Plain(build(make)) for make in makes]
        for i in range(micro):
            pair(nets[0], nets[1], other, i).backward()
        for k, net in enumerate(nets):
            for name, p in net.module.named_parameters():
                if p.grad is not None:
                    part = p.grad / world / accum[k]
                    total[k][name] = total[k].get(name, 0) + part
    for stage in STAGES:
        engines = [
            fzero.Engine(
                build(make),
                SGD(),
                fzero.Config(stage=(stage + k) % 4, accum_steps=accum[k], loss_scale=scales[k]),
            )
            for k, make in enumerate(makes)
        ]
        before = [engine.full_params() for engine in engines]
        for i in range(micro):
            loss = pair(engines[0], engines[1], rank, i)
            if scales == (None, None):
                loss.backward()
            elif i % 2:
                engines[0].scale(engines[1].scale(loss)).backward()
            else:
                engines[0].backward(engines[1].scale(loss))
        for k, engine in enumerate(engines):
            compare(engine, total[k], f"stage {stage}, engine {k}, accum {accum}, scales {scales}")
            engine.step()
            after = engine.full_params()
            for name, grad in total[k].items():
                new = before[k][name] - LR * grad
                torch.testing.assert_close(after[name], new, rtol=0, atol=1e-10)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_has_the_gradients_of_plain_torch(world: int, pair: Pair) -> None:
    none = (None, None)
    settings: list[Any] = [((1, 1), none, 1), ((2, 2), (128.0, 8.0), 2)]
    if world == 2:
        settings += [((2, 2), none, 2), ((1, 1), (8.0, 8.0), 2), ((1, 2), none, 2)]
    for setting in settings:
        if world == 1:
            each_has_its_gradients(pair, *setting)
        else:
            run_ranks(world, each_has_its_gradients, pair, *setting)


def test_one_of_two_engines_without_its_scale_is_refused() -> None:
    a = fzero.Engine(build(Net), SGD(), fzero.Config(loss_scale=8.0))
    b = fzero.Engine(build(Second), SGD(), fzero.Config(loss_scale=8.0))
    with pytest.raises(fzero.BackwardError, match="scale"):
        b.backward(chained(a, b, 0, 0))
    a.zero_grad()
    b.zero_grad()
    a.backward(b.scale(chained(a, b, 0, 0)))
    a.step()
    b.step()


def test_a_parameter_has_one_engine() -> None:
    module = build(Net)
    run_ranks(2, two_engines_of_one_module)
    fzero.Engine(module, SGD(), fzero.Config())


def two_engines_of_one_module() -> None:
    module = build(Net)
    first = fzero.Engine(module, SGD(), fzero.Config(stage=3))
    with pytest.raises(fzero.ShardError, match="one engine"):
        fzero.Engine(module, SGD(), fzero.Config(stage=3))
    first.zero_grad()  # it is alive until here
