"""An engine's precision is the step function's: masters, scale, what is skipped, what travels."""

import functools
import itertools
import math
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from fzero import Config, ConfigError, FzeroError, LossScale, Precision, tree
from fzero.distributed.dtensor import local_tensor
from tests.functional.test_owners import Net
from tests.laws import precision_reference as reference
from tests.laws.precision_reference import LR, MOMENTUM, STEPS, Case, Trained
from tests.ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
PRESETS = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = LossScale(init=2.0**8, window=3, hysteresis=2)
STAGES = pytest.mark.parametrize("stage", range(4))


class Model(nn.Module):
    """The reference's loss as a module."""

    def __init__(self) -> None:
        super().__init__()
        for name, x in reference.start().items():
            self.register_parameter(name, nn.Parameter(x))

    def forward(self, x: Tensor) -> Tensor:
        return reference.loss_of(dict(self.named_parameters()), x)


def _cases(world: int) -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """(name, case, config) of every preset and stage, with and without accumulation."""
    for preset, stage, accum in itertools.product(PRESETS, range(4), (1, 2)):
        for offload in (None, "cpu"):
            if offload and stage in (0, 2):
                continue
            if world == 1 and (stage in (0, 2) or accum == 1):  # of one rank all stages are alike
                continue
            scale = SCALE if preset == "fp16" else None
            poison = {4: world - 1, 5: 0} if scale else {}
            config = {"stage": stage, "precision": preset, "loss_scale": scale}
            name = f"{preset}, stage {stage}, accum {accum}, offload {offload}"
            config |= {"accum_steps": accum, "offload": offload}
            yield name, Case(PRESETS[preset], accum, scale, poison), config


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in (1, 2) for name, *_ in _cases(world)]
)
def test_masters_equal_those_kept_by_hand(world: int, name: str) -> None:
    ((case, config),) = [(case, config) for n, case, config in _cases(world) if n == name]
    ranks_first = config["stage"] >= 2
    expected = reference.train(case, world, ranks_first=ranks_first, mean_last=True)
    for ours in (by_name[name] for by_name in _trained(world)):
        assert isinstance(ours, Trained), ours
        assert ours.scales == expected.scales
        assert ours.skipped == expected.skipped
        for leaf, master in expected.masters.items():
            assert torch.equal(ours.masters[leaf], master), leaf
        assert ours.losses == pytest.approx(expected.losses, rel=1e-6, nan_ok=True)


@functools.cache  # one job for all cases
def _trained(world: int) -> list[dict[str, Trained | str]]:
    return run_ranks(world, _train_all, timeout=240)


def _train_all() -> dict[str, Trained | str]:
    found: dict[str, Trained | str] = {}
    world, rank = dist.get_world_size(), dist.get_rank()
    for name, case, config in _cases(world):
        try:
            found[name] = _train(case, Config(**config), rank)
        except Exception:
            found[name] = traceback.format_exc()
    return found


def _train(case: Case, cfg: Config, rank: int) -> Trained:
    engine = fzero.Engine(Model(), fzero.optim.sgd(LR, MOMENTUM), cfg)
    trained = Trained({}, [], [], [], [])
    for step in range(STEPS):
        scale = engine.state[1].loss_scale.scale.item() if cfg.scaling else 1.0
        before = [x.clone() for x in _untouchable(engine)]
        for x in case.batches(step, rank):
            engine.backward(engine(x))
        engine.step()
        metrics = engine.state[1].metrics
        assert all(x.dim() == 0 for x in metrics.values())
        assert metrics["loss_scale"].item() == scale
        trained.scales.append(scale)
        trained.skipped.append(bool(metrics["skipped"]))
        trained.losses.append(metrics["loss"].item())
        if metrics["skipped"]:
            after = _untouchable(engine)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    params, opt_state = engine.state
    assert int(opt_state.step) == STEPS - sum(trained.skipped)
    masters = params if opt_state.master is None else opt_state.master
    trained.masters = {k: x.float() for k, x in fzero.unshard(masters).items()}
    return trained


def _untouchable(engine: fzero.Engine) -> list[Tensor]:
    params, opt_state = engine.state
    kept = (params, opt_state.inner, opt_state.master, opt_state.step)
    return [local_tensor(x) for x in tree.leaves(kept)]


# ---------------------------------------------------------------------------- loss scale
class One(nn.Module):
    """One number, whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def one(stage: int, scale: Any) -> fzero.Engine:
    return fzero.Engine(One(), fzero.optim.sgd(1.0), Config(stage, loss_scale=scale))


def train(engine: fzero.Engine, x: float) -> None:
    engine.backward(engine(torch.tensor([x])))
    engine.step()


@STAGES
def test_the_effective_gradient_is_one_on_every_step(stage: int) -> None:
    engine = one(stage, LossScale(init=4.0, window=1))
    for step in range(1, 7):
        train(engine, 1.0)
        assert engine.full_params()["w"].item() == -step
        assert engine.state[1].metrics["loss_scale"].item() == 4.0 * 2 ** (step - 1)


@STAGES
def test_overflow_at_the_minimum_raises_and_changes_nothing(stage: int) -> None:
    engine = one(stage, LossScale(init=1.0, hysteresis=1))
    train(engine, 1.0)
    with pytest.raises(FzeroError, match="smallest loss scale"):
        train(engine, math.nan)
    assert engine.full_params()["w"].item() == -1.0
    assert int(engine.state[1].step) == 1
    train(engine, 1.0)
    assert engine.full_params()["w"].item() == -2.0


@STAGES
def test_an_external_scale_is_on_the_loss_already(stage: int) -> None:
    engine = one(stage, LossScale(init=8.0, external=True))
    (engine(torch.ones(1)) * 8.0).backward()
    grad = engine.full_grad("w")
    assert grad is not None
    assert grad.item() == 1.0
    engine.step()
    assert engine.full_params()["w"].item() == -1.0
    assert engine.state[1].metrics["grad_norm"].item() == 1.0


@STAGES
def test_a_static_scale_is_not_seen_in_the_result(stage: int) -> None:
    ends = []
    for scale in (128.0, None):
        cfg = Config(stage, loss_scale=scale, clip_norm=0.5)
        engine = fzero.Engine(Model(), fzero.optim.adamw(0.01), cfg)
        for step in range(4):
            engine.backward(engine(reference.batch(step, 0, 0, False)))
            engine.step()
        ends.append(engine.full_params())
    assert all(torch.equal(ends[0][name], x) for name, x in ends[1].items())


# ------------------------------------------------------------------------- autocast, dtypes
TOKENS = torch.tensor([0, 1, 2, 3])


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


@STAGES
def test_autocast_equals_torch_autocast(stage: int) -> None:
    engine = fzero.Engine(
        net(), fzero.optim.sgd(0.1), Config(stage, precision=Precision(autocast=BF16))
    )
    plain = net()
    with torch.autocast("cpu", BF16):
        expected = plain(TOKENS)
    out = engine(TOKENS)
    assert out.dtype == expected.dtype
    assert torch.equal(out, expected)
    out.float().square().mean().backward()
    expected.float().square().mean().backward()
    for name, p in plain.named_parameters():
        grad = engine.full_grad(name)
        assert p.grad is not None
        assert grad is not None
        torch.testing.assert_close(grad.float(), p.grad, rtol=2e-2, atol=1e-3)
    assert {x.dtype for x in tree.leaves(engine.state[0])} == {FP32}


@STAGES
def test_the_caller_s_autocast_is_respected_or_refused(stage: int) -> None:
    engine = fzero.Engine(net(), fzero.optim.sgd(0.1), Config(stage))
    plain = net()
    with torch.autocast("cpu", BF16):
        assert torch.equal(engine(TOKENS), plain(TOKENS))
    asked = fzero.Engine(
        net(), fzero.optim.sgd(0.1), Config(stage, precision=Precision(autocast=BF16))
    )
    with torch.autocast("cpu", BF16), pytest.raises(ConfigError, match=r"torch\.autocast"):
        asked(TOKENS)


def test_engines_of_different_precision_do_not_touch_each_other() -> None:
    configs: list[Any] = [None, "bf16", Precision(autocast=BF16), Precision(BF16, output=FP32)]

    def made() -> list[fzero.Engine]:
        opt = fzero.optim.adamw(1e-2)
        return [fzero.Engine(net(), opt, Config(precision=p)) for p in configs]

    def trained(engines: list[fzero.Engine]) -> None:
        outs = [engine(TOKENS) for engine in engines]
        for out in outs:
            out.float().square().mean().backward()
        for engine in engines:
            engine.step()

    alone, together = made(), made()
    for _ in range(3):
        for engine in alone:
            trained([engine])
        trained(together)
    for a, b in zip(alone, together, strict=True):
        ours, theirs = a.full_params(), b.full_params()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@STAGES
def test_output_is_cast(stage: int) -> None:
    cfg = Config(stage, precision=Precision(BF16, output=FP32))
    out = fzero.Engine(nn.Linear(3, 2), fzero.optim.sgd(0.1), cfg)(torch.ones(1, 3))
    assert out.dtype == FP32


@pytest.mark.parametrize("rounding", [True, False])
def test_stages_keep_the_same_low_masters(rounding: bool) -> None:
    ends = []
    for stage in range(4):
        precision = Precision(BF16, FP32, BF16, stochastic_rounding=rounding)
        cfg = Config(stage, precision=precision, accum_steps=2)
        engine = fzero.Engine(Model(), fzero.optim.adamw(0.01), cfg)
        for step in range(3):
            for micro in range(2):
                engine.backward(engine(reference.batch(step, 0, micro, False)))
            engine.step()
        params, opt_state = engine.state
        assert {x.dtype for x in tree.leaves(params)} == {BF16}
        moments = tree.leaves((opt_state.inner.mu, opt_state.inner.nu))
        assert {x.dtype for x in moments} == {FP32}
        ends.append(engine.full_params())
    for other in ends[1:]:
        assert all(torch.equal(other[name], x) for name, x in ends[0].items())


@pytest.mark.parametrize("precision", ["bf16", Precision(autocast=BF16)])
def test_a_step_function_goes_on_from_an_engine(precision: Any) -> None:
    cfg = Config(precision=precision)
    engine = fzero.Engine(Model(), fzero.optim.adamw(0.01), cfg)
    apply, _ = fzero.functionalize(Model())
    step_fn = fzero.make_train_step(apply, fzero.optim.adamw(0.01), cfg.replace(donate=False))
    if not isinstance(precision, str):  # Model holds its parameters itself: none is safe
        assert not any(leaf.compute for leaf in engine._parts.stepper.plan.sharding.layout)
    x = reference.batch(0, 0, 0, False)
    for _ in range(2):
        state = step_fn(*engine.state, x)
        engine.backward(engine(x))
        engine.step()
        for a, b in zip(tree.leaves(state[0]), tree.leaves(engine.state[0]), strict=True):
            assert torch.equal(local_tensor(a), local_tensor(b))


def _digits(stage: int) -> None:
    torch.manual_seed(0)
    engine = fzero.Engine(
        nn.Linear(5, 3), fzero.optim.sgd(0.1), fzero.Config(stage, precision="bf16")
    )
    engine(torch.ones(2, 5)).float().sum().backward()
    engine.step()
    full, state = engine.full_params(), engine.state_dict()
    assert list(full) == [name for name, _ in engine.module.named_parameters()]
    for name, value in full.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, engine.full_param(name))
        assert torch.equal(value, state[name])
        assert not torch.equal(value, value.bfloat16().float())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_parameters_have_the_digits_of_their_masters_at_every_stage(stage: int) -> None:
    run_ranks(2, _digits, stage)


class Collects(nn.Module):
    """Leaves what the loss needs in containers that it is given, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, penalties: list[Any], *, seen: dict[str, Any]) -> Tensor:
        hidden = self.inner(x).tanh()
        penalties.append(hidden.square().mean())
        seen["lists"][0].append(hidden)
        return self.outer(hidden)


@pytest.mark.parametrize("way", ["engine", "traced", "eager"])
@pytest.mark.parametrize("precision", [None, "bf16", Precision(param=torch.float64)])
@pytest.mark.quick("None-traced", "bf16-eager", "precision2-engine", "None-engine")
def test_what_a_module_puts_into_a_container_is_there(way: Any, precision: Any) -> None:
    torch.manual_seed(0)
    module, x = Collects(), torch.randn(3, 4)
    names: dict[str, Any] = {"tokens": torch.tensor([1]), "lists": ([],), "task": "qa"}

    def loss_of(run: Any, x: Tensor) -> Tensor:
        penalties: list[Any] = []
        seen = names | {"lists": ([],)}
        out = run(x, penalties, seen=seen)
        assert len(penalties) == len(seen["lists"][0]) == 1
        return out.square().mean() + penalties[0] + seen["lists"][0][0].square().sum()

    expected = loss_of(module, x)
    cfg = Config(precision=precision, executor="eager" if way == "eager" else "traced")
    if way == "engine":
        loss = loss_of(fzero.Engine(module, fzero.optim.sgd(0.1), cfg), x)
    else:
        apply, params = fzero.functionalize(module)
        step_fn = fzero.make_train_step(
            lambda params, x: loss_of(functools.partial(apply, params), x),
            fzero.optim.sgd(0.1),
            cfg,
        )
        params, opt_state = step_fn.init(params)
        params, opt_state = step_fn(params, opt_state, x)
        loss = opt_state.metrics["loss"]
    torch.testing.assert_close(loss.float(), expected, rtol=0.02, atol=0)
