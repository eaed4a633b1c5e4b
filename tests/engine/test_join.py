"""Loaders of different lengths: the mean is over the ranks that have data, and nobody hangs."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from tests.engine.parity import data
from tests.ranks import run_fresh, run_ranks

LENGTHS = (4, 1, 2)


def _module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def _loss(net: Any, x: Tensor) -> Tensor:
    return net(x).square().mean()


def _plain(world: int, accum: int) -> tuple[dict[str, Tensor], list[float]]:
    module, losses = _module(), []
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    for start in range(0, max(LENGTHS[:world]), accum):
        total = torch.zeros((), dtype=torch.float64)
        for i in range(start, start + accum):
            going = [rank for rank in range(world) if i < LENGTHS[rank]]
            total = total + sum(_loss(module, data(r, i)) for r in going) / len(going) / accum
        opt.zero_grad()
        total.backward()
        opt.step()
        losses.append(total.item())
    return dict(module.state_dict()), losses


def _engine(stage: int, accum: int, named: bool) -> tuple[Any, list[float], int]:
    rank = dist.get_rank()
    cfg = fzero.Config(stage, accum_steps=accum, bucket_mb=0.0003)
    engine = fzero.Engine(_module(), fzero.optim.sgd(0.1), cfg)
    losses, rounds = [], 0
    for x in engine.join(data(rank, i) for i in range(LENGTHS[rank])):
        # what does not count may be anything
        loss = _loss(engine, x) * (1.0 if engine.has_data else math.inf)
        if named:
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
        rounds += 1
        if rounds % accum == 0:
            losses.append(engine.metrics["loss"].item())
    assert engine.has_data
    return engine.full_params(), losses, rounds


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_mean_is_over_the_ranks_that_have_data(stage: int, accum: int) -> None:
    world = 2 + (stage == 3)
    expected, losses = _plain(world, accum)
    for named in (True, False):
        for full, seen, rounds in run_ranks(world, _engine, stage, accum, named):
            assert rounds == max(LENGTHS[:world])
            for name, value in expected.items():
                torch.testing.assert_close(full[name], value)
            if named:  # an output that is a loss is not known to be one here
                torch.testing.assert_close(torch.tensor(seen), torch.tensor(losses))


def _sums() -> None:
    rank, module = dist.get_rank(), _module()
    opt = fzero.optim.sgd(0.1)
    engine = fzero.Engine(_module(), opt, fzero.Config(2), gradient_reduction="sum")
    rounds = engine.join([data(rank, i) for i in range(LENGTHS[rank])])
    next(rounds)
    x = next(rounds)  # the second one has none any more
    _loss(engine, x).backward()
    _loss(module, data(0, 1)).backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(engine.full_grad(name), p.grad)
    rounds.close()  # a loop that is left
    assert engine.has_data


def test_a_sum_is_over_them_too_and_a_loop_can_be_left() -> None:
    run_ranks(2, _sums)


def _none_at_all() -> None:
    engine = fzero.Engine(_module(), fzero.optim.sgd(0.1), fzero.Config(2))
    batches = [data(0)] if dist.get_rank() == 0 else []
    with pytest.raises(fzero.RankMismatchError, match=r"1 of 2 ranks have not one batch"):
        list(engine.join(batches))
    assert list(engine.join([])) == []


def test_a_rank_without_any_batch_is_named() -> None:
    run_ranks(2, _none_at_all)


def _without_join(stage: int, skips: int, before: int) -> str:
    """One rank skips the join, after so many rounds of all; what it is told."""
    engine = fzero.Engine(_module(), fzero.optim.sgd(0.1), fzero.Config(stage, timeout=60))
    rank = dist.get_rank()
    batches: Any = [data(rank, i) for i in range(3)]

    def train(loop: Any) -> None:
        for x in loop:
            _loss(engine, x).backward()
            engine.step()

    if before:
        train(engine.join(batches[:before]))
    with pytest.raises(fzero.RankMismatchError) as raised:
        train(batches[:2] if rank == skips else engine.join(batches))
    return str(raised.value)


@pytest.mark.parametrize(
    ("world", "stage", "skips", "before"),
    [
        (2, 0, 1, 0),
        (2, 3, 0, 1),
        (3, 3, 2, 0),
        pytest.param(2, 3, 1, 0, marks=pytest.mark.slow),
        pytest.param(3, 0, 0, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_skips_the_join_is_named(
    world: int, stage: int, skips: int, before: int
) -> None:
    for said in run_fresh(world, _without_join, stage, skips, before):
        assert f"Rank {skips} trains without engine.join" in said
        assert "engine.join(loader)" in said


def test_alone_it_is_the_loader() -> None:
    engine = fzero.Engine(_module(), fzero.optim.sgd(0.1))
    assert list(engine.join(range(3))) == [0, 1, 2]
    assert list(engine.join([])) == []


class _Penalised(nn.Module):
    """A backward inside of the forward, whose gradients are infinite if asked to be."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.factor = _module(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        (_loss(self.net, x) * self.factor).backward()
        return self.net(x)


def _early_and_infinite(precision: str | None) -> bool:
    rank = dist.get_rank()
    module = _Penalised().to(torch.float32)
    engine = fzero.Engine(module, fzero.optim.sgd(0.1), fzero.Config(2, precision=precision))  # pyright: ignore
    for x in engine.join(data(rank, i).float() for i in range(1 + 2 * rank)):
        module.factor = 1.0 if engine.has_data else math.inf
        engine.backward(engine(x).float().square().mean())
        engine.step()
    return all(x.isfinite().all().item() for x in engine.full_params().values())


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_what_does_not_count_may_come_early(precision: str | None) -> None:
    assert all(run_ranks(2, _early_and_infinite, precision))


def _two_engines(stage: int, second: str) -> dict[str, Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [data(rank, i) for i in range(LENGTHS[rank])]
    cfg, opt = fzero.Config(stage=stage), fzero.optim.sgd(0.1)
    one = fzero.Engine(_module(), opt, cfg)
    two = fzero.Engine(_module(), opt, cfg, gradient_reduction=second)  # pyright: ignore
    seen = []
    for x in two.join(one.join(mine)):
        seen.append((one.has_data, two.has_data))
        for engine in (one, two):
            _loss(engine, x).backward()
            engine.step()
    rounds = range(max(LENGTHS[:world]))
    assert seen == [(i < LENGTHS[rank],) * 2 for i in rounds]
    assert one.has_data
    assert two.has_data
    return {"one": one.full_params()["0.weight"], "two": two.full_params()["0.weight"]}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("second", ["mean", "sum"])
def test_two_engines_in_one_loop(stage: int, second: str) -> None:
    expected = {}
    for key, averages in {"one": True, "two": second == "mean"}.items():
        module = _module()
        opt = torch.optim.SGD(module.parameters(), lr=0.1)
        for i in range(max(LENGTHS[:2])):
            going = [rank for rank in range(2) if i < LENGTHS[rank]]
            for rank in going:
                (_loss(module, data(rank, i)) / (len(going) if averages else 1)).backward()
            opt.step()
            opt.zero_grad()
        expected[key] = module.state_dict()["0.weight"]
    for found in run_ranks(2, _two_engines, stage, second):
        torch.testing.assert_close(found, expected)
