"""Gradients are computed into slabs, at no cost of memory."""

from typing import Any

import pytest
import torch

import fzero
from tests.ranks import fake_ranks


def _program(rows: int, **fields: Any) -> fzero.Program:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    apply, params = fzero.functionalize(model)
    step_fn = fzero.make_train_step(
        lambda p, x: (apply(p, x) ** 2).mean(), fzero.optim.adamw(1e-2), fzero.Config(**fields)
    )
    return step_fn.lower(*step_fn.init(params), torch.randn(rows, 64))


def _log(program: fzero.Program) -> str:
    return "\n".join(line for part in program.parts() for line in part.log)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_alone_lays_its_gradients(stage: int) -> None:
    program = _program(256, stage=stage)
    assert "lay: 16 gradients in 1 slabs" in _log(program)
    assert "place: 7 of 16" in _log(program)  # but for biases, and the first that is made
    program.verify()


def test_several_ranks_lay_nothing_that_is_reduced() -> None:
    with fake_ranks(2):
        assert "lay:" not in _log(_program(256, stage=0))


@pytest.mark.parametrize("fields", [{"executor": "inductor"}, {"memory_limit": "1GB"}])
def test_it_is_left_where_nobody_gains(fields: dict[str, Any]) -> None:
    assert "lay:" not in _log(_program(256, **{"stage": 0, **fields}))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("rows", [2, 16, 256, 2048])
@pytest.mark.quick("16-0", "2-3")
def test_the_peak_is_hardly_higher(rows: int, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("fzero.step.gradients.lay", lambda program: program)
        before = _program(rows, stage=stage).peak_bytes()
    assert _program(rows, stage=stage).peak_bytes() <= 1.02 * before


def test_what_is_returned_twice_stays() -> None:
    """A leaf's gradient that is another's, too, and one of a leaf that nobody uses."""

    def loss(params: Any, x: Any) -> Any:
        return ((params["a"] + params["b"]) * x).sum()

    step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.1), fzero.Config(stage=0))
    params = {name: torch.ones(64, 64) for name in "abc"}
    params, opt_state = step_fn.init(params)
    params, _ = step_fn(params, opt_state, x := torch.rand(64, 64))
    for name in "ab":
        assert torch.allclose(fzero.unshard(params)[name], 1 - 0.1 * x)
    assert torch.equal(fzero.unshard(params)["c"], torch.ones(64, 64))
