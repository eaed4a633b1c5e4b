"""A step is a function: of its arguments alone, and changing none of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fzero
from fzero import Config, tree
from tests.ranks import run_ranks
from tests.state.test_sharding import trees

OPTIMIZERS = {
    "sgd": lambda: fzero.optim.sgd(0.1),
    "momentum": lambda: fzero.optim.sgd(0.1, 0.9, nesterov=True),
    "adamw": lambda: fzero.optim.adamw(1e-2),
    "lion": lambda: fzero.optim.lion(1e-2),
}


@st.composite
def _leaf(draw: st.DrawFn) -> Tensor:
    """A parameter: of any floating dtype, or one that gets no gradient."""
    shape = draw(st.lists(st.integers(0, 5), max_size=2))
    kinds = [torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.int64, torch.bool]
    dtype = draw(st.sampled_from(kinds))
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return (x % 7 / 3 - 1).to(dtype) if dtype.is_floating_point else (x % 2).to(dtype)


def _ends_in_0_or_a(name: str) -> bool:
    return name.endswith(("0", "a"))  # globs that match no leaf are refused


_configs = st.fixed_dictionaries(
    {
        "stage": st.integers(0, 3),
        "accum_steps": st.sampled_from([1, 2]),
        "clip_norm": st.sampled_from([None, 0.5]),
        "precision": st.sampled_from([None, "bf16", "fp16"]),
        "frozen": st.sampled_from([(), _ends_in_0_or_a]),
        "on_nonfinite": st.sampled_from(["report", "skip", "raise"]),
        "reshard_after_forward": st.booleans(),
        "executor": st.sampled_from(["traced", "traced", "eager"]),
        "seed": st.sampled_from([0, 2**63 - 1]),
    }
)
# a step of no parameters is refused
_params = trees(_leaf()).filter(lambda params: bool(tree.leaves(params)))
_calls = st.tuples(_params, _configs, st.sampled_from(sorted(OPTIMIZERS)))


def _model_fn(params: Any, state: Any, batch: dict[str, Any]) -> Any:
    """Dropout on everything, a state, and aux."""
    total = batch["x"].square().mean()
    for leaf in tree.leaves(params):
        if leaf.is_floating_point():
            dropped = F.dropout(leaf.flatten().float().outer(batch["x"].flatten()), 0.5)
            total = total + (dropped - batch["nested"][0]).square().sum() / 100
    return total, {"calls": state["calls"] + 1}, {"x": batch["x"].sum()}


def _batch() -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"x": torch.arange(4.0).reshape(4, 1) + rank, "nested": [torch.tensor(0.5)]}


def _locals(value: Any) -> list[Tensor]:
    return [x.to_local() if isinstance(x, DTensor) else x for x in tree.leaves(value)]


def _equal(a: Any, b: Any) -> bool:
    """Bit for bit: NaN equals NaN."""
    pairs = list(zip(_locals(a), _locals(b), strict=True))
    return all(
        x.dtype == y.dtype and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
        for x, y in pairs
    )


def _broken(params: Any, config: dict[str, Any], optimizer: str) -> list[str]:
    """The laws that do not hold for this call."""
    broken = []

    def law(name: str, holds: bool) -> None:
        if not holds:
            broken.append(name)

    def start(**extra: Any) -> tuple[Any, Any]:
        cfg = Config(**config, **extra, has_aux=True)
        step_fn = fzero.make_train_step(_model_fn, OPTIMIZERS[optimizer](), cfg)
        return step_fn, step_fn.init(params, {"calls": torch.tensor(0)})

    given_params = tree.map(torch.clone, params)
    step_fn, state = start(donate=False)
    batch = _batch()
    before = [x.clone() for x in (*_locals(state), *_locals(batch))]
    generator = torch.get_rng_state()
    first = step_fn(*state, batch)
    law("the state that came in is untouched", _equal([*_locals(state), *_locals(batch)], before))
    law("the generator is untouched", torch.equal(torch.get_rng_state(), generator))
    torch.rand(3)  # what else draws in between does not matter
    if step_fn.cfg.executor == "traced":
        text = str(step_fn.lower(*state, batch))
        law("lower says the same again", text == str(step_fn.lower(*state, batch)))
    kept = [x.clone() for x in _locals(first)]
    second = step_fn(*state, batch)
    law("the same call gives the same", _equal(first, second))

    other, donated = start()
    law("init is a function", _equal(state, donated))
    donated = other(*donated, batch)
    law("donating changes nothing", _equal(first, donated))
    law("step functions do not disturb each other", _equal(step_fn(*state, batch), first))
    law("results stay as they are", _equal(first, kept))
    law("init copies", _equal(params, given_params))

    (new, new_state), (old, old_state) = first, state
    for what, a, b in (
        ("params", new, old),
        ("inner", new_state.inner, old_state.inner),
        ("master", new_state.master, old_state.master),
        ("loss scale", new_state.loss_scale, old_state.loss_scale),
        ("model state", new_state.model_state, old_state.model_state),
    ):
        (xs, spec), (ys, same) = tree.flatten(a), tree.flatten(b)
        law(f"{what}: the same structure", spec == same)
        pairs = list(zip(xs, ys, strict=True))
        law(f"{what}: the same types", all(type(x) is type(y) for x, y in pairs))
        law(
            f"{what}: the same shapes and dtypes",
            all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs),
        )
        law(f"{what}: no graph", not any(x.requires_grad for x in xs))
    whole = zip(tree.leaves(fzero.unshard(new)), tree.leaves(params), strict=True)
    names = tree.names(params)
    fixed = [
        torch.equal(x, y.to(x.dtype))
        for name, (x, y) in zip(names, whole, strict=True)
        if not y.is_floating_point() or step_fn.cfg.is_frozen(name)
    ]
    law("what gets no gradient stays", all(fixed))
    calls, skipped = step_fn.cfg.accum_steps, bool(new_state.metrics["skipped"])
    overflowed = skipped and step_fn.cfg.scaling is not None
    law("a step is counted", bool(new_state.step == (0 if overflowed else 1)))
    law("the step that came in is not", bool(old_state.step == 0))
    through = bool(new_state.model_state["calls"] == (0 if skipped else calls))
    law("model state goes through the micro-batches", through)
    aux = new_state.metrics["aux"]["x"]
    law("aux is stacked", aux.shape == ((calls,) if calls > 1 else ()))
    law("aux is this rank's", torch.allclose(aux.sum(), batch["x"].sum()))
    return broken


@settings(max_examples=15)
@given(_calls)
def test_a_step_is_pure(call: tuple[Any, dict[str, Any], str]) -> None:
    assert _broken(*call) == []


def _all_broken(calls: list[tuple[Any, dict[str, Any], str]]) -> list[list[str]]:
    return [_broken(*call) for call in calls]


@settings(max_examples=4)
@given(st.lists(_calls, min_size=3, max_size=3))
def test_a_step_on_two_ranks_is_pure(calls: list[tuple[Any, dict[str, Any], str]]) -> None:
    assert run_ranks(2, _all_broken, calls, timeout=120) == [[[]] * len(calls)] * 2


# ---- masks
def _dropped(params: dict[str, Tensor], batch: Tensor) -> Any:
    mask = F.dropout(torch.ones(64), 0.5)
    return (params["w"] * batch * mask.mean()).sum(), mask


def _masks(stage: int) -> dict[str, Tensor]:
    """Masks of two micro-batches, by seed and step."""
    masks = {}
    for seed in (0, 1):
        cfg = Config(stage=stage, accum_steps=2, has_aux=True, seed=seed)
        step_fn = fzero.make_train_step(_dropped, fzero.optim.sgd(0.1), cfg)
        state = step_fn.init({"w": torch.ones(3)})
        for step in range(2):
            state = step_fn(*state, torch.ones(2, 1))
            for i, mask in enumerate(state[1].metrics["aux"]):
                masks[f"seed {seed}, step {step}, micro-batch {i}"] = mask
    return masks


@pytest.mark.parametrize("stage", [0, 3])
def test_masks_depend_on_seed_step_micro_batch_and_rank_alone(stage: int) -> None:
    by_rank = run_ranks(2, _masks, stage)
    masks = [mask for masks in by_rank for mask in masks.values()]
    assert len(masks) == 16
    assert len({tuple(mask.tolist()) for mask in masks}) == 16
    assert 0.4 < torch.stack(masks).count_nonzero() / (16 * 64) < 0.6
    again = run_ranks(2, _masks, stage)
    for a, b in zip(by_rank, again, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
