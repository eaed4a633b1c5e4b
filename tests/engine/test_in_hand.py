"""Gradients that a caller writes, steps that a caller places, ranks that start apart."""

from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.errors import BackwardError, FzeroError, RankMismatchError, ShardError
from tests.ranks import run_ranks


def engine_of(seed: int = 0, **config: Any) -> fzero.Engine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    return fzero.Engine(model, fzero.optim.sgd(0.5), fzero.Config(**config), broadcast=True)


def _starts_apart(stage: int) -> dict[str, torch.Tensor]:
    engine = engine_of(torch.distributed.get_rank(), stage=stage)
    return engine.state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_start_apart_take_the_first_ones_values(stage: int) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).state_dict()
    for found in run_ranks(2, _starts_apart, stage):
        assert found.keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in found.items())


def _modules_differ() -> str:
    rank = torch.distributed.get_rank()
    try:
        fzero.Engine(nn.Linear(3, 1 + rank), broadcast=True)
    except RankMismatchError as error:
        return str(error)
    return ""


def test_modules_that_differ_are_told_before_anything_is_sent() -> None:
    assert all("weight" in message for message in run_ranks(2, _modules_differ))


def _gives_another() -> str:
    engine = engine_of(stage=2)
    engine(torch.ones(2, 3)).mean().backward()
    try:
        engine.set_full_grad("2.bias", torch.full((1,), float(torch.distributed.get_rank())))
    except RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_give_other_gradients_are_told() -> None:
    assert all("2.bias" in message for message in run_ranks(2, _gives_another))


def test_a_gradient_that_does_not_fit_is_refused() -> None:
    engine = engine_of(stage=0, frozen=("0.*",))
    with pytest.raises(BackwardError, match="before any backward"):
        engine.set_full_grad("2.bias", torch.ones(1))
    engine(torch.ones(2, 3)).mean().backward()
    with pytest.raises(ShardError, match=r"\(2,\), and must be \(1,\)"):
        engine.set_full_grad("2.bias", torch.ones(2))
    with pytest.raises(ShardError, match="frozen"):
        engine.set_local_grad("0.bias", torch.ones(5))
    with pytest.raises(ShardError, match="no parameter"):
        engine.full_param("bias")


def _writes_into_what_it_asked_for(stage: int) -> list[bool]:
    engine = engine_of(stage=stage)
    engine(torch.ones(2, 3)).sum().backward()
    kept = []
    for name in ("2.bias", "2.weight"):
        for ask in (engine.full_grad, engine.local_grad):
            found = ask(name)
            assert found is not None
            before = found.clone()
            found.zero_()
            kept.append(torch.equal(ask(name), before))
    return kept


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_was_asked_for_is_the_callers(stage: int) -> None:
    for kept in (
        _writes_into_what_it_asked_for(stage),
        *run_ranks(2, _writes_into_what_it_asked_for, stage),
    ):
        assert all(kept)


def test_a_backward_adds_to_what_was_written() -> None:
    engine = engine_of(stage=0)
    engine(torch.ones(2, 3)).sum().backward()
    engine.set_full_grad("2.bias", torch.tensor([10.0]))
    engine(torch.ones(2, 3)).sum().backward()
    assert engine.full_grad("2.bias") == torch.tensor([12.0])


def test_a_step_is_where_the_caller_places_it() -> None:
    engine = engine_of(stage=0, accum_steps=4)
    before = engine.full_param("2.bias")
    for boundary in (False, False, False, False, False, True):
        engine(torch.ones(2, 3)).sum().backward()
        engine.step(boundary)
        assert engine.global_steps == int(boundary)
    torch.testing.assert_close(engine.full_param("2.bias"), before - 0.5 * 6 * 2 / 4)


def test_rates_are_set_by_label() -> None:
    def sgd(lr: float) -> Any:
        return fzero.optim.inject_hyperparams(fzero.optim.sgd)(lr=lr)

    labels = {"weight": "matrix", "bias": "vector"}
    opt = fzero.optim.multi_transform({"matrix": sgd(0.1), "vector": sgd(0.2)}, labels)
    engine = fzero.Engine(nn.Linear(2, 1), opt)
    engine.lr = {"vector": 4.0}
    before = engine.full_params()
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    after = engine.full_params()
    torch.testing.assert_close(after["weight"], before["weight"] - 0.1)
    torch.testing.assert_close(after["bias"], before["bias"] - 4.0)
    for wrong in ({"none": 0.1}, {"vector": -1.0}):
        with pytest.raises(FzeroError, match=next(iter(wrong))):
            engine.lr = wrong
