"""A count of updates for each leaf."""

import copy
from typing import Any

import pytest
import torch

import fzero
from fzero.optim.counts import common_count, has_counts, own_counts, recount_

PARAMS = {"w": torch.ones(3, 2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
OPTIMIZERS = {
    "adam": fzero.optim.adam(0.1, weight_decay=0.1),
    "adamw": fzero.optim.adamw(0.1),
    "amsgrad": fzero.optim.adamw(0.1, amsgrad=True),
    "lamb": fzero.optim.lamb(0.1),
    "chain": fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), fzero.optim.adamw(0.1)),
    "injected": fzero.optim.inject_hyperparams(fzero.optim.adamw)(lr=0.1),
    "muon": fzero.optim.muon(0.1),
    "adafactor": fzero.optim.adafactor(0.9),
    "damped": fzero.optim.sgd(0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "trace": fzero.optim.trace(0.9, dampening=0.5),
    "ema": fzero.optim.ema(0.9),
}
TORCH: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.9),
    "damped": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
}


def _grads(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {name: torch.randn_like(x) for name, x in PARAMS.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["update", "apply_"])
def test_counts_that_all_are_the_step_change_nothing(name: str, way: str) -> None:
    opt = OPTIMIZERS[name]
    runs = []
    for counted in (False, True):
        params, state = copy.deepcopy(PARAMS), opt.init(PARAMS)
        for step in range(6):
            if counted and step == 2:
                state = own_counts(state)
            if way == "update":
                updates, state = opt.update(_grads(step), state, params)
                params = {k: x + updates[k] for k, x in params.items()}
            else:
                assert opt.apply_ is not None
                state = opt.apply_(_grads(step), state, params)
        assert has_counts(state) == counted
        assert str(common_count(state)) == str(state) or counted
        runs.append(params)
    for key, value in runs[0].items():
        torch.testing.assert_close(runs[1][key], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", TORCH)
def test_a_leaf_that_comes_late_moves_as_torchs_does(name: str) -> None:
    opt, late = OPTIMIZERS[name], {"w": torch.zeros(()), "b": torch.zeros(())}
    params, theirs = copy.deepcopy(PARAMS), copy.deepcopy(PARAMS)
    reference = TORCH[name](list(theirs.values()))
    state = opt.init(params)
    for step in range(7):
        # one leaf's gradient is missing for four updates, the other's for a while in the middle
        grads = {k: g for k, g in _grads(step).items() if (step >= 4 if k == "b" else step != 5)}
        for k, p in theirs.items():
            p.grad = grads.get(k)
        reference.step()
        if not grads:
            continue
        counted = own_counts(state)
        only = _only(counted, set(grads))
        updates, only = opt.update(grads, only, {k: params[k] for k in grads})
        params |= {k: params[k] + u for k, u in updates.items()}
        state = _put(counted, only)
        for k in grads:
            late[k] += 1
        assert state.counts == late
        for k, p in theirs.items():
            torch.testing.assert_close(params[k], p.detach(), msg=f"{k} at {step}")


def _only(state: Any, names: set[str]) -> Any:
    """The state with these leaves alone, the others None, as a subset of leaves has it."""

    def pick(field: Any) -> Any:
        if type(field) is not dict:
            return field
        return {k: v if k in names else None for k, v in field.items()}

    return type(state)(*map(pick, state))


def _put(state: Any, new: Any) -> Any:
    """The state with what is new in it."""

    def put(old: Any, field: Any) -> Any:
        if type(old) is not dict:
            return field
        return old | {k: v for k, v in field.items() if v is not None}

    return type(state)(*map(put, state, new))


@pytest.mark.parametrize("name", ["adamw", "adafactor", "damped", "trace", "ema"])
@pytest.mark.parametrize("way", ["update", "apply_"])
def test_a_leaf_is_corrected_by_its_own_count(way: str, name: str) -> None:
    opt = OPTIMIZERS[name]
    params, alone = copy.deepcopy(PARAMS), {"b": PARAMS["b"].clone()}
    state, own = own_counts(opt.init(params)), opt.init(alone)
    counts = {"w": torch.tensor(9.0), "b": torch.tensor(0.0)}
    state = state._replace(step=torch.tensor(9.0), counts=counts)
    for step in range(3):
        grads = _grads(step)
        if way == "update":
            updates, state = opt.update(grads, state, params)
            params = {k: x + updates[k] for k, x in params.items()}
        else:
            assert opt.apply_ is not None
            state = opt.apply_(grads, state, params)
        updates, own = opt.update({"b": grads["b"]}, own, alone)
        alone = {"b": alone["b"] + updates["b"]}
    torch.testing.assert_close(params["b"], alone["b"], rtol=1e-12, atol=1e-14)
    assert (int(state.step), int(state.counts["w"]), int(state.counts["b"])) == (12, 12, 3)


def test_counts_are_made_once_and_can_be_taken_away() -> None:
    state = own_counts(OPTIMIZERS["adamw"].init(PARAMS))
    assert own_counts(state) is state
    state.step.fill_(4)
    recount_(state)
    assert {int(x) for x in state.counts.values()} == {4}
    assert not has_counts(common_count(state))


def test_what_corrects_by_no_count_has_none() -> None:
    optim = fzero.optim
    for opt in (optim.sgd(0.1, momentum=0.9), optim.sgd(0.1, dampening=0.5), optim.lion(0.1)):
        for one in (opt, optim.chain(opt, optim.ema(0.9, debias=False))):
            state = one.init(PARAMS)
            assert own_counts(state) == common_count(state) == state
            assert not has_counts(own_counts(state))
