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
