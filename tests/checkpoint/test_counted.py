"""Counts of leaves in checkpoints of engines whose parameters were frozen for a while."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from tests.engine.parity import data
from tests.ranks import run_ranks


def _engine(stage: int) -> fzero.Engine:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return fzero.Engine(module, fzero.optim.adamw(0.1), fzero.Config(stage))


def _train(engine: fzero.Engine, first: int, last: int, frozen: tuple[int, ...] = ()) -> None:
    for step in range(first, last):
        engine.module[0].requires_grad_(step not in frozen)
        engine(data(dist.get_rank(), step)).square().mean().backward()
        engine.step()


def _resumed(path: Path, saving: int, loading: int, saver: Any, loader: Any) -> list[Any]:
    """Train, save after 3 steps, go on; the same from the checkpoint in an engine with a past."""
    one, other = _engine(saving), _engine(loading)
    _train(one, 0, 3, saver)
    fzero.checkpoint.save(path, *one.state)
    _train(one, 3, 6, (3,))
    _train(other, 0, 2, loader)
    other.state = fzero.checkpoint.load(path, *other.state)
    _train(other, 3, 6, (3,))
    return [one.full_params(), other.full_params()]


@pytest.mark.parametrize(("saving", "loading"), [(3, 1), (0, 3)])
@pytest.mark.parametrize("saver", [(), (0, 1)])
@pytest.mark.parametrize("loader", [(), (0,)])
@pytest.mark.quick("loader1-saver0-3-1", "loader0-saver1-3-1")
def test_a_run_goes_on_whoever_has_counts(
    saving: int, loading: int, saver: Any, loader: Any, tmp_path: Path
) -> None:
    for one, other in run_ranks(2, _resumed, tmp_path, saving, loading, saver, loader):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-12)


def _handed_over(stage: int) -> list[dict[str, Tensor]]:
    """The state of an engine that froze, into one that did not, and the other way round."""
    one, other, third = (_engine(stage) for _ in range(3))
    _train(one, 0, 3, (0, 1))
    other.state = one.state
    _train(third, 0, 2, (0,))
    third.state = one.state
    for engine in (one, other, third):
        _train(engine, 3, 5)
    return [engine.full_params() for engine in (one, other, third)]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_takes_anothers_state_whoever_has_counts(stage: int) -> None:
    for one, *others in run_ranks(2, _handed_over, stage):
        for other in others:
            for name, value in one.items():
                torch.testing.assert_close(other[name], value, rtol=1e-12, atol=1e-14)


def test_a_step_function_says_how_to_take_one_count_for_all() -> None:
    params = {"w": torch.ones(3)}
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.adamw(0.1))
    params, opt_state = step_fn.init(params)
    counted = opt_state._replace(inner=fzero.optim.own_counts(opt_state.inner))
    with pytest.raises(fzero.ShardError, match="common_count"):
        step_fn(params, counted, torch.ones(3))
    one = counted._replace(inner=fzero.optim.common_count(counted.inner))
    step_fn(params, one, torch.ones(3))


def _two(stage: int, precision: str | None) -> tuple[fzero.Engine, fzero.Engine]:
    torch.manual_seed(3)
    cfg = fzero.Config(stage, precision=precision)
    dtype = torch.float64 if precision is None else torch.float32
    nets = [nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7)).to(dtype) for _ in range(2)]
    adamw, adam = fzero.optim.adamw(0.1), fzero.optim.adam(0.1)
    return fzero.Engine(nets[0], adamw, cfg), fzero.Engine(nets[1], adam, cfg)


def _both(engines: tuple[fzero.Engine, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of engines that are trained together as one pair of trees."""
    states = dict(zip("gd", (engine.state for engine in engines), strict=True))
    return {k: x[0] for k, x in states.items()}, {k: x[1] for k, x in states.items()}


def _pair_resumed(path: Path, saving: int, loading: int, precision: str | None) -> list[Any]:
    engines, others = _two(saving, precision), _two(loading, precision)
    _train(engines[0], 0, 2)
    _train(engines[1], 0, 3, (0, 1))  # it has counts of leaves, the first has none
    fzero.checkpoint.save(path, *_both(engines), step=2)
    params, opt_states = fzero.checkpoint.load(path, *_both(others))
    for k, other in zip("gd", others, strict=True):
        other.state = params[k], opt_states[k]
    found = [(a.state_dict(), b.state_dict()) for a, b in zip(engines, others, strict=True)]
    for engine in (*engines, *others):
        _train(engine, 3, 6)
    assert [other.global_steps for other in others] == [5, 6]
    more = [(a.full_params(), b.full_params()) for a, b in zip(engines, others, strict=True)]
    return [*found, *more]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 1)])
@pytest.mark.quick("2-3-bf16", "3-1-None")
def test_engines_that_are_trained_together_have_one_checkpoint(
    saving: int, loading: int, precision: str | None, tmp_path: Path
) -> None:
    for results in run_ranks(2, _pair_resumed, tmp_path, saving, loading, precision):
        *found, more, most = results
        for one, other in found:
            for name, value in one.items():
                assert torch.equal(other[name], value), name
        for one, other in (more, most):
            for name, value in one.items():
                torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


def test_counts_of_one_state_among_several_are_its_own(tmp_path: Path) -> None:
    engines = [fzero.Engine(nn.Linear(2, 2), fzero.optim.adam(0.1)) for _ in range(2)]
    for engine, steps in zip(engines, (3, 5), strict=True):
        for _ in range(steps):
            engine(torch.ones(1, 2)).sum().backward()
            engine.step()
    (one, other) = (engine.state[1] for engine in engines)
    fzero.checkpoint.save(tmp_path, None, [one, other], step=1)
    blank = fzero.tree_map(torch.zeros_like, [one, other])
    # the second has counts, which the checkpoint has not
    blank[1] = blank[1]._replace(inner=fzero.optim.own_counts(blank[1].inner))
    _, (first, second) = fzero.checkpoint.load(tmp_path, None, blank)
    assert first.inner.counts is None
    assert {k: int(n) for k, n in second.inner.counts.items()} == {"weight": 5, "bias": 5}
