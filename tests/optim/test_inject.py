"""Hyperparameters in the state: read, set between steps, and nothing is staged out anew."""

from typing import Any

import pytest
import torch

import fzero
from fzero import Config, optim
from fzero.errors import ConfigError


def _step(opt: Any, **config: Any) -> Any:
    return fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), opt, Config(**config))


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("donate", [True, False])
def test_what_is_set_between_steps_counts_in_the_next(executor: str, donate: bool) -> None:
    opt = optim.inject_hyperparams(optim.sgd)(lr=0.5)
    step_fn = _step(opt, executor=executor, donate=donate)
    params, state = step_fn.init({"w": torch.zeros(2, dtype=torch.float64)})
    x = torch.ones(2, dtype=torch.float64)
    params, state = step_fn(params, state, x)
    assert fzero.unshard(params)["w"].tolist() == [-0.5, -0.5]
    assert state.inner.hyperparams["lr"] == 0.5
    state.inner.hyperparams["lr"].fill_(0.25)
    params, state = step_fn(params, state, x)
    state.inner.hyperparams["lr"] = torch.tensor(0.125, dtype=torch.float64)
    params, state = step_fn(params, state, x)
    assert fzero.unshard(params)["w"].tolist() == [-0.875, -0.875]


def test_a_set_rate_records_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = optim.inject_hyperparams(optim.adamw)(lr=0.5)
    step_fn = _step(opt)
    state = step_fn(*step_fn.init({"w": torch.zeros(2)}), torch.ones(2))
    with monkeypatch.context() as patch:
        patch.setattr("fzero.transforms.staging.trace_program", None)
        for rate in (0.25, 0.125):
            state[1].inner.hyperparams["lr"].fill_(rate)
            state = step_fn(*state, torch.ones(2))


def test_schedules_are_shown_as_they_were_used() -> None:
    opt = optim.inject_hyperparams(optim.sgd)(lr=lambda step: 1.0 / (step.double() + 1))
    step_fn = _step(opt)
    state = step_fn.init({"w": torch.zeros(1)})
    for number in range(3):
        state = step_fn(*state, torch.ones(1))
        assert state[1].inner.hyperparams["lr"] == 1 / (number + 1)


def test_the_engine_tells_the_injected_rate() -> None:
    engine = fzero.Engine(torch.nn.Linear(2, 1), optim.inject_hyperparams(optim.adamw)(lr=0.5))
    assert engine.lr == 0.5
    engine.state[1].inner.hyperparams["lr"].fill_(0.25)
    assert engine.lr == 0.25


def test_a_factory_of_the_users_own_passes_tensors_on() -> None:
    def make(rate: Any, decay: Any, b2: float) -> Any:
        return optim.chain(
            optim.scale_by_adam(b2=b2),
            optim.add_decayed_weights(decay),
            optim.scale_by_learning_rate(rate),
        )

    opt = optim.inject_hyperparams(make)(0.1, decay=0.5, b2=0.9)
    params = {"w": torch.ones(2, dtype=torch.float64)}
    state = opt.init(params)
    assert sorted(state.hyperparams) == ["decay", "rate"]
    updates, _ = opt.update(params, state, params)
    plain = make(0.1, 0.5, 0.9)
    wanted, _ = plain.update(params, plain.init(params), params)
    torch.testing.assert_close(updates["w"], wanted["w"], rtol=1e-12, atol=1e-12)


def test_what_can_not_be_injected_or_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="scale takes none of factor as a 0-d tensor"):
        optim.inject_hyperparams(optim.scale)(factor=2.0)
    with pytest.raises(ConfigError, match="adamw: lr=-1"):
        optim.inject_hyperparams(optim.adamw)(lr=-1)
    opt = optim.inject_hyperparams(optim.sgd)(lr=0.5)
    state = opt.init([torch.ones(1)])
    state.hyperparams["lr"] = 0.1
    with pytest.raises(ConfigError, match=r"hyperparams\['lr'\] is 0.1, and must be a 0-d tensor"):
        opt.update([torch.ones(1)], state)


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_number_in_a_steps_state_is_refused(executor: str) -> None:
    step_fn = _step(optim.inject_hyperparams(optim.sgd)(lr=0.5), executor=executor)
    params, state = step_fn(*step_fn.init({"w": torch.zeros(2)}), torch.ones(2))
    state.inner.hyperparams["lr"] = 0.25
    with pytest.raises(fzero.FzeroError, match="hyperparams"):
        step_fn(params, state, torch.ones(2))


MOMENTA = (0.9, 0.5, 0.95, 0.8, 0.85)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "dampening": 0.3}),
        ("Adam", {}),
        ("AdamW", {"weight_decay": 0.1}),
    ],
)
def test_a_momentum_that_is_set_is_that_of_the_next_update(kind: str, options: Any) -> None:
    make = optim.inject_hyperparams(getattr(optim, kind.lower()), momentum=True)
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    theirs = getattr(torch.optim, kind)([param], lr=0.1, **options)
    (group,) = theirs.param_groups
    opt, params = make(0.1, **options), {"w": param.detach().clone()}
    state = opt.init(params)
    name = "momentum" if kind == "SGD" else "b1"
    assert set(state.hyperparams) >= {"lr", name}
    for step, momentum in enumerate(MOMENTA):
        state.hyperparams[name].fill_(momentum)
        group |= {"momentum": momentum} if kind == "SGD" else {"betas": (momentum, 0.999)}
        param.grad = torch.tensor([1.0, 0.5 - step, step * 0.3], dtype=torch.float64)
        updates, state = opt.update({"w": param.grad}, state, params)
        params = {"w": params["w"] + updates["w"]}
        theirs.step()
        torch.testing.assert_close(params["w"], param.detach(), rtol=1e-13, atol=1e-13)


def test_lions_momentum_is_of_the_next_update_alone() -> None:
    opt = optim.inject_hyperparams(optim.lion, momentum=True)(0.1)
    params = {"w": torch.ones(2, dtype=torch.float64)}
    state, plain = opt.init(params), optim.lion(0.1).init(params)
    for step, momentum in enumerate(MOMENTA):
        grads = {"w": torch.tensor([1.0 - step, 0.2], dtype=torch.float64)}
        state.hyperparams["b1"].fill_(momentum)
        found, state = opt.update(grads, state, params)
        wanted, plain = optim.lion(0.1, b1=momentum).update(grads, plain, params)
        assert torch.equal(found["w"], wanted["w"])


def test_momentum_is_injected_where_it_is_asked_for() -> None:
    assert set(optim.inject_hyperparams(optim.adam)(0.1, b1=0.8).init([]).hyperparams) == {"lr"}
    asked = optim.inject_hyperparams(optim.adam, momentum=True)(0.1)
    assert asked.init([]).hyperparams["b1"] == 0.9  # not given: its default
    with pytest.raises(ConfigError, match="lamb takes no momentum"):
        optim.inject_hyperparams(optim.lamb, momentum=True)(0.1)
    with pytest.raises(ConfigError, match=r"sgd: momentum=-1"):
        optim.inject_hyperparams(optim.sgd, momentum=True)(0.1, momentum=-1)
    with pytest.raises(ConfigError, match="nesterov"):
        optim.inject_hyperparams(optim.sgd, momentum=True)(0.1, nesterov=True)
