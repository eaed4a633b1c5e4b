"""What differs between ranks is told on all of them, and none waits for another in vain."""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero import Config, FzeroError, RankMismatchError, tree
from tests.ranks import RanksFailed, run_fresh, run_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def _params() -> dict[str, Tensor]:
    return {"b": torch.zeros(3), "unused": torch.ones(2), "w": torch.arange(12.0).reshape(4, 3)}


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


SGD = fzero.optim.sgd(0.1, momentum=0.9)
X = torch.ones(4, 4)


def _rank() -> int:
    return dist.get_rank()


def _message(fn: Callable[..., Any], *args: Any) -> str | None:
    try:
        fn(*args)
    except RankMismatchError as error:
        return str(error)
    return None


# ---- at init
OPTIMIZERS: dict[str, Callable[[bool], Any]] = {
    "sgd.lr": lambda odd: fzero.optim.sgd(0.2 if odd else 0.1),
    "adam.weight_decay": lambda odd: fzero.optim.adamw(0.1, weight_decay=0.2 if odd else 0.1),
    "cosine.steps": lambda odd: fzero.optim.sgd(fzero.optim.cosine(0.1, 200 if odd else 100)),
    "max_norm": lambda odd: fzero.optim.chain(
        fzero.optim.clip_by_global_norm(2.0 if odd else 1.0), SGD
    ),
    "lr": lambda odd: fzero.optim.inject_hyperparams(fzero.optim.sgd)(0.2 if odd else 0.1),
}


def _with_optimizer(case: str, engine: bool) -> str | None:
    opt = OPTIMIZERS[case](_rank() == dist.get_world_size() - 1)
    if engine:
        torch.manual_seed(0)
        return _message(fzero.Engine, torch.nn.Linear(3, 2), opt)
    return _message(fzero.make_train_step(_loss, opt, Config()).init, _params())


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("case", [*OPTIMIZERS])
def test_an_optimizer_with_other_numbers_is_named(case: str, engine: bool) -> None:
    """Below stage 3 ranks would part; at stage 3 each would update its own part its own way."""
    said = run_ranks(3, _with_optimizer, case, engine)
    assert all(said)
    for text in said:
        assert "the optimizer's arguments" in text
        assert case in text
        assert "rank 2" in text


def _with_a_state_of_another() -> list[str]:
    state = fzero.make_train_step(_loss, fzero.optim.lion(0.1), Config()).init(_params())
    said: list[str] = []
    injected = fzero.optim.inject_hyperparams(fzero.optim.sgd)(0.1)
    for opt in (injected, fzero.optim.lion(0.1 + _rank())):
        try:
            fzero.make_train_step(_loss, opt, Config())(*state, X)
        except FzeroError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


def test_a_state_from_elsewhere_is_looked_at_before_what_it_says_of_rates() -> None:
    for wrong, differs in run_ranks(2, _with_a_state_of_another):
        assert "opt_state.inner has another structure" in wrong
        assert "the optimizer's arguments at lion.lr" in differs


def test_equal_optimizers_are_equal() -> None:
    assert run_ranks(3, _equal) == [None] * 3


def _equal() -> str | None:
    opt = fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), SGD)
    return _message(fzero.make_train_step(_loss, opt, Config()).init, _params())


def _init(case: str) -> str | None:
    """On a rank, of which the last is the odd one out: what init says."""
    last = _rank() == dist.get_world_size() - 1
    params, state, config = _params(), {"mean": torch.zeros(2)}, {"stage": 3}
    change: dict[str, Callable[[], Any]] = {
        "config": lambda: config.update(clip_norm=1.0),
        "stage": lambda: config.update(stage=1),
        "frozen": lambda: config.update(frozen=("w",)),
        "lacking leaf": lambda: params.pop("b"),
        "extra leaf": lambda: params.update(c=torch.ones(1)),
        "shape": lambda: params.update(w=torch.zeros(4, 4)),
        "dtype": lambda: params.update(b=torch.zeros(3, dtype=torch.float64)),
        "value": lambda: params["w"][1].mul_(-1),
        "last bit": lambda: params["w"].copy_(params["w"].nextafter(X[:, :3] * 99)),
        "permuted": lambda: params.update(w=params["w"].flip(0)),
        "permuted columns": lambda: params.update(w=params["w"].flip(1)),
        "state": lambda: state.update(mean=torch.zeros(3)),
        "state value": lambda: state["mean"].add_(1),
    }
    if last:
        change[case]()
    return _message(fzero.make_train_step(_loss, SGD, Config(**config)).init, params, state)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("config", r"Config at \.clip_norm: ranks 0-1: None; rank 2: 1\.0"),
        ("stage", r"Config at \.stage: ranks 0-1: 3; rank 2: 1"),
        ("frozen", r"Config at \.frozen: ranks 0-1: \(\); rank 2: \('w',\)"),
        ("lacking leaf", r"params at \['b'\]: ranks 0-1: torch.float32 \(3,\); rank 2: \(nothing"),
        ("extra leaf", r"params at \['c'\]: ranks 0-1: \(nothing\); rank 2: torch.float32 \(1,\)"),
        ("shape", r"params at \['w'\]: ranks 0-1: torch.float32 \(4, 3\); rank 2: .* \(4, 4\)"),
        ("dtype", r"params at \['b'\]: ranks 0-1: torch.float32.*rank 2: torch.float64"),
        ("value", r"the values of params at \['w'\].*torch.manual_seed"),
        ("last bit", r"the values of params at \['w'\]"),
        ("permuted", r"the values of params at \['w'\]"),
        ("permuted columns", r"the values of params at \['w'\]"),
        ("state", r"model_state at \['mean'\]: ranks 0-1: torch.float32 \(2,\); rank 2"),
        ("state value", r"the values of model_state at \['mean'\]"),
    ],
)
def test_a_difference_at_init_is_named_on_every_rank(case: str, said: str) -> None:
    messages = run_ranks(3, _init, case)
    assert len(set(messages)) == 1
    assert re.search(said, str(messages[0]), re.DOTALL), messages[0]


# ---- in the first call
class _Branching:
    """A model function that does what it is told to."""

    def __init__(self) -> None:
        self.other = False

    def __call__(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        loss = _loss(params, x)
        return loss + params["unused"].sum() if self.other else loss


def _first_call() -> tuple[str | None, list[Tensor]]:
    model_fn = _Branching()
    step_fn = fzero.make_train_step(model_fn, SGD, Config(stage=3, donate=False))
    state = step_fn.init(_params())
    model_fn.other = _rank() == 1
    message = _message(step_fn, *state, X)
    model_fn.other = False
    again = step_fn(*state, X)
    return message, [fzero.unshard(x) for x in tree.leaves(again[0])]


def test_another_branch_in_the_first_call_is_named_and_the_next_call_is_right() -> None:
    (message, params), (other, _) = run_ranks(2, _first_call)
    assert message == other
    assert "ranks differ in the step function's collectives at row" in str(message)
    assert "unused" in str(message)
    assert "The usual cause is data" in str(message)
    step_fn = fzero.make_train_step(_loss, SGD)
    expected, _ = step_fn(*step_fn.init(_params()), X)
    for a, b in zip(params, tree.leaves(expected), strict=True):
        assert torch.allclose(a, fzero.unshard(b))


# ---- in mid-training
def _both_branch(sub_mesh: bool) -> tuple[str | None, float]:
    """Ranks whose collectives change in the same call: alike, then not alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"] if sub_mesh else None
    model_fn = _Branching()
    step_fn = fzero.make_train_step(model_fn, SGD, Config(stage=3, mesh=mesh))
    state = step_fn(*step_fn.init(_params()), X)
    model_fn.other = True
    state = step_fn(*state, X[:3])
    # a third program on even ranks, and a fourth on odd ones
    name = ("w", "b")[_rank() % 2]
    step_fn.model_fn = lambda params, x: params[name].square().mean() + x.mean()
    message = _message(step_fn, *state, X[:2])
    return message, state[1].metrics["loss"].item()


@pytest.mark.parametrize(("world", "sub_mesh"), [(2, False), (4, True)])
def test_ranks_may_change_their_collectives_together(world: int, sub_mesh: bool) -> None:
    results = run_ranks(world, _both_branch, sub_mesh)
    assert len({loss for _, loss in results}) == 1
    for message, _ in results:
        assert "step function" in str(message)
        assert "call 3" in str(message)
        assert "Their collectives would not match" in str(message)


def _one_branches() -> None:
    dist.init_process_group("gloo")
    model_fn = _Branching()
    step_fn = fzero.make_train_step(model_fn, SGD, Config(stage=3))
    state = step_fn(*step_fn.init(_params()), X)
    model_fn.other = _rank() == 0
    try:
        step_fn(*state, X[:3] if model_fn.other else X)
    except RankMismatchError as error:
        print(f"rank {_rank()} raised: {error}", flush=True)
    os._exit(1)  # as a program does that nobody catches the error of


def test_a_rank_that_branches_alone_is_told_and_so_are_those_it_leaves() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_fresh(2, _one_branches)
    said = str(caught.value)
    told = "rank 0 came to 'step function 1, call 2, new collectives', and rank 1 to 'step"
    assert f"rank 0 raised: {told}" in said
    assert f"rank 1 raised: {told}" in said


# ---- what may differ
def _own_rows(stage: int) -> list[float]:
    """Every rank brings batches of its own shape, new ones in some calls on some ranks."""
    rank, world = _rank(), dist.get_world_size()
    # more than one bucket, and shards of different sizes
    generator = torch.Generator().manual_seed(0)
    params = {f"w{i}": torch.randn(61, 61, generator=generator) / 8 for i in range(6)}
    mean = functools.partial(_tanh_mean, weights=sorted(params))
    step_fn = fzero.make_train_step(mean, SGD, Config(stage=stage, bucket_mb=0.1))
    state, full = step_fn.init(params), {k: v.clone().requires_grad_() for k, v in params.items()}
    sgd = torch.optim.SGD(full.values(), 0.1, 0.9)
    errors = []
    for call in range(4):
        batches = [
            torch.randn(2 + 200 * r + (call if r == 1 else 0), 61, generator=generator)
            for r in range(world)
        ]
        state = step_fn(*state, batches[rank])
        sgd.zero_grad()
        torch.stack([mean(full, x) for x in batches]).mean().backward()
        sgd.step()
        gaps = [(fzero.unshard(state[0])[k] - v).abs().max() for k, v in full.items()]
        errors.append(torch.stack(gaps).max().item())
    return errors


def _tanh_mean(params: dict[str, Tensor], x: Tensor, weights: list[str]) -> Tensor:
    for name in weights:
        x = torch.tanh(x @ params[name])
    return x.square().mean()


@STAGES
def test_every_rank_may_bring_its_own_rows(stage: int) -> None:
    for errors in run_ranks(3, _own_rows, stage):
        assert max(errors) < 1e-5


# ---- NaN on one rank only
def _loss_at_zero(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Infinite where x is zero, with gradients that are finite."""
    return _loss(params, x) - x.amax().log()


def _gradient_at_zero(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Finite where x is zero, with gradients that are NaN."""
    return _loss(params, x) + (params["w"] * 0 + x.amax()).sqrt().sum()


def _one_nan(
    stage: int, policy: str, accum: int, model_fn: Callable[..., Tensor]
) -> tuple[str | None, bool, dict[str, bool]]:
    config = Config(stage=stage, on_nonfinite=policy, accum_steps=accum)  # pyright: ignore
    step_fn = fzero.make_train_step(model_fn, SGD, config)
    params, opt_state = step_fn(*step_fn.init(_params()), X)

    def held() -> list[Tensor]:
        return [fzero.unshard(x).clone() for x in tree.leaves((params, opt_state.inner))]

    before, message, flags = held(), None, {}
    bad = X * 0 if _rank() == 1 else X
    try:
        params, opt_state = step_fn(params, opt_state, bad)
        flags = {k: bool(opt_state.metrics[k]) for k in ("nonfinite", "skipped")}
    except FzeroError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before, held(), strict=True))
    params, opt_state = step_fn(params, opt_state, X)  # the ranks are still in step
    flags["after"] = bool(opt_state.metrics["nonfinite"])
    return message, same, flags


@STAGES
@pytest.mark.parametrize(("model_fn", "accum"), [(_loss_at_zero, 1), (_gradient_at_zero, 2)])
def test_a_nan_on_one_rank_is_everyones(
    stage: int, model_fn: Callable[..., Tensor], accum: int
) -> None:
    for message, same, flags in run_ranks(2, _one_nan, stage, "report", accum, model_fn):
        assert (message, same) == (None, False)
        assert flags == {
            "nonfinite": True,
            "skipped": False,
            "after": model_fn is _gradient_at_zero,
        }
    for message, same, flags in run_ranks(2, _one_nan, stage, "skip", accum, model_fn):
        assert (message, same) == (None, True)
        assert flags == {"nonfinite": True, "skipped": True, "after": False}
    for message, same, flags in run_ranks(2, _one_nan, stage, "raise", accum, model_fn):
        assert "step 1: NaN or infinity" in str(message)
        assert same
        assert flags == {"after": False}


# ---- a process group that is gone
def _after_destruction(stage: int, folder: str) -> list[str]:
    """What is said of what ranks share, once their process group is destroyed."""
    cfg = Config(stage=stage)
    step_fn = fzero.make_train_step(_loss, SGD, cfg)
    state = step_fn(*step_fn.init(_params()), X)
    engine = fzero.Engine(torch.nn.Linear(4, 2), SGD, cfg, broadcast=True)
    validate = fzero.sharded(_loss, cfg, reduce="mean")
    validate(state[0], X)
    dist.destroy_process_group()
    calls: list[Callable[[], Any]] = [
        lambda: step_fn(*state, X),
        lambda: fzero.checkpoint.save(folder, *state),
        lambda: fzero.checkpoint.load(folder, *state),
    ]
    if stage == 3:
        calls += [
            lambda: engine(X),
            lambda: engine.full_params(),
            lambda: fzero.unshard(state[0]),
            lambda: validate(state[0], X),
            lambda: fzero.tree_vdot(state[0], state[0]),
            lambda: fzero.checkpoint.export_safetensors(folder, state[0]),
        ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except FzeroError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_a_destroyed_process_group_is_named(stage: int, tmp_path: Any) -> None:
    for said in run_fresh(2, _after_destruction, stage, str(tmp_path)):
        for text in said:
            assert "process group" in text, said
            assert "was destroyed. Save, unshard" in text, said
    assert not list(tmp_path.iterdir())
