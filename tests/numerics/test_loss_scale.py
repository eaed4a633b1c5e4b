"""The loss scale's rule, against a model of it in plain Python."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.errors import ConfigError, FzeroError
from fzero.numerics import loss_scale
from fzero.numerics.loss_scale import LossScale, LossScaleState


class Model:
    """DeepSpeed's scaler in its words, where `settle` is 1: iterations, and the last overflow's."""

    def __init__(self, cfg: LossScale) -> None:
        self.cfg, self.scale, self.left = cfg, cfg.init, cfg.hysteresis
        self.iteration, self.last_overflow = 0, -1

    def step(self, finite: bool) -> float:
        cfg = self.cfg
        if cfg.dynamic and not finite:
            if self.left == 1:
                self.scale = max(self.scale * cfg.backoff, cfg.minimum)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        elif cfg.dynamic:
            stable = self.iteration - self.last_overflow - cfg.settle
            if stable > 0 and stable % cfg.window == 0:
                self.scale *= cfg.growth
                self.left = cfg.hysteresis
        self.iteration += 1
        return self.scale


rules = st.builds(
    LossScale,
    init=st.sampled_from([1.0, 4.0, 2.0**16]),
    dynamic=st.sampled_from([True, True, True, False]),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    minimum=st.sampled_from([0.25, 1.0]),
    settle=st.integers(0, 2),
    stops=st.sampled_from([True, True, False]),
)


@settings(max_examples=60)
@given(cfg=rules, pattern=st.lists(st.booleans(), max_size=30))
def test_follows_the_rule_on_any_pattern(cfg: LossScale, pattern: list[bool]) -> None:
    state, model = loss_scale.init(cfg), Model(cfg)
    for finite in pattern:
        state = loss_scale.update(state, torch.tensor(finite), cfg)
        assert state.scale.item() == model.step(finite)
        assert state.hysteresis.item() == model.left


@settings(max_examples=40)
@given(cfg=rules, pattern=st.lists(st.booleans(), max_size=30))
def test_is_exhausted_by_an_overflow_that_cannot_back_off(cfg, pattern) -> None:
    state, model = loss_scale.init(cfg), Model(cfg)
    for finite in pattern:
        stuck = not finite and cfg.dynamic and model.left == 1 and model.scale <= cfg.minimum
        found = loss_scale.exhausted(state, torch.tensor(finite), cfg)
        assert found.item() == (stuck and cfg.stops)
        state = loss_scale.update(state, torch.tensor(finite), cfg)
        model.step(finite)


def test_an_external_scale_never_moves() -> None:
    cfg = LossScale(init=0.5, external=True)  # below the minimum, which is not looked at
    state = loss_scale.init(cfg)
    for finite in (torch.tensor(True), torch.tensor(False)):
        assert loss_scale.update(state, finite, cfg) is state
        assert not loss_scale.exhausted(state, finite, cfg)


def test_a_flag_on_the_cpu_raises_at_once() -> None:
    watch = loss_scale.Watch()
    for _ in range(5):
        watch.look()
        watch.add(torch.tensor(False), loss_scale.at_minimum)
    with pytest.raises(FzeroError, match="smallest loss scale"):
        watch.add(torch.tensor(True), loss_scale.at_minimum)
    watch.look()


@settings(max_examples=20)
@given(cfg=rules, finite=st.booleans())
def test_update_is_pure_and_keeps_dtypes(cfg: LossScale, finite: bool) -> None:
    before = loss_scale.init(cfg)
    copies = [t.clone() for t in before]
    after = loss_scale.update(before, torch.tensor(finite), cfg)
    assert all(torch.equal(a, b) for a, b in zip(before, copies, strict=True))
    assert [t.dtype for t in after] == [torch.float32, torch.int32, torch.int32]
    assert all(t.shape == () for t in after)


def test_growth_stops_where_float32_ends() -> None:
    cfg = LossScale(init=2.0**127, window=1)
    state = loss_scale.update(loss_scale.init(cfg), torch.tensor(True), cfg)
    assert state.scale.item() == 2.0**127


def test_stages_out_without_reading_a_value() -> None:
    cfg = LossScale(init=8.0, window=2, hysteresis=1)
    args = (*loss_scale.init(cfg), torch.tensor(True))

    def step(scale, good_steps, hysteresis, finite):
        return loss_scale.update(LossScaleState(scale, good_steps, hysteresis), finite, cfg)

    with FakeTensorMode() as mode:  # a fake tensor has no value to read
        graph = make_fx(step)(*(mode.from_tensor(t) for t in args))
    for finite in (True, False):
        args = (*args[:3], torch.tensor(finite))
        for staged, eager in zip(graph(*args), step(*args), strict=True):
            assert torch.equal(staged, eager)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init", 0.0),
        ("init", float("inf")),
        ("init", 1e39),  # infinite in float32
        ("init", "8"),
        ("dynamic", 1),
        ("external", None),
        ("growth", 1.0),
        ("backoff", 1.0),
        ("backoff", 0),
        ("window", 0),
        ("window", 2.0),
        ("window", True),
        ("hysteresis", 0),
        ("settle", -1),
        ("minimum", 0.0),
    ],
)
def test_a_bad_field_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"LossScale.{field}={value!r}: must be")):
        LossScale(**{field: value})  # type: ignore[arg-type]


def test_a_start_below_the_minimum_names_both() -> None:
    with pytest.raises(ConfigError, match=r"LossScale.init=0.5 .*LossScale.minimum=1.0"):
        LossScale(init=0.5)
    assert LossScale(init=0.5, dynamic=False).init == 0.5


def test_resolve_what_users_write() -> None:
    assert loss_scale.resolve(None) is None
    assert loss_scale.resolve("dynamic") == LossScale()
    assert loss_scale.resolve(128) == LossScale(init=128.0, dynamic=False)
    assert loss_scale.resolve(LossScale(window=7)) == LossScale(window=7)
    for bad in ("dynamics", 0, -1.0, True, float("nan")):
        with pytest.raises(ConfigError, match="loss_scale="):
            loss_scale.resolve(bad)
