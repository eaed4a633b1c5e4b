"""What an optimizer does to a leaf depends on no stage, world or executor: 20 steps of each.

The references are torch.optim's, or the papers' algorithms written plainly on whole leaves; all are
trained at once, each on a tree of its own with every kind of leaf.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero import Config, optim, tree
from fzero.errors import ShardError
from tests.ranks import run_ranks

F64 = torch.float64
STEPS = 20
LR = 0.05
# uneven in every world, along either dim; a vector shorter than the ranks; 0-d; empty; three dims
SHAPES = {
    "embed.weight": (7, 5),
    "up.weight": (5, 9),
    "down.weight": (16, 3),
    "square.weight": (6, 6),
    "bias": (3,),
    "gain": (),
    "empty": (0, 4),
    "cube": (3, 2, 5),
    "frozen": (3, 4),
}
FEW = ("up.weight", "bias", "frozen")  # of elementwise optimizers, which have laws of their own
WHOLE = ("adafactor", "lamb", "lamb within bounds", "muon")
Named = Mapping[str, Tensor]


class Plain:
    """A reference: a function from each leaf's gradient and state to its update, by name."""

    def __init__(self, params: Named, rule: Callable[..., Tensor], start: Callable[..., Any]):
        self.params, self.rule = params, rule
        self.state = {name: start(p.detach()) for name, p in params.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for name, p in self.params.items():
            p.add_(self.rule(name, p, p.grad, self.state[name], self.steps))


def _moments(p: Tensor) -> list[Tensor]:
    return [torch.zeros_like(p), torch.zeros_like(p)]


def _adam(g: Tensor, state: list[Tensor], t: int, b1: float, b2: float, eps: float) -> Tensor:
    m, v = state
    m.mul_(b1).add_((1 - b1) * g)
    v.mul_(b2).add_((1 - b2) * g * g)
    return (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)


def _lamb(name: str, p: Tensor, g: Tensor, state: list[Tensor], t: int) -> Tensor:
    """You et al., arXiv:1904.00962, algorithm 2."""
    r = _adam(g, state, t, 0.9, 0.999, 1e-6) + 0.1 * p
    size, length = p.norm(), r.norm()
    trust = size / length if size > 0 and length > 0 else 1.0
    return -LR * trust * r


def _bounded(name: str, p: Tensor, g: Tensor, state: list[Tensor], t: int) -> Tensor:
    """DeepSpeed's, but for the rate that makes up for its moments."""
    m, v = state
    m.mul_(0.9).add_(0.1 * g)
    v.mul_(0.999).add_(0.001 * g * g)
    r = m / (v.sqrt() + 1e-6) + 0.1 * p
    size, length = p.norm(), r.norm()
    return -LR * (min(max(size / length, 0.5), 1.0) if size > 0 and length > 0 else 1.0) * r


def _muon(name: str, p: Tensor, g: Tensor, state: list[Tensor], t: int) -> Tensor:
    """Jordan, 2024, in float64; AdamW for what is no matrix."""
    if p.dim() != 2 or "embed" in name:
        return -LR * (_adam(g, state, t, 0.9, 0.95, 1e-8) + 0.1 * p)
    m = state[0]
    m.mul_(0.95).add_(0.05 * g)
    x = 0.05 * g + 0.95 * m
    if x.numel() == 0:
        return x
    x = x / x.norm()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if tall else x
    return -LR * (0.2 * max(p.shape) ** 0.5 * x + 0.1 * p)


def _ema(name: str, p: Tensor, g: Tensor, state: list[Tensor], t: int) -> Tensor:
    state[0].mul_(0.8).add_(0.2 * g)
    return -LR * state[0] / (1 - 0.8**t)


def _rate(t: int) -> float:
    return LR / t


def _injected(name: str, p: Tensor, g: Tensor, state: list[Tensor], t: int) -> Tensor:
    return -_rate(t) * (g + 0.1 * p)


def _torch(make: Any, **options: Any) -> Callable[[Named], Any]:
    # torch's Adafactor divides by the number of elements
    return lambda params: make([p for p in params.values() if p.numel()], **options)


def _plain(rule: Callable[..., Tensor]) -> Callable[[Named], Any]:
    return lambda params: Plain(params, rule, _moments)


OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[Named], Any]]] = {
    "adam l2": (
        lambda: optim.adam(LR, weight_decay=0.1),
        _torch(torch.optim.Adam, lr=LR, weight_decay=0.1),
    ),
    "amsgrad": (
        lambda: optim.adamw(LR, b2=0.5, weight_decay=0.1, amsgrad=True),
        _torch(torch.optim.AdamW, lr=LR, betas=(0.9, 0.5), weight_decay=0.1, amsgrad=True),
    ),
    "adafactor": (
        lambda: optim.adafactor(0.3, weight_decay=0.1),
        _torch(torch.optim.Adafactor, lr=0.3, weight_decay=0.1),
    ),
    "lamb": (lambda: optim.lamb(LR, weight_decay=0.1), _plain(_lamb)),
    "lamb within bounds": (
        lambda: optim.chain(
            optim.scale_by_adam(eps=1e-6, bias_correction=False),
            optim.add_decayed_weights(0.1),
            optim.scale_by_trust_ratio(0.5, 1.0),
            optim.scale_by_learning_rate(LR),
        ),
        _plain(_bounded),
    ),
    "muon": (lambda: optim.muon(LR), _plain(_muon)),
    "ema": (
        lambda: optim.chain(optim.ema(0.8), optim.scale_by_learning_rate(LR)),
        _plain(_ema),
    ),
    "injected": (
        lambda: optim.inject_hyperparams(optim.sgd)(
            lr=lambda step: LR / (step.double() + 1), weight_decay=0.1
        ),
        _plain(_injected),
    ),
}


def start() -> dict[str, dict[str, Tensor]]:
    """The same leaves for every optimizer."""
    found = {}
    for label in OPTIMIZERS:
        generator = torch.Generator().manual_seed(5)
        found[label] = {
            name: torch.randn(shape, generator=generator, dtype=F64)
            for name, shape in SHAPES.items()
            if label in WHOLE or name in FEW
        }
    return found


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    """Its gradient depends on the parameters, and differs from rank to rank."""
    flat = torch.cat([x.reshape(-1) for leaves in params.values() for x in leaves.values()])
    waves = torch.sin(torch.arange(flat.numel(), dtype=F64) + batch[:, None])
    return (waves * torch.tanh(flat)).sum() / len(batch) + 0.1 * (flat * flat).sum()


def batches(world: int) -> Tensor:
    """(steps, world * 2)."""
    return torch.randn(STEPS, world * 2, generator=torch.Generator().manual_seed(6), dtype=F64)


@functools.cache
def expected(world: int) -> dict[str, dict[str, Tensor]]:
    """Every optimizer in plain torch on all ranks' batches."""
    params = start()
    trained = {
        label: {k: v.requires_grad_() for k, v in leaves.items() if k != "frozen"}
        for label, leaves in params.items()
    }
    theirs = [make(trained[label]) for label, (_, make) in OPTIMIZERS.items()]
    for batch in batches(world):
        for leaves in trained.values():
            for x in leaves.values():
                x.grad = None
        loss_fn(params, batch).backward()
        for one in theirs:
            one.step()
    return tree.map(lambda x: x.detach(), params)


def together() -> Any:
    """All of them as one optimizer, each on its own tree."""
    made = {label: make() for label, (make, _) in OPTIMIZERS.items()}
    return optim.multi_transform(made, {label: label for label in OPTIMIZERS})


def train(config: Mapping[str, Any], mine: Tensor) -> Any:
    cfg = Config(**config, frozen=["*.frozen"])
    step_fn = fzero.make_train_step(loss_fn, together(), cfg)
    state = step_fn.init(start())
    for batch in mine:
        state = step_fn(*state, batch)
    return fzero.unshard(state[0])


STAGES: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}
OTHERS: dict[str, dict[str, Any]] = {
    "eager": {"stage": 3, "executor": "eager"},
    "not donated": {"stage": 3, "donate": False},
}
CONFIGS = STAGES | OTHERS
RUNS = {1: ("stage 3", "not donated"), 2: (*STAGES, "eager"), 4: ("stage 3",)}


def _all(names: tuple[str, ...]) -> dict[str, Any]:
    """On a rank: by config, what came out."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = batches(world)[:, rank * 2 : rank * 2 + 2]
    return {name: train(CONFIGS[name], mine) for name in names}


@functools.cache
def _trained(world: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    if world == 1:
        return [{name: train(CONFIGS[name], batches(1)) for name in names}]
    return run_ranks(world, _all, names, timeout=240)


def _check(world: int, names: tuple[str, ...], config: str) -> None:
    for rank in _trained(world, names):
        for label, wanted in expected(world).items():
            for name, x in rank[config][label].items():
                told = f"{label}: {name}"
                torch.testing.assert_close(
                    x, wanted[name], rtol=1e-10, atol=1e-10, msg=lambda m, t=told: f"{t}: {m}"
                )
                still = torch.equal(x, start()[label][name])
                assert still == (name in ("frozen", "empty")), f"{told} was not trained, or was"


@pytest.mark.parametrize(
    ("world", "config"), [(world, name) for world, names in RUNS.items() for name in names]
)
def test_twenty_steps_equal_the_reference(world: int, config: str) -> None:
    _check(world, RUNS[world], config)


@pytest.mark.slow
@pytest.mark.parametrize("config", STAGES)
def test_twenty_steps_equal_the_reference_on_four_ranks(config: str) -> None:
    _check(4, tuple(STAGES), config)


def _outside(staged: bool) -> Any:
    """On a rank: the same with `init` and `update` called on trees of shards, outside of a step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    opt, params = together(), fzero.shard(start())
    trained = lambda values: {  # noqa: E731
        label: {k: None if k == "frozen" else x for k, x in leaves.items()}
        for label, leaves in values.items()
    }

    def step(params: Any, state: Any, batch: Tensor) -> tuple[Any, Any]:
        _, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, state = opt.update(trained(grads), state, trained(params))
        return fzero.apply_updates(params, updates), state

    run = fzero.jit(step) if staged else step
    state = opt.init(trained(params))
    for batch in batches(world)[:, rank * 2 : rank * 2 + 2]:
        params, state = run(params, state, batch)
    return fzero.unshard(params)


@pytest.mark.parametrize("staged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_trees_of_shards_are_updated_outside_of_a_step_too(staged: bool) -> None:
    for found in run_ranks(2, _outside, staged, timeout=240):
        for label, wanted in expected(2).items():
            for name, x in found[label].items():
                told = f"{label}: {name}"
                torch.testing.assert_close(
                    x, wanted[name], rtol=1e-10, atol=1e-10, msg=lambda m, t=told: f"{t}: {m}"
                )


def _saved(folder: Path) -> Any:
    """On a rank: ten steps, with a checkpoint after five."""
    rank = dist.get_rank()
    step_fn = fzero.make_train_step(loss_fn, together(), Config(frozen=["*.frozen"]))
    state = step_fn.init(start())
    for number, batch in enumerate(batches(2)[:10, rank * 2 : rank * 2 + 2]):
        if number == 5:
            fzero.checkpoint.save(folder, *state)
        state = step_fn(*state, batch)
    return fzero.unshard(state[0])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.quick("3")
def test_their_states_load_into_another_world_and_stage(stage: int, tmp_path: Path) -> None:
    wanted, _ = run_ranks(2, _saved, tmp_path, timeout=240)
    cfg = Config(stage=stage, frozen=["*.frozen"])
    step_fn = fzero.make_train_step(loss_fn, together(), cfg)
    state = fzero.checkpoint.load(tmp_path, *step_fn.init(start()))
    for batch in batches(2)[5:10]:
        state = step_fn(*state, batch)
    found = fzero.unshard(state[0])
    assert tree.paths(found) == tree.paths(wanted)
    for path, x, y in zip(tree.paths(found), tree.leaves(found), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, msg=path)


@pytest.mark.parametrize("label", WHOLE)
def test_the_engine_has_the_numbers_of_the_step(label: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    apply, params = fzero.functionalize(model)
    make = OPTIMIZERS[label][0]
    step_fn = fzero.make_train_step(lambda p, x: apply(p, x).square().mean(), make())
    state = step_fn.init(params)
    engine = fzero.Engine(model, make())
    for batch in torch.randn(3, 4, 5):
        state = step_fn(*state, batch)
        engine(batch).square().mean().backward()
        engine.step()
    full = engine.full_params()
    for name, x in fzero.unshard(state[0]).items():
        torch.testing.assert_close(full[name], x, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("label", WHOLE)
def test_masters_are_trained_in_float32_where_params_are_bfloat16(label: str, stage: int) -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return (torch.tanh(batch.to(params["w"].dtype) @ params["w"]) + params["b"]).square().mean()

    params = {"w": torch.randn(6, 5), "b": torch.randn(5)}
    cfg = Config(stage=stage, precision="bf16")
    step_fn = fzero.make_train_step(loss, OPTIMIZERS[label][0](), cfg)
    state = step_fn.init(params)
    for batch in torch.randn(3, 4, 6):
        state = step_fn(*state, batch)
    high = state[0] if state[1].master is None else state[1].master
    assert {x.dtype for x in tree.leaves(high)} == {torch.float32}
    floats = {x.dtype for x in tree.leaves(state[1].inner)}
    assert floats == {torch.float32}
    assert bool(torch.isfinite(fzero.unshard(high)["w"]).all())


@pytest.mark.parametrize("make", [optim.adafactor, optim.lamb, optim.muon])
def test_integer_leaves_are_refused_by_name(make: Any) -> None:
    opt, params = make(0.1), {"n": torch.ones(2, 2, dtype=torch.int64)}
    with pytest.raises(ShardError, match=r"\['n'\] is torch.int64"):
        opt.update(params, opt.init(params), params)
