"""A step under a memory limit: the same numbers, never above it, or a refusal with the least."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from benchmarks.allocations import measure
from benchmarks.models import Size, batch_of, fzero_step
from fzero.errors import ConfigError
from fzero.program.fitting import RESERVE
from tests.ranks import fake_ranks, run_ranks

TINY = Size(vocabulary=64, width=32, layers=2, heads=4, tokens=16, rows=2)


def net(depth: int, dropout: float) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for i in range(depth):
            h = F.gelu(F.layer_norm(x, x.shape[-1:]) @ params[f"{i}.up"])
            x = x + F.dropout(h, dropout) @ params[f"{i}.down"]
        return x.square().mean()

    return model_fn


def run_step(
    cfg: fzero.Config, depth: int, width: int, rows: int, dropout: float, rank: int = 0
) -> tuple[list[Tensor], fzero.Program]:
    """Two steps: the losses and the parameters."""
    shapes = {"up": (width, 2 * width), "down": (2 * width, width)}
    generator = torch.Generator().manual_seed(0)
    params = {
        f"{i}.{name}": torch.randn(shape, generator=generator) / width**0.5
        for i in range(depth)
        for name, shape in shapes.items()
    }
    step_fn = fzero.make_train_step(net(depth, dropout), fzero.optim.adam(0.01), cfg)
    state = step_fn.init(params)
    batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(2):
        state = step_fn(*state, batch)
        losses.append(state[1].metrics["loss"])
    program = step_fn.lower(*state, batch)  # after the ranks have settled theirs
    return [*losses, *fzero.unshard(state[0]).values()], program


@settings(max_examples=5)
@given(
    depth=st.integers(1, 3),
    width=st.sampled_from([8, 24]),
    rows=st.sampled_from([16, 64]),
    dropout=st.sampled_from([0.0, 0.4]),
    share=st.floats(0.2, 1.0),
    stage=st.integers(0, 3),
    accum=st.sampled_from([1, 2]),
)
def test_a_limit_changes_no_number_and_is_kept(
    depth: int, width: int, rows: int, dropout: float, share: float, stage: int, accum: int
) -> None:
    cfg = fzero.Config(stage=stage, accum_steps=accum)
    expected, program = run_step(cfg, depth, width, rows, dropout)
    limit = round(program.peak_bytes() * share)
    least = min(point.bytes for point in program.frontier(2)) + RESERVE
    if limit < least:
        with pytest.raises(ConfigError, match=f"memory_limit={limit}"):
            run_step(cfg.replace(memory_limit=limit), depth, width, rows, dropout)
        return
    found, limited = run_step(cfg.replace(memory_limit=limit), depth, width, rows, dropout)
    assert limited.peak_bytes() <= limit
    limited.verify()
    assert all(map(torch.equal, expected, found))


def _on_a_rank(stage: int, shares: list[float]) -> list[tuple[int, int, bool, str]]:
    import torch.distributed as dist

    rank = dist.get_rank()
    cfg = fzero.Config(stage=stage)
    # 25 columns: the ranks' shards differ in size, and so do their peaks
    expected, program = run_step(cfg, 3, 25, 96, 0.3, rank)
    rows = []
    most = torch.tensor(program.peak_bytes())
    dist.all_reduce(most, dist.ReduceOp.MAX)  # a config is the same on all ranks
    for share in shares:
        limit = round(int(most) * share)
        found, limited = run_step(cfg.replace(memory_limit=limit), 3, 25, 96, 0.3, rank)
        same = all(map(torch.equal, expected, found))
        rows.append((limit, limited.peak_bytes(), same, str(limited.thrift)))
    return rows


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_take_the_same_plan(stage: int) -> None:
    by_rank = run_ranks(2, _on_a_rank, stage, [0.8], timeout=240)
    for rows in zip(*by_rank, strict=True):
        for limit, peak, same, _ in rows:
            assert peak <= limit
            assert same
        assert len({thrift for *_, thrift in rows}) == 1


@pytest.mark.parametrize(
    ("world", "stage"),
    [(1, 0), *(pytest.param(8, stage, marks=pytest.mark.slow) for stage in (2, 3))],
)
def test_the_allocator_never_sees_more_than_the_limit(world: int, stage: int) -> None:
    def held(limit: int | None) -> tuple[int, fzero.Program]:
        cfg = fzero.Config(stage=stage, memory_limit=limit)
        opt = fzero.optim.adamw(1e-3)
        found, step = measure(lambda: fzero_step(TINY, batch_of(TINY, 8), opt, cfg))
        return found.peak, step.lower()

    with fake_ranks(world):
        _, program = held(None)
        least = program.frontier(2)[-1].bytes + 2 * RESERVE
        for limit in (program.peak_bytes(), (program.peak_bytes() + least) // 2, least):
            measured, limited = held(limit)
            assert measured <= limit
            assert limited.peak_bytes() <= limit


def test_less_memory_never_takes_fewer_flops_again() -> None:
    step = fzero_step(TINY, batch_of(TINY, 8), fzero.optim.sgd(0.1), fzero.Config(stage=0))
    points = step.lower().frontier(8)
    assert [p.bytes for p in points] == sorted((p.bytes for p in points), reverse=True)
    assert [p.recomputed for p in points] == sorted(p.recomputed for p in points)
    assert points[-1].bytes < 0.9 * points.unlimited.bytes


@pytest.mark.parametrize("points", [0, -1, True, 2.0, "3"])
def test_a_frontier_has_a_point(points: Any) -> None:
    program = fzero_step(TINY, batch_of(TINY, 8), fzero.optim.sgd(0.1), fzero.Config()).lower()
    with pytest.raises(fzero.ConfigError, match=r"points=.* must be a whole number >= 1"):
        program.frontier(points)
    assert len(program.frontier(1)) == 1


@pytest.mark.slow  # each way on is staged out
def test_what_does_not_fit_says_the_least_and_what_would() -> None:
    opt = fzero.optim.adamw(1e-3)

    def lower(**options: Any) -> fzero.Program:
        return fzero_step(TINY, batch_of(TINY, 8), opt, fzero.Config(**options)).lower()

    with fake_ranks(4):
        least = lower(stage=0).frontier(2)[-1].bytes
        other = lower(stage=3).frontier(2)[-1].bytes
        limit = (least + other) // 2
        with pytest.raises(ConfigError, match="the least that this step can hold is") as error:
            lower(stage=0, memory_limit=limit)
        told = str(error.value)
        assert f"is {least} bytes" in told
        assert "stage=3 (" in told.partition("What would fit: ")[2]
        # and so it is
        assert lower(stage=3, memory_limit=limit).peak_bytes() <= limit


def told_of_a_world(stage: int, limit: int) -> tuple[int, int]:
    """The ranks that an error of two says would fit, and their bytes."""
    with fake_ranks(2), pytest.raises(ConfigError) as error:
        wide_step(fzero.Config(stage=stage, memory_limit=limit)).lower()
    found = re.search(r"What would fit: .*?(\d+) ranks \((\d+) bytes\)", str(error.value))
    assert found, str(error.value)
    return int(found[1]), int(found[2])


def wide_step(cfg: fzero.Config) -> Any:
    """A step whose parameters and optimizer state outweigh the rest."""
    params = {f"w{i}": torch.ones(256, 256) for i in range(4)}

    def model_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params.values():
            x = torch.tanh(x @ w)
        return x.square().mean()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.adamw(1e-3), cfg)
    state, batch = step_fn.init(params), torch.ones(1, 256)
    return SimpleNamespace(lower=lambda: step_fn.lower(*state, batch))


def test_what_is_told_to_fit_leaves_room_for_what_a_step_reports() -> None:
    def told(limit: int) -> dict[str, int]:
        with pytest.raises(ConfigError) as error:
            wide_step(fzero.Config(stage=0, memory_limit=limit)).lower()
        fits = str(error.value).partition("What would fit: ")[2]
        return {way: int(n) for way, n in re.findall(r"([^,]+) \((\d+) bytes\)", fits)}

    with fake_ranks(2):
        least = told(wide_step(fzero.Config(stage=3)).lower().peak_bytes())["stage=3"]
        limit = least + RESERVE // 2
        assert all(n <= limit - RESERVE for n in told(limit).values())


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_world_that_would_fit_is_told_and_fits(stage: int) -> None:
    with fake_ranks(16):
        limit = wide_step(fzero.Config(stage=3)).lower().frontier(2)[-1].bytes + 4 * RESERVE
    ranks, nbytes = told_of_a_world(stage, limit)
    with fake_ranks(ranks):
        fits = wide_step(fzero.Config(stage=3, memory_limit=limit)).lower().peak_bytes()
    assert max(nbytes, fits) <= limit
    if stage == 0:  # once is enough: what is refused tries all ways on
        with fake_ranks(ranks // 2), pytest.raises(ConfigError, match="the least"):
            wide_step(fzero.Config(stage=3, memory_limit=limit)).lower()


def test_no_world_fits_what_every_rank_has() -> None:
    with fake_ranks(2), pytest.raises(ConfigError, match=r"no larger world fits.* 2048 ranks \("):
        wide_step(fzero.Config(stage=3, memory_limit=200_000)).lower()


@pytest.mark.parametrize("limit", ["12 apples", "-1GiB", 0, True, 1.5, "", "0B"])
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigError, match="memory_limit"):
        fzero.Config(memory_limit=limit)


def test_what_has_no_program_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no Program to plan"):
        fzero.Config(memory_limit="1GiB", executor="eager")
    with pytest.raises(ConfigError, match="an Engine runs operator by operator"):
        fzero.Engine(torch.nn.Linear(2, 2), fzero.optim.sgd(0.1), fzero.Config(memory_limit=10**9))
