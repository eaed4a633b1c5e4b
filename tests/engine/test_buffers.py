"""A module's buffers: all of them in the state and in checkpoints, and the same on every rank."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import fzero
from fzero.checkpoint import load, save
from fzero.checkpoint.format.manifest import _digest
from fzero.state import model_state
from tests.engine.parity import here
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


class Keeps(nn.Module):
    """Buffers of every kind, and every way to change them."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 2).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("data", torch.zeros(4), persistent=False)  # written through .data
        self.register_buffer("again", torch.zeros(3, dtype=torch.bfloat16))  # re-assigned
        self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("seen", torch.tensor(2**60))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool), persistent=False)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("shared", torch.zeros(1).expand(3))
        self.register_buffer("cache", torch.zeros(0))  # grows
        self.inner = nn.Module()
        self.inner.register_buffer("same", torch.tensor([0.1, 5.0, 1 / 3]))
        self.inner.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        row = x.detach().mean(0)
        self.mean.lerp_(row, 0.1)
        self.data.data.add_(row.float())
        self.again = 0.5 * self.again + row[:3].bfloat16()
        self.turn += torch.complex(row[:2], row[2:]).to(torch.complex64)
        self.seen += int(row[0] * 100)
        self.flag = row[:2] > 0
        self.shared = (row[:1].float()).expand(3)
        self.cache = torch.zeros(len(self.cache) + 1 + here()[0])
        self.inner.same.mul_(1.1)
        return self.lin(x - self.mean)


def build() -> Keeps:
    torch.manual_seed(0)
    return Keeps()


def rows(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator) + rank


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in module.named_buffers()}


def one_step(engine: Any, step: int) -> dict[str, Tensor]:
    """A step; what this rank's buffers were before the update."""
    engine(rows(here()[0], step)).square().mean().backward()
    own = snapshot(engine.module)
    engine.step()
    return own


# ---- one rule
@settings(max_examples=200)
@given(data=st.data())
def test_what_all_ranks_agree_on_keeps_every_bit(data: Any) -> None:
    dtype = data.draw(st.sampled_from([*DTYPES, torch.float16, torch.int32, torch.uint8]))
    world, seed = data.draw(st.integers(2, 70)), data.draw(st.integers(0, 2**30))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (64 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    x = (x > 127)[:64] if dtype is torch.bool else x.view(dtype)
    if dtype is torch.float64:  # as documented: exact above 1e-290
        x = torch.where(x.abs() < 1e-290, 0.0, x)
    total = sum(model_state.columns(x, world=world, first=r == 0) for r in range(world))
    assert isinstance(total, Tensor)
    found = model_state.joined(total, x, world=world)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=100)
@given(world=st.integers(2, 9), seed=st.integers(0, 2**30), dtype=st.sampled_from(DTYPES))
def test_others_become_the_mean_or_the_first_ranks(
    world: int, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    every = [
        torch.randn(5, 3, dtype=wide, generator=generator).mul(9).to(dtype) for _ in range(world)
    ]
    parts = [model_state.columns(x, world=world, first=r == 0) for r, x in enumerate(every)]
    leaves = [every[0], every[0]]
    flat = torch.cat([torch.stack(parts).sum(0).view(-1)] * 2)
    first, second = model_state.split(flat, leaves)
    found = model_state.joined(first, every[0], world=world)
    assert torch.equal(first, second)
    if dtype in (torch.int64, torch.bool):
        assert torch.equal(found, every[0])
    else:
        want = torch.stack([x.to(wide) for x in every]).mean(0).to(dtype)
        torch.testing.assert_close(found, want)


def agrees(stage: int, accum: int) -> list[dict[str, Tensor]]:
    engine = fzero.Engine(
        build(), fzero.optim.sgd(0.1), fzero.Config(stage=stage, accum_steps=accum)
    )
    seen = []
    for step in range(3):
        for micro in range(accum - 1):
            engine(rows(here()[0], 50 + step + micro)).square().mean().backward()
        seen += [one_step(engine, step), snapshot(engine.module)]
    return seen


@pytest.mark.parametrize(("world", "stage", "accum"), [(2, 0, 1), (3, 3, 1), (3, 1, 2)])
def test_ranks_agree_after_every_update(world: int, stage: int, accum: int) -> None:
    by_rank = run_ranks(world, agrees, stage, accum)
    for step in range(3):
        before = [seen[2 * step] for seen in by_rank]
        after = [seen[2 * step + 1] for seen in by_rank]
        for name in before[0]:
            own, new = [x[name] for x in before], [x[name] for x in after]
            if name == "cache":
                assert [len(x) for x in new] == [len(x) for x in own]
                continue
            assert all(torch.equal(new[0], x) for x in new), name
            if name in ("seen", "flag"):
                want = own[0]
            elif name in ("inner.same", "mask"):
                assert torch.equal(new[0], own[0])
                continue
            else:
                high = torch.complex128 if own[0].is_complex() else torch.float64
                want = torch.stack([x.to(high) for x in own]).mean(0).to(own[0].dtype)
            torch.testing.assert_close(new[0], want)


class Running(nn.Module):
    """What a step function takes as well: no shape changes, nothing through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 2).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("low", torch.zeros(4))
        self.register_buffer("count", torch.tensor(3), persistent=False)
        self.register_buffer("table", torch.tensor([0.1, -torch.inf, 1 / 3]))

    def forward(self, x: Tensor) -> Tensor:
        row = x.detach().mean(0)
        self.mean = self.mean.lerp(row, 0.1)
        self.low.add_(row.float())
        self.count.add_((row[0] * 100).long())
        return self.lin(x - self.mean) + self.table[0]


def either_way(stage: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    module, cfg = Running(), fzero.Config(stage=stage)
    ends = []
    for executor in ("traced", "eager"):
        apply, params, buffers = fzero.functionalize(module, buffers=True)

        def model_fn(params: Any, state: Any, batch: Tensor, apply: Any = apply) -> Any:
            out, state = apply(params, state, batch)
            return out.square().mean(), state

        step_fn = fzero.make_train_step(
            model_fn, fzero.optim.sgd(0.1), cfg.replace(executor=executor)
        )
        params, opt_state = step_fn.init(params, buffers)
        for step in range(3):
            params, opt_state = step_fn(params, opt_state, rows(here()[0], step))
        ends.append(opt_state.model_state)
    engine = fzero.Engine(module, fzero.optim.sgd(0.1), cfg)
    for step in range(3):
        one_step(engine, step)
    return [*ends, engine.state[1].model_state]


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (3, 3)])
def test_step_functions_and_engines_have_one_rule(world: int, stage: int) -> None:
    by_rank = run_ranks(world, either_way, stage) if world > 1 else [either_way(stage)]
    for ends in by_rank:
        for found in ends:
            assert list(found) == ["mean", "low", "count", "table"]
            for name, x in found.items():
                torch.testing.assert_close(x, by_rank[0][0][name], rtol=1e-6, atol=1e-6)
            assert torch.equal(found["table"], torch.tensor([0.1, -torch.inf, 1 / 3]))


# ---- in checkpoints
def test_a_checkpoint_has_every_buffer(tmp_path: Path) -> None:
    engine = fzero.Engine(build(), fzero.optim.adam(0.1))
    for step in range(3):
        one_step(engine, step)
    engine.module.cache = torch.zeros(0)
    save(tmp_path, *engine.state)
    other = fzero.Engine(build(), fzero.optim.adam(0.1))
    other.state = load(tmp_path, *other.state)
    want, found = snapshot(engine.module), snapshot(other.module)
    assert list(found) == list(want)
    assert len(want) == 10
    assert all(torch.equal(found[name], x) for name, x in want.items())


def refused(run: Path) -> str:
    engine = fzero.Engine(build(), fzero.optim.sgd(0.1))
    engine.module.cache = torch.zeros(0)
    engine.module.mean.fill_(here()[0])
    with pytest.raises(fzero.CheckpointError) as told:
        save(run, *engine.state)
    return str(told.value)


def test_buffers_that_differ_are_not_saved(tmp_path: Path) -> None:
    for text in run_ranks(2, refused, tmp_path):
        assert "opt_state.model_state.mean: rank 0: [0.0" in text


def test_a_checkpoint_of_an_earlier_release_leaves_buffers_as_they_are(tmp_path: Path) -> None:
    engine = fzero.Engine(build(), fzero.optim.sgd(0.1))
    params, opt_state = engine.state
    folder = save(tmp_path, params, opt_state._replace(model_state=None))
    with pytest.raises(fzero.CheckpointError, match=r"model_state\.mean"):
        load(tmp_path, *engine.state)  # of this release, and without buffers by choice
    found = json.loads((folder / "manifest.json").read_text())
    del found["manifest"]["lineage"]
    found["checksum"] = _digest(found["manifest"])
    (folder / "manifest.json").write_text(json.dumps(found))
    engine.module.mean.fill_(7)
    with pytest.warns(UserWarning, match=r"kept an engine's only beside.*model_state\.mean"):
        engine.state = load(tmp_path, *engine.state)
    assert (engine.module.mean == 7).all()


# ---- between an engine and a step function
def test_a_model_function_without_model_state_carries_it_along() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    engine = fzero.Engine(module, fzero.optim.sgd(0.1))
    apply, _ = fzero.functionalize(module)
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).mean(), fzero.optim.sgd(0.1), engine.cfg
    )
    params, opt_state = step_fn(*engine.state, torch.ones(2, 3))
    assert opt_state.model_state.keys() == dict(module.named_buffers()).keys()
    engine.state = params, opt_state
    module[1].running_mean.fill_(3)
    engine.state = params, opt_state._replace(model_state=None)
    assert (module[1].running_mean == 3).all()


def test_model_state_of_a_function_that_takes_none_is_carried_along() -> None:
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(0.1))
    params, opt_state = step_fn.init({"w": torch.ones(2)}, {"ema": torch.ones(2)})
    _, opt_state = step_fn(params, opt_state, torch.ones(2))
    assert torch.equal(opt_state.model_state["ema"], torch.ones(2))


def test_buffers_that_do_not_fit_are_named() -> None:
    engine = fzero.Engine(build(), fzero.optim.sgd(0.1))
    params, opt_state = engine.state
    for wrong, said in (
        ({**opt_state.model_state, "mean": torch.zeros(5)}, r"'mean' is torch.float32 \(5,\)"),
        ({k: x for k, x in opt_state.model_state.items() if k != "mean"}, "'mean' is missing"),
        ({**opt_state.model_state, "more": torch.zeros(1)}, "no buffer 'more'"),
    ):
        with pytest.raises(fzero.ShardError, match=said):
            engine.state = params, opt_state._replace(model_state=wrong)
