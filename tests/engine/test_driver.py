"""What moves an engine: nothing but its engine keeps it alive, and users meet the engine alone."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from tests.engine.parity import SGD

# stage 3 on one rank has lazy parameters with a compute dtype only
KINDS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "accum_steps": 2},
    {"stage": 2},
    {"stage": 3, "precision": "bf16"},
]

SURFACE = {
    *("backward", "scale", "no_sync", "step", "zero_grad", "is_gradient_accumulation_boundary"),
    *("eval", "train", "local_forward", "gathered"),
    *("state", "state_dict", "load_state_dict", "full_params", "full_grad", "parameters"),
    *("module", "cfg", "device", "lr", "metrics", "global_steps", "release"),
}


@pytest.mark.parametrize("fields", KINDS)
def test_module_parameters_and_graph_do_not_keep_it_alive(fields: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    engine = fzero.Engine(model, SGD(), fzero.Config(**fields))
    out = engine(torch.ones(2, 3))
    out.sum().backward(retain_graph=True)
    driver = weakref.ref(engine._driver)
    del engine
    assert driver() is None
    out.sum().backward()  # what is left of it tells nobody
    assert model.weight.grad is not None


def test_the_public_names_of_an_engine_are_what_it_documents() -> None:
    engine = fzero.Engine(nn.Linear(3, 2))
    assert {name for name in dir(engine) if not name.startswith("_")} == SURFACE
