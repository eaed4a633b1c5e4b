"""Modules that are gathered as one."""

from typing import Any

import pytest
import torch
from torch import nn

import fzero.compat.deepspeed as deepspeed
from fzero.compat.deepspeed.leaf_modules import mark_configured
from fzero.compat.deepspeed.settings import settings
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


@pytest.mark.parametrize(
    ("asked", "marked"),
    [
        ({"classes": ["Sequential"]}, {"*", "1"}),
        ({"classes": "torch.nn.modules.linear.Linear"}, {"0", "1.0"}),
        ({"names": ["1"], "name_suffixes": ["1.0"]}, {"1", "1.0"}),
        ({"classes": ["ReLU"]}, set()),  # without parameters
        ({"classes": None}, set()),
        ({}, set()),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_configuration_marks_modules(asked: dict[str, Any], marked: set[str], stage: int) -> None:
    zero = {"stage": stage, "leaf_module": asked}
    engine = deepspeed.initialize(
        model=model_of(), config={"zero_optimization": zero}, dist_init_required=False
    )[0]
    assert set(engine.inner.cfg.gather_together) == marked
    engine(torch.ones(1, 2)).sum().backward()


def test_what_a_configuration_marks_in_vain_is_told() -> None:
    zero = {"stage": 3, "leaf_module": {"classes": ["Linear", "Experts"], "names": ["0", "9"]}}
    with pytest.warns(UserWarning, match="leaf_module") as told:
        deepspeed.initialize(
            model=model_of(), config={"zero_optimization": zero}, dist_init_required=False
        )
    said = " ".join(str(one.message) for one in told)
    assert "leaf_module.classes: the model has no Experts" in said
    assert "leaf_module.names: the model has no 9" in said


@pytest.mark.parametrize("wrong", [{"clases": ["Linear"]}, {"classes": [nn.Linear]}, ["Linear"]])
def test_another_section_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.leaf_module"):
        settings({"zero_optimization": {"leaf_module": wrong}}, 1)


def test_experts_of_transformers_are_marked_as_deepspeed_marks_them() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_local_experts": 2}
    block = MixtralSparseMoeBlock(transformers.MixtralConfig(**shape))
    for asked, marked in (({}, [block]), ({"classes": []}, [])):
        model = nn.Sequential(nn.Linear(8, 8), block)
        u.set_z3_leaf_module(block, False)
        mark_configured(model, asked)
        assert u.get_z3_leaf_modules(model) == marked
