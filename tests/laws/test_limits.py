"""Ranks whose batches differ in shape under a memory limit: none is above it, the same numbers as
without one, or the same refusal on all; whichever batch comes first."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from tests.ranks import run_ranks

WIDTH, DEPTH = 16, 3


def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for i in range(DEPTH):
        h = torch.tanh(F.layer_norm(x, x.shape[-1:]) @ params[f"{i}.up"])
        x = x + h @ params[f"{i}.down"] + params[f"{i}.bias"]
    return x.square().mean()


def _params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (WIDTH, WIDTH + 1), "down": (WIDTH + 1, WIDTH), "bias": (WIDTH,)}
    return {
        f"{i}.{name}": torch.randn(shape, generator=generator) / WIDTH**0.5
        for i in range(DEPTH)
        for name, shape in shapes.items()
    }


def _run(cfg: fzero.Config, batches: Sequence[Tensor], kind: str) -> tuple[list[Tensor], int]:
    """What all calls give, and the most bytes that one of them held."""
    if kind == "step":
        step_fn = fzero.make_train_step(model_fn, fzero.optim.adam(0.01), cfg)
        state: tuple[Any, Any] = step_fn.init(_params())
        losses, peak = [], 0
        for batch in batches:
            state = step_fn(*state, batch)
            losses.append(state[1].metrics["loss"])
            program = step_fn.lower(*state, batch)
            program.verify()
            peak = max(peak, program.peak_bytes())
        return [*losses, *fzero.unshard(state[0]).values()], peak
    params = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg).init(_params())[0]
    grad_fn, found, peak = fzero.value_and_grad(model_fn, cfg), [], 0
    for batch in batches:
        loss, grads = grad_fn(params, batch)
        found += [loss, *fzero.unshard(grads).values()]
        peak = max(peak, grad_fn.lower(params, batch).peak_bytes())
    return found, peak


def _limited(stage: int, kind: str, rows: Sequence[Sequence[int]], shares: Sequence[float]) -> Any:
    """Of each limit: whether it was kept with the same numbers, or the refusal."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(row[rank], WIDTH, generator=generator) for row in rows]
    cfg = fzero.Config(stage=stage, bucket_mb=0.004)
    expected, peak = _run(cfg, batches, kind)
    most = torch.tensor(peak)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    told = []
    for share in shares:
        limit = int(int(most) * share)
        try:
            found, peak = _run(cfg.replace(memory_limit=limit), batches, kind)
        except fzero.ConfigError as error:
            told.append(str(error))
        else:
            told.append((peak <= limit, all(map(torch.equal, expected, found))))
    return told


def _check(stage: int, kind: str, rows: Any, shares: Any) -> list[Any]:
    by_rank = run_ranks(2, _limited, stage, kind, rows, shares, timeout=300)
    for found in zip(*by_rank, strict=True):
        refused = [x for x in found if isinstance(x, str)]
        if refused:
            assert len(refused) == 2, found
            assert len(set(refused)) == 1, found
            assert "Config.memory_limit=" in refused[0]
        else:
            assert set(found) == {(True, True)}
    return by_rank[0]


def test_ranks_differ_in_shape_and_both_stay_below() -> None:
    """The large batch makes products again, which moves gathers; the small one need not."""
    (found,) = _check(3, "function", [(4, 64)], [0.75])
    assert found == (True, True)


def test_the_order_of_batches_does_not_matter() -> None:
    """Small ones first settle little; the large ones then settle it anew, on both ranks."""
    (found,) = _check(3, "step", [(4, 4), (64, 60), (4, 4)], [0.8])
    assert found == (True, True)


@pytest.mark.parametrize("share", [0.79, 0.796875, 0.8, 0.805])
@pytest.mark.quick("0.8", "0.805")
def test_alike_batches_grow_and_shards_are_uneven(share: float) -> None:
    """One rank is a few bytes above the limit, the other a few below: both look for a new plan."""
    _check(3, "step", [(16, 16), (48, 48)], [share])


def _plans(rows: Sequence[int], lowered: Sequence[int]) -> tuple[int, int]:
    """Numbers of plans: what this rank alone would take for its largest, and the settled one."""
    rank = dist.get_rank()
    cfg = fzero.Config(stage=3, bucket_mb=0.004)
    large = torch.ones(max(rows[rank], lowered[rank]), WIDTH)

    def made(cfg: fzero.Config) -> Any:
        step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
        return step_fn, step_fn.init(_params())

    step_fn, state = made(cfg)
    most = torch.tensor(step_fn.lower(*state, large).peak_bytes())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    cfg = cfg.replace(memory_limit=int(int(most) * 0.75))
    step_fn, state = made(cfg)
    program = next(iter(step_fn.lower(*state, large).parts()))
    step_fn, state = made(cfg)
    if lowered[rank]:
        step_fn.lower(*state, torch.ones(lowered[rank], WIDTH))
    step_fn(*state, torch.ones(rows[rank], WIDTH))
    settled = next(iter(step_fn.lower(*state, torch.ones(rows[rank], WIDTH)).parts()))
    return program.thrift[0], settled.thrift[0]


@pytest.mark.parametrize(("rows", "lowered"), [((4, 64), (0, 0)), ((4, 4), (0, 64))])
def test_the_thriftiest_plan_of_all_ranks_is_taken(rows: Any, lowered: Any) -> None:
    """Of what is run, and of what was only lowered before the first call."""
    (small, first), (large, second) = run_ranks(2, _plans, rows, lowered)
    assert small < large
    assert first == second == large


def test_what_one_rank_cannot_hold_is_refused_on_all() -> None:
    (found,) = _check(3, "function", [(64, 4)], [0.2])
    assert "On rank 0: Config.memory_limit=" in found


_rows = st.sampled_from([2, 16, 48])


@pytest.mark.slow
@settings(max_examples=12)
@given(
    stage=st.integers(0, 3),
    kind=st.sampled_from(["step", "function"]),
    rows=st.lists(st.tuples(_rows, _rows), min_size=1, max_size=2),
    alike=st.booleans(),
    share=st.floats(0.4, 1.0),
)
def test_no_rank_is_above_its_limit(
    stage: int, kind: str, rows: list[tuple[int, int]], alike: bool, share: float
) -> None:
    """Batches of any order where ranks' grow together; else the largest of each comes first."""
    if alike:
        rows = [(a, a) for a, _ in rows]
    else:
        rows = [(max(a for a, _ in rows), max(b for _, b in rows)), *rows]
    _check(stage, kind, rows, [share])
