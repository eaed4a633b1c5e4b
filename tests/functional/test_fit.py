"""What does not fit a module is named, with what would."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fzero
from fzero.functional.fit import check_device, check_fit, check_structure
from fzero.functional.slots import plan_slots

RIGHT = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({**RIGHT, "weight": torch.zeros(2, 1)}, r"\['weight'\]: shape \(2, 1\), the module needs"),
        ({"weight": RIGHT["weight"]}, r"\['bias'\]: missing; the module needs shape \(1,\)"),
        ({**RIGHT, "wieght": torch.zeros(1)}, r"no such name; near: 'weight'"),
        ({**RIGHT, "bias": 0.0}, r"\['bias'\]: a float is not a tensor"),
        ([1], "as a dict from name to tensor; got a list"),
    ],
)
def test_a_misfit_is_named(tensors: Any, said: str) -> None:
    plan = plan_slots(nn.Linear(2, 1))
    check_fit(plan, RIGHT, plan.params, "params")
    with pytest.raises(fzero.ShardError, match=said):
        check_fit(plan, tensors, plan.params, "params")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.append(nn.Identity()),
        lambda m: m[0].register_parameter("more", nn.Parameter(torch.zeros(1))),
        lambda m: m[0].register_buffer("more", torch.zeros(1)),
        lambda m: setattr(m[0], "bias", None) or delattr(m[0], "bias"),
    ],
    ids=["submodule", "parameter", "buffer", "removed"],
)
def test_a_module_that_was_rebuilt_is_refused(change: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 1))
    plan = plan_slots(module)
    check_structure(plan)
    change(module)
    with pytest.raises(fzero.ShardError, match="changed its submodules, parameters or buffers"):
        check_structure(plan)


def test_cached_parametrizations_are_refused() -> None:
    module = nn.Linear(2, 1)
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    plan = plan_slots(module)
    with parametrize.cached(), pytest.raises(fzero.TraceError, match="inside the module's forward"):
        check_structure(plan)


def test_buffers_without_values_are_refused_beside_params_that_have_some() -> None:
    plan = plan_slots(nn.BatchNorm1d(2))
    own = {"running_mean": torch.zeros(2, device="meta")}
    check_device(plan, {"weight": torch.zeros(2, device="meta")}, own)
    with pytest.raises(fzero.ShardError, match=r"'running_mean'.* meta device"):
        check_device(plan, {"weight": torch.zeros(2)}, own)
