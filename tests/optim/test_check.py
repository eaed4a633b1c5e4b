"""Hyperparameters out of range: the message names optimizer, field, value and rule."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.errors import ConfigError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("lr", [-0.1, NAN, INF, "3e-4", None, True])
@pytest.mark.parametrize(
    "make", [optim.sgd, optim.adam, optim.adamw, optim.lion, optim.scale_by_learning_rate]
)
def test_learning_rates(make, lr):
    with pytest.raises(ConfigError, match=f"{make.__name__}: lr={lr!r}, but lr must be a finite"):
        make(lr)


@pytest.mark.parametrize("groups", [False, True, dict])
def test_parameters_in_place_of_a_rate_are_told_in_a_line(groups: Any) -> None:
    named = dict(torch.nn.Linear(300, 300).named_parameters())
    given = named if groups is dict else [{"params": [*named.values()]}] if groups else [*named]
    with pytest.raises(ConfigError, match=r"adamw\(3e-4\).*init\(params\).*multi_tr") as raised:
        optim.adamw(given)  # pyright: ignore[reportArgumentType]
    assert len(str(raised.value)) < 500
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("beta", [-0.1, 1.0, 1.5, NAN, "0.9"])
@pytest.mark.parametrize("field", ["b1", "b2"])
@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "scale_by_adam", "scale_by_lion"])
def test_decays_of_means(name, field, beta):
    arguments = () if name.startswith("scale") else (0.1,)
    with pytest.raises(ConfigError, match=rf"{name}: {field}={beta!r}.*\[0, 1\)"):
        getattr(optim, name)(*arguments, **{field: beta})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.adam(0.1, eps=0), "adam: eps=0, .* > 0"),
        (lambda: optim.scale_by_adam(eps=-1e-8), "scale_by_adam: eps=-1e-08"),
        (lambda: optim.adamw(0.1, weight_decay=-1), "adamw: weight_decay=-1, .* >= 0"),
        (lambda: optim.lion(0.1, weight_decay=INF), "lion: weight_decay=inf"),
        (lambda: optim.sgd(0.1, momentum=-0.9), "sgd: momentum=-0.9"),
        (lambda: optim.sgd(0.1, dampening=NAN), "sgd: dampening=nan"),
        (lambda: optim.sgd(0.1, weight_decay=-0.1), "sgd: weight_decay=-0.1"),
        (lambda: optim.sgd(0.1, nesterov=True), "nesterov=True with momentum=0.0"),
        (lambda: optim.sgd(0.1, 0.9, True, dampening=0.1), "nesterov=True.*dampening=0.1"),
        (lambda: optim.trace(0.0, nesterov=True), "trace: nesterov=True with decay=0.0"),
        (lambda: optim.clip_by_global_norm(0), "clip_by_global_norm: max_norm=0, .* > 0"),
        (lambda: optim.add_decayed_weights(-0.1), "add_decayed_weights: weight_decay=-0.1"),
        (lambda: optim.scale(NAN), "scale: factor=nan"),
        (lambda: optim.scale_by_trust_ratio(2.0, 1.0), "min_ratio=2.0, max_ratio=1.0"),
        (lambda: optim.scale_by_trust_ratio(NAN), "min_ratio=nan"),
        (lambda: optim.chain(), "chain: no transforms"),
    ],
)
def test_other_fields(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("make", [optim.adamw, optim.sgd, optim.lion])
def test_the_state_of_a_step_is_not_that_of_its_optimizer(make: Any) -> None:
    opt, params = make(0.1), {"w": torch.ones(2)}
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), opt)
    _, opt_state = step_fn.init(params)
    with pytest.raises(fzero.ConfigError, match=r"the state is a OptState.*opt_state\.inner"):
        opt.update(params, opt_state, params)
