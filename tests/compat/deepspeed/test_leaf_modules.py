"""Modules that are gathered as one."""

import pytest
import torch
from torch import nn

import fzero.compat.deepspeed as deepspeed
from fzero.errors import ConfigError

u = deepspeed.utils


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ReLU())


def test_marked_modules_are_gathered_together() -> None:
    model = model_of()
    assert u.set_z3_leaf_modules(model, ["ReLU"]) == [model[2]]
    assert u.set_z3_leaf_modules_by_name(model, ["1"]) == ([model[1]], [])
    u.unset_z3_leaf_modules(model, [nn.ReLU])
    assert u.get_z3_leaf_modules(model) == [model[1]]
    engine = deepspeed.initialize(
        model=model, config={"zero_optimization": {"stage": 3}}, dist_init_required=False
    )[0]
    assert engine.inner.cfg.gather_together == ("1",)


def test_a_class_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Conv2d"):
        u.set_z3_leaf_modules(model_of(), [nn.Conv2d])
    assert u.set_z3_leaf_modules(model_of(), [nn.Conv2d], raise_if_not_found=False) == []


def test_names_and_suffixes_give_what_is_found_and_what_is_missing() -> None:
    model = model_of()
    found = u.set_z3_leaf_modules_by_suffix(model, ["0", "9", "1.0"], raise_if_not_found=False)
    assert found == ([model[0], model[1][0]], ["9"])
    assert u.set_z3_leaf_modules_by_name(model, ["0"], flag=False) == ([model[0]], [])
    assert u.get_z3_leaf_modules(model) == [model[1][0]]
    for by in (u.set_z3_leaf_modules_by_name, u.set_z3_leaf_modules_by_suffix):
        with pytest.raises(ConfigError, match="'9'"):  # though another one is there
            by(model, ["1", "9"])
    assert u.get_z3_leaf_modules(model) == [model[1][0]]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_model_itself_may_be_marked(stage: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    u.set_z3_leaf_modules(model, [nn.Sequential])
    engine = deepspeed.initialize(
        model=model,
        config={"train_batch_size": 2, "zero_optimization": {"stage": stage}},
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        dist_init_required=False,
    )[0]
    before = engine.inner.full_param("0.weight")
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    assert not torch.equal(engine.inner.full_param("0.weight"), before)
