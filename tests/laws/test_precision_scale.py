"""Loss scaling in a whole step: its rule under any overflows, and that nobody sees the scale."""

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import Config, FzeroError, LossScale, tree
from tests.laws import precision_reference as reference
from tests.numerics.test_loss_scale import Model as ScaleRule

STAGES = pytest.mark.parametrize("stage", range(4))
EXECUTORS = pytest.mark.parametrize("executor", ["traced", "eager"])


def linear(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Its gradient is x."""
    return (params["w"] * x).sum()


def make(scale: Any, **config: Any) -> tuple[fzero.TrainStep, Any]:
    """A step of SGD with learning rate 1 on one number, and its state."""
    step_fn = fzero.make_train_step(
        linear, fzero.optim.sgd(1.0), Config(loss_scale=scale, **config)
    )
    return step_fn, step_fn.init({"w": torch.zeros(1)})


RULES = st.builds(
    LossScale,
    init=st.sampled_from([1.0, 4.0, 2.0**16]),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    minimum=st.just(2.0**-40),
)


@settings(max_examples=25)
@given(rule=RULES, overflows=st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_step_follows_the_rule_on_any_pattern(rule: LossScale, overflows: list[bool]) -> None:
    step_fn, state = make(rule, executor="eager")
    model, good = ScaleRule(rule), 0
    for overflow in overflows:
        used = model.scale
        state = step_fn(*state, torch.tensor([math.inf if overflow else 1.0]))
        good += not overflow
        params, opt_state = state
        assert opt_state.metrics["loss_scale"].item() == used
        assert bool(opt_state.metrics["skipped"]) == overflow
        assert opt_state.loss_scale.scale.item() == model.step(not overflow)
        assert int(opt_state.step) == opt_state.inner.step.item() == good
        assert fzero.unshard(params)["w"].item() == -good


@STAGES
@EXECUTORS
def test_the_effective_gradient_is_one_on_every_step(stage: int, executor: Any) -> None:
    step_fn, state = make(LossScale(init=4.0, window=1), stage=stage, executor=executor)
    for step in range(1, 7):  # the scale grows on every one of them
        params, opt_state = state = step_fn(*state, torch.ones(1))
        assert fzero.unshard(params)["w"].item() == -step
        assert opt_state.metrics["grad_norm"].item() == 1.0
        assert opt_state.metrics["loss_scale"].item() == 4.0 * 2 ** (step - 1)


@STAGES
@pytest.mark.parametrize("scale", [128.0, LossScale(init=128.0, external=True)])
def test_a_scale_is_not_seen_in_the_result(stage: int, scale: Any) -> None:
    external = isinstance(scale, LossScale)
    ours, plain = (
        _train(functools.partial(_loss, factor=factor), Config(stage, clip_norm=0.5, loss_scale=s))
        for factor, s in ((128.0 if external else 1.0, scale), (1.0, None))
    )
    assert tree.leaves(ours[0])
    for a, b in zip(tree.leaves(ours), tree.leaves(plain), strict=True):
        assert torch.equal(a, b)


def _loss(params: Any, x: Tensor, factor: float) -> Tensor:
    return reference.loss_of(params, x) * factor


def _train(model_fn: Any, cfg: Config) -> Any:
    """Parameters, optimizer state and metrics after five steps, without the scale."""
    step_fn = fzero.make_train_step(model_fn, fzero.optim.adamw(0.01), cfg)
    state = step_fn.init(reference.start())
    metrics = []
    for step in range(5):
        state = step_fn(*state, reference.batch(step, 0, 0, False))
        metrics.append({k: v for k, v in state[1].metrics.items() if k != "loss_scale"})
    return fzero.unshard((state[0], state[1].inner)), metrics


def test_an_external_scale_is_what_the_caller_sets() -> None:
    step_fn, (params, opt_state) = make(LossScale(init=2.0, external=True))
    for scale in (2.0, 512.0, 0.25):
        state = opt_state.loss_scale._replace(scale=torch.tensor(scale))
        opt_state = opt_state._replace(loss_scale=state)
        params, opt_state = step_fn(params, opt_state, torch.ones(1) * scale)
        assert opt_state.metrics["grad_norm"].item() == 1.0
        assert opt_state.loss_scale.scale.item() == scale
    assert fzero.unshard(params)["w"].item() == -3.0


@STAGES
@EXECUTORS
def test_overflow_at_the_minimum_raises_and_changes_nothing(stage: int, executor: Any) -> None:
    rule = LossScale(init=2.0, hysteresis=2, minimum=1.0)
    step_fn, state = make(rule, stage=stage, executor=executor)
    bad = torch.tensor([math.nan])
    for scale in (2.0, 1.0):  # the first is forgiven, the second halves the scale
        state = step_fn(*state, bad)
        assert state[1].loss_scale.scale.item() == scale
    state = step_fn(*state, torch.ones(1))
    before = [x.clone() for x in tree.leaves(fzero.unshard((state[0], state[1].inner)))]
    with pytest.raises(FzeroError, match=r"smallest loss scale.*LossScale\(minimum.*bf16"):
        step_fn(*state, bad)
    after = tree.leaves(fzero.unshard((state[0], state[1].inner)))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    params, opt_state = step_fn(*state, torch.ones(1))
    assert fzero.unshard(params)["w"].item() == -2.0
    assert int(opt_state.step) == 2


def test_a_static_scale_has_no_minimum_to_raise_at() -> None:
    step_fn, state = make(8.0)
    for _ in range(4):
        state = step_fn(*state, torch.tensor([math.inf]))
    assert int(state[1].step) == 0


@EXECUTORS
def test_an_overflow_leaves_the_model_s_state(executor: Any) -> None:
    def model_fn(params: Any, mean: Tensor, x: Tensor) -> Any:
        return linear(params, x), 0.5 * mean + 0.5 * x.mean()

    cfg = Config(precision="fp16", loss_scale=2.0, executor=executor)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(1.0), cfg)
    state = step_fn.init({"w": torch.zeros(1)}, torch.tensor(1.0))
    state = step_fn(*state, torch.tensor([math.inf]))
    assert state[1].model_state.item() == 1.0
    state = step_fn(*state, torch.tensor([3.0]))
    assert state[1].model_state.item() == 2.0


@STAGES
def test_a_scaled_gradient_in_float16_is_unscaled_in_float32(stage: int) -> None:
    # below what float16 holds; times the scale it is not
    cfg = Config(
        stage,
        precision=fzero.Precision(torch.float16, torch.float16, torch.float32),
        loss_scale=2.0**15,
    )
    step_fn = fzero.make_train_step(linear, fzero.optim.sgd(1.0), cfg)
    state = step_fn.init({"w": torch.zeros(2)})
    params, opt_state = step_fn(*state, torch.full((2,), 1.5 * 2.0**-26))
    masters = params if opt_state.master is None else opt_state.master
    assert fzero.unshard(masters)["w"].tolist() == [-1.5 * 2.0**-26] * 2


@STAGES
@pytest.mark.parametrize("p", [1.0, 2.0, 7.0, math.inf])
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30])
def test_a_zero_or_tiny_norm_is_no_error(stage: int, p: float, size: float) -> None:
    cfg = Config(stage, clip_norm=1.0, norm_type=p, executor="eager")
    step_fn = fzero.make_train_step(linear, fzero.optim.sgd(1.0), cfg)
    state = step_fn.init({"w": torch.zeros(3)})
    params, opt_state = step_fn(*state, torch.full((3,), size))
    assert opt_state.metrics["grad_norm"].isfinite()
    assert not opt_state.metrics["nonfinite"]
    assert torch.equal(fzero.unshard(params)["w"], torch.full((3,), -size))
