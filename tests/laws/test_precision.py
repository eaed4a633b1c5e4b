"""Low precision on real ranks equals master weights by hand, bit for bit, at every stage."""

import functools
import itertools
import math
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero import Config, LossScale, tree
from fzero.distributed.dtensor import local_tensor
from tests.laws import precision_reference as reference
from tests.laws.precision_reference import LR, MOMENTUM, STEPS, Case, Trained
from tests.ranks import run_ranks

PRESETS = {"bf16": torch.bfloat16, "fp16": torch.float16}
# grows every third step
SCALE = LossScale(init=2.0**10, window=3, hysteresis=2)

AT_ODD_STAGES = (("bf16", "eager"), ("fp16", "offload"))


def _cases(world: int = 2) -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """(name, case, config) of every preset and stage, with and without accumulation."""
    for preset, stage, accum in itertools.product(PRESETS, range(4), (1, 2)):
        for how in ("traced", "eager", "offload"):
            if accum == 1 and (how != "traced" or world == 1):
                continue
            if how != "traced" and (stage % 2 == 1) != ((preset, how) in AT_ODD_STAGES):
                continue  # each way at half of the stages, and all of them with each preset
            if world == 1 and stage in (1, 2):  # of one rank all stages are alike
                continue
            scale = SCALE if preset == "fp16" else None
            poison = {4: world - 1, 5: 0} if scale else {}
            config: dict[str, Any] = {"stage": stage, "precision": preset, "loss_scale": scale}
            config |= {"offload": "cpu"} if how == "offload" else {"executor": how}
            name = f"{preset}, stage {stage}, accum {accum}, {how}"
            yield name, Case(PRESETS[preset], accum, scale, poison), config


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in (1, 2) for name, *_ in _cases(world)]
)
def test_masters_equal_those_kept_by_hand(world: int, name: str) -> None:
    ((case, config),) = [(case, config) for n, case, config in _cases(world) if n == name]
    expected = reference.train(case, world, ranks_first=config["stage"] >= 2)
    for ours in (by_name[name] for by_name in _trained(world)):
        assert isinstance(ours, Trained), ours
        assert ours.scales == expected.scales
        assert ours.skipped == expected.skipped
        for leaf, master in expected.masters.items():
            assert torch.equal(ours.masters[leaf], master), leaf
        assert ours.losses == pytest.approx(expected.losses, rel=1e-6, nan_ok=True)
        finite = [i for i, skipped in enumerate(expected.skipped) if not skipped]
        for i in finite:
            assert ours.norms[i] == pytest.approx(expected.norms[i], rel=1e-5)


def test_the_cases_skip_and_grow() -> None:
    for _, case, _ in _cases():
        if case.scale:
            trained = reference.train(case, 2, ranks_first=True)
            assert trained.skipped[4]
            assert trained.skipped[5]
            scales = list(itertools.pairwise(trained.scales))
            assert any(a < b for a, b in scales)
            assert any(a > b for a, b in scales)


@functools.cache  # one job for all cases
def _trained(world: int) -> list[dict[str, Trained | str]]:
    return run_ranks(world, _train_all, timeout=240)


def _train_all() -> dict[str, Trained | str]:
    """On a rank: by case, what training left, or what it raised."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Trained | str] = {}
    for name, case, config in _cases(world):
        try:
            found[name] = _train(case, Config(**config), rank)
        except Exception:
            found[name] = traceback.format_exc()
    return found


def _train(case: Case, cfg: Config, rank: int) -> Trained:
    cfg = cfg.replace(accum_steps=case.accum)
    step_fn = fzero.make_train_step(reference.loss_of, fzero.optim.sgd(LR, MOMENTUM), cfg)
    params, opt_state = step_fn.init(reference.start())
    trained = Trained({}, [], [], [], [])
    for step in range(STEPS):
        scale = opt_state.loss_scale.scale.item() if opt_state.loss_scale else 1.0
        before = [x.clone() for x in _untouchable(params, opt_state)]
        params, opt_state = step_fn(params, opt_state, torch.cat(case.batches(step, rank)))
        metrics = opt_state.metrics
        assert all(x.dim() == 0 for x in metrics.values())
        assert metrics["loss_scale"].item() == scale
        trained.scales.append(scale)
        trained.skipped.append(bool(metrics["skipped"]))
        trained.losses.append(metrics["loss"].item())
        trained.norms.append(metrics["grad_norm"].item())
        if metrics["skipped"]:
            after = _untouchable(params, opt_state)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert int(opt_state.step) == STEPS - sum(trained.skipped)
    masters = params if opt_state.master is None else opt_state.master
    trained.masters = {k: x.float() for k, x in fzero.unshard(masters).items()}
    _check_dtypes(params, opt_state, cfg)
    low = {k: x.to(case.dtype) for k, x in trained.masters.items()}
    ours = {k: x.to(case.dtype) for k, x in fzero.unshard(params).items()}
    assert all(torch.equal(ours[k], low[k]) for k in low), "params are not the masters, cast"
    return trained


def _untouchable(params: Any, opt_state: fzero.OptState) -> list[Tensor]:
    """What a skipped step leaves as it is: schedules read the step in the optimizer's state."""
    kept = (params, opt_state.inner, opt_state.master, opt_state.step)
    return [local_tensor(x) for x in tree.leaves(kept)]


def _check_dtypes(params: Any, opt_state: fzero.OptState, cfg: Config) -> None:
    shards_are_masters = cfg.stage == 3 and cfg.offload is None
    assert (opt_state.master is None) == shards_are_masters
    used = torch.float32 if shards_are_masters else cfg.dtypes.param
    assert {x.dtype for x in tree.leaves(params)} == {used}
    assert {x.dtype for x in tree.leaves((opt_state.master, opt_state.inner))} == {torch.float32}


# ------------------------------------------------------------------------------------- norms
NORMS = list(itertools.product((0, 1, 3), (1.0, 3.0, math.inf)))
CLIP = 0.01


@pytest.mark.parametrize(("stage", "p"), NORMS)
def test_norms_of_shards_are_those_of_the_whole(stage: int, p: float) -> None:
    grads = [
        reference.gradients(Case(torch.bfloat16), reference.start(), x, 0.5)
        for x in (reference.batch(0, rank, 0, False) for rank in range(2))
    ]
    whole = _norm([a + b for a, b in zip(*grads, strict=True)], p)
    for found, applied in (by_case[stage, p] for by_case in _norms()):
        assert found == pytest.approx(whole, rel=1e-5)
        assert applied == pytest.approx(CLIP, rel=1e-3)


@functools.cache
def _norms() -> list[dict[tuple[int, float], tuple[float, float]]]:
    return run_ranks(2, _norms_on_a_rank)


def _norms_on_a_rank() -> dict[tuple[int, float], tuple[float, float]]:
    """By stage and p: what the metric says, and the norm of what SGD applied."""
    found = {}
    for stage, p in NORMS:
        cfg = Config(stage, precision="bf16", clip_norm=CLIP, norm_type=p)
        step_fn = fzero.make_train_step(reference.loss_of, fzero.optim.sgd(1.0), cfg)
        state = step_fn.init(reference.start())
        params, opt_state = step_fn(*state, reference.batch(0, dist.get_rank(), 0, False))
        masters = fzero.unshard(params if opt_state.master is None else opt_state.master)
        applied = [x - masters[name] for name, x in reference.start().items()]
        found[stage, p] = (opt_state.metrics["grad_norm"].item(), _norm(applied, p))
    return found


def _norm(tensors: list[Tensor], p: float) -> float:
    flat = torch.cat([x.flatten() for x in tensors])
    return torch.linalg.vector_norm(flat.double(), p).item()


# ----------------------------------------------------------------------- stochastic rounding
def test_stochastic_rounding_is_the_same_however_leaves_are_sharded() -> None:
    alone = _rounded(stage=3)
    other = _rounded(stage=3, seed=1)
    assert not all(torch.equal(other[name], x) for name, x in alone.items())
    for stage in (0, 1, 3):
        for ours in run_ranks(2, _rounded, stage):
            assert all(torch.equal(ours[name], x) for name, x in alone.items())


def _rounded(stage: int, seed: int = 0) -> dict[str, Tensor]:
    """Parameters after some steps on one batch that all ranks share: their mean is no sum."""
    low = torch.bfloat16
    precision = fzero.Precision(low, torch.float32, low, stochastic_rounding=True)
    cfg = Config(stage, precision=precision, seed=seed)
    step_fn = fzero.make_train_step(reference.loss_of, fzero.optim.sgd(LR, MOMENTUM), cfg)
    state = step_fn.init(reference.start())
    for step in range(4):
        state = step_fn(*state, reference.batch(step, 0, 0, False))
    return fzero.unshard(state[0])
