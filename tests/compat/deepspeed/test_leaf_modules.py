"""Modules that are gathered as one."""

import pytest
from torch import nn

import fzero.compat.deepspeed as deepspeed
from fzero.errors import ConfigError

u = deepspeed.utils


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ReLU())


def test_marked_modules_are_gathered_together() -> None:
    model = model_of()
    assert u.set_z3_leaf_modules(model, ["ReLU"]) == [model[2]]
    assert u.set_z3_leaf_modules_by_name(model, ["1"]) == [model[1]]
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
