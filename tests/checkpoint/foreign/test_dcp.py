"""Whose state each key of a `torch.distributed.checkpoint` is; see test_foreign.py for FSDP2's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import fzero
from fzero.checkpoint import load

KINDS = ("exp_avg", "exp_avg_sq")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _write(path: Path, **parts: Any) -> Path:
    dcp.save(parts, checkpoint_id=path, no_dist=True)
    return path


def _model(*names: str) -> dict[str, Tensor]:
    return {name: torch.full((2,), float(i)) for i, name in enumerate(names, 1)}


def _optim(first: float, *names: str, step: float = 3.0) -> dict[str, Any]:
    """An optimizer's state, each tensor of another value."""

    def of(i: int) -> dict[str, Tensor]:
        moments = {kind: torch.full((2,), first + i + k / 2) for k, kind in enumerate(KINDS)}
        return moments | {"step": torch.tensor(step)}

    return {"state": {name: of(i) for i, name in enumerate(names)}}


def _like(*names: str, opt: Any = None) -> tuple[Any, Any]:
    opt = opt or fzero.optim.adamw(1e-2)
    step_fn = fzero.make_train_step(lambda p, x: x.sum(), opt, fzero.Config(stage=0))
    return step_fn.init({name: torch.zeros(2) for name in names})


def _moments(state: Any) -> dict[str, list[float]]:
    mu, nu = state.inner.mu, state.inner.nu
    return {name: [mu[name][0].item(), nu[name][0].item()] for name in mu}


@pytest.mark.parametrize("head", ["", "net."])
def test_a_state_is_of_the_parameter_with_the_whole_name(head: str, tmp_path: Path) -> None:
    names = ("a.b.w", "b.w", "w")
    there = [head + name for name in names]
    _write(tmp_path, model=_model(*there), optim=_optim(10, *there))
    _, state = load(tmp_path, *_like(*names))
    assert _moments(state) == {"a.b.w": [10, 10.5], "b.w": [11, 11.5], "w": [12, 12.5]}
    assert state.inner.step.item() == state.step.item() == 3


def test_a_parameter_may_be_called_as_a_part_of_the_head(tmp_path: Path) -> None:
    names = ("state.w", "w")
    _write(tmp_path, model=_model(*names), optim=_optim(10, *names))
    _, state = load(tmp_path, *_like(*names))
    assert _moments(state) == {"state.w": [10, 10.5], "w": [11, 11.5]}


def test_a_parameter_without_state_gets_no_others(tmp_path: Path) -> None:
    # of a job that had frozen b.w
    _write(tmp_path, model=_model("a.b.w", "b.w"), optim=_optim(10, "a.b.w"))
    with pytest.raises(fzero.CheckpointError, match=r"not in the checkpoint: .*\.mu\.b\.w"):
        load(tmp_path, *_like("a.b.w", "b.w"))
    # also where the one that has state is not asked for
    with pytest.raises(fzero.CheckpointError, match=r"not in the checkpoint: .*\.mu\.b\.w"):
        load(tmp_path, *_like("b.w"))


def test_counts_are_of_the_parameter_with_the_whole_name(tmp_path: Path) -> None:
    optim = _optim(10, "a.b.w", "b.w")
    optim["state"]["a.b.w"]["step"] = torch.tensor(1.0)
    _write(tmp_path, model=_model("a.b.w", "b.w"), optim=optim)
    _, state = load(tmp_path, *_like("a.b.w", "b.w"))
    assert {name: int(x) for name, x in state.inner.counts.items()} == {"a.b.w": 1, "b.w": 3}


def test_of_several_optimizers_the_one_of_these_parameters_is_meant(tmp_path: Path) -> None:
    g, d = _optim(10, "a", "b"), _optim(20, "b", "c", step=9.0)
    _write(tmp_path, g=_model("a", "b"), optim_d=d, optim_g=g)
    _, state = load(tmp_path, *_like("a", "b"))
    assert _moments(state) == {"a": [10, 10.5], "b": [11, 11.5]}
    assert state.step.item() == 3


def test_optimizers_of_other_parameters_each_fill_theirs(tmp_path: Path) -> None:
    one, two = _optim(10, "a"), _optim(20, "b", "c")
    _write(tmp_path, model=_model("a", "b", "c"), optim_one=one, optim_two=two)
    _, state = load(tmp_path, *_like("a", "b", "c"))
    assert _moments(state) == {"a": [10, 10.5], "b": [20, 20.5], "c": [21, 21.5]}


def test_two_states_of_one_parameter_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, model=_model("a"), optim_d=_optim(10, "a"), optim_g=_optim(20, "a", step=4.0))
    params, state = _like("a")
    said = r"optim_d\.state\.a\.\w+ and optim_g\.state\.a\.\w+.*opt_state_like=None"
    with pytest.raises(fzero.CheckpointError, match=said):
        load(tmp_path, params, state)
    assert load(tmp_path, params)[0]["a"].tolist() == [1, 1]
