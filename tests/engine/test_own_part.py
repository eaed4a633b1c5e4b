"""`engine.optimizer.state_dict()`: an engine goes on from it exactly, or refuses it."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fzero
from fzero.errors import CheckpointError, FzeroError, RankMismatchError
from tests.ranks import run_ranks

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: fzero.optim.adamw(0.01),
    "injected": lambda: fzero.optim.inject_hyperparams(fzero.optim.adamw)(lr=0.01),
    "scheduled": lambda: fzero.optim.sgd(fzero.optim.linear(0.1, 0.0, 9), momentum=0.9),
}


def _engine(stage: int, kind: str = "adamw", width: int = 9, **more: Any) -> fzero.Engine:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    return fzero.Engine(module, OPTIMIZERS[kind](), fzero.Config(stage, **more))


def _train(engine: fzero.Engine, first: int, last: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, last):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(2 * step + rank))
        engine.backward(engine(x).float().square().mean())
        engine.step()


def _saved(engine: fzero.Engine) -> Any:
    file = io.BytesIO()
    torch.save({"model": engine.state_dict(), "optimizer": engine.optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file)  # which runs no code


def goes_on(stage: int, kind: str, more: dict[str, Any]) -> None:
    whole, first, second = (_engine(stage, kind, **more) for _ in range(3))
    for engine in (whole, first):
        _train(engine, 0, 2)
        engine.module.get_submodule("0").requires_grad_(False)  # leaves then count updates apart
        _train(engine, 2, 3)
    saved = _saved(first)
    _train(first, 3, 4)  # what was given out is nobody's memory
    second.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    assert second.global_steps == 3
    for engine in (whole, second):
        engine.module.requires_grad_(True)
        _train(engine, 3, 6)
    for name, value in second.full_params().items():
        assert torch.equal(value, whole.full_params()[name]), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.quick("2-3", "1-2")
def test_an_engine_goes_on_from_what_it_gave_out(world: int, stage: int) -> None:
    more: dict[str, Any] = {"precision": "fp16", "loss_scale": "dynamic"}
    for kind, options in (("adamw", {}), ("injected", more), ("scheduled", {})):
        if world == 1:
            goes_on(stage, kind, options)
        else:
            run_ranks(2, goes_on, stage, kind, options)


def of_the_first_rank(stage: int) -> None:
    engine, fresh = _engine(stage), _engine(stage)
    _train(engine, 0, 2)
    saved = [engine.optimizer.state_dict()]
    dist.broadcast_object_list(saved)
    if stage == 0:  # where all ranks have the same
        fresh.optimizer.load_state_dict(saved[0])
        assert fresh.global_steps == 2
        return
    before = copy.deepcopy(fresh.state[1].inner)
    said = r"part 0 of 2 in what is loaded, and .*part 1 of 2 here", "another rank"
    with pytest.raises(CheckpointError, match=said[dist.get_rank() == 0]) as told:
        fresh.optimizer.load_state_dict(saved[0])
    assert "fzero.checkpoint.save" in str(told.value)
    assert fresh.global_steps == 0
    torch.testing.assert_close(fresh.state[1].inner.mu, before.mu)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_ranks_part_is_not_anothers(stage: int) -> None:
    run_ranks(2, of_the_first_rank, stage)


def of_other_steps() -> None:
    engine = _engine(2)
    _train(engine, 0, 1)
    early = engine.optimizer.state_dict()
    _train(engine, 1, 2)
    late = engine.optimizer.state_dict()
    with pytest.raises(RankMismatchError, match=r"rank 0: 1; rank 1: 2\..*fzero\.checkpoint"):
        engine.optimizer.load_state_dict(late if dist.get_rank() else early)
    assert engine.global_steps == 2


def test_ranks_load_one_step() -> None:
    run_ranks(2, of_other_steps)


OTHERS: dict[str, Any] = {
    "another model": ({"width": 8}, r"\(9,\), .* in what is loaded, and \(8,\), "),
    "another optimizer": ({"kind": "scheduled"}, r"\.mu\['0\.bias'\] is .*, and missing here"),
    "another stage": ({"stage": 0}, r"\(9,\), \(Shard.* in what is loaded, and \(9,\), whole"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_lies_otherwise_is_refused_by_name(other: str) -> None:
    options, said = OTHERS[other]
    engine, wrong = _engine(3), _engine(**{"stage": 3, **options})
    with pytest.raises(CheckpointError, match=rf"load_state_dict: .*{said}.*Nothing was loaded"):
        wrong.optimizer.load_state_dict(engine.optimizer.state_dict())


def test_a_rate_that_an_optimizer_has_of_its_own_may_be_set_to_what_it_is() -> None:
    engine = _engine(1)
    engine.lr = 0.01
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    with pytest.raises(FzeroError, match=r"rate is fixed at 0\.01"):
        engine.lr = 0.02
    for rate, said in (
        (fzero.optim.cosine(0.01, 10), "by its schedule"),
        (torch.tensor(0.1), r"fixed at 0\.1"),
    ):
        model = nn.Linear(2, 1)
        with pytest.raises(FzeroError, match=rf"{said}, .*inject_hyperp"):
            fzero.Engine(model, fzero.optim.adamw(rate)).lr = 0.02
