"""Arithmetic on trees of shards is that of the whole leaves."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fzero
from fzero import optim, tree
from fzero.errors import ConfigError, ShardError
from tests.ranks import run_ranks

F64 = torch.float64
SHAPES = [(7, 3), (), (16,), (2, 5, 3), (1,), (0, 4)]


def _tree(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"l{i}": torch.randn(s, generator=generator, dtype=F64) for i, s in enumerate(SHAPES)}


def _full(values: Any) -> Any:
    return tree.map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, values)


def _arithmetic(hybrid: bool) -> dict[str, float]:
    cfg = fzero.Config(mesh=init_device_mesh("cpu", (2, 2)) if hybrid else None)
    a, b = _tree(0), _tree(1)
    x, y = fzero.shard(a, cfg), fzero.shard(b, cfg)
    dot = torch.stack([(a[k] * b[k]).sum() for k in a]).sum()
    norm = torch.stack([v.square().sum() for v in a.values()]).sum().sqrt()
    staged = fzero.jit(lambda x, y: (fzero.tree_vdot(x, y), fzero.tree_norm(x)), cfg)(x, y)
    gaps = {
        "vdot": fzero.tree_vdot(x, y) - dot,
        "norm": fzero.tree_norm(x) - norm,
        "vdot staged": staged[0] - dot,
        "norm staged": staged[1] - norm,
        "global norm": optim.tree_global_norm(x) - norm,
    }
    for kind in ("normal", "uniform", "rademacher"):
        ours = _full(fzero.tree_random_like(x, 3, kind))
        theirs = fzero.tree_random_like(a, 3, kind)
        gaps[kind] = sum((ours[k] - v).abs().sum() for k, v in theirs.items())
    moved = _full(fzero.apply_updates(x, {**y, "l1": None}))
    gaps["updates"] = sum(
        (moved[k] - (v if k == "l1" else v + b[k])).abs().sum() for k, v in a.items()
    )
    mapped = _full(fzero.tree_map(lambda p, q: p * 2 - q, x, y))
    gaps["map"] = sum((mapped[k] - (a[k] * 2 - b[k])).abs().sum() for k in a)
    return {k: float(abs(v)) for k, v in gaps.items()} | {"world": float(dist.get_world_size())}


@pytest.mark.parametrize(("world", "hybrid"), [(1, False), (2, False), (4, True)])
def test_arithmetic_is_that_of_whole_leaves(world: int, hybrid: bool) -> None:
    for found in run_ranks(world, _arithmetic, hybrid):
        assert found.pop("world") == world
        assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-12)


@given(st.integers(0, 2**31), st.integers(1, 300))
def test_numbers_depend_on_seed_leaf_and_element_alone(seed: int, size: int) -> None:
    one = fzero.tree_random_like({"a": torch.zeros(size), "b": torch.zeros(size)}, seed)
    assert not torch.equal(one["a"], one["b"])
    alone = fzero.tree_random_like({"a": torch.zeros(size)}, torch.tensor(seed))
    assert torch.equal(one["a"], alone["a"])
    assert not torch.equal(
        one["a"], fzero.tree_random_like({"a": torch.zeros(size)}, seed + 1)["a"]
    )


def test_normal_numbers_are_normal() -> None:
    x = fzero.tree_random_like({"a": torch.zeros(200_000, dtype=F64)}, 0)["a"]
    moments = [x.mean(), x.square().mean(), (x**3).mean(), (x**4).mean()]
    assert torch.stack(moments).tolist() == pytest.approx([0, 1, 0, 3], abs=0.05)
    signs = fzero.tree_random_like({"a": torch.zeros(1000)}, 0, "rademacher")["a"]
    assert set(signs.tolist()) == {1.0, -1.0}


def test_trees_that_do_not_fit_are_refused() -> None:
    a = {"w": torch.ones(3)}
    with pytest.raises(ShardError, match="one structure"):
        fzero.tree_vdot(a, {"v": torch.ones(3)})
    with pytest.raises(ShardError, match=r"\['w'\].* and .*\['v'\].*its structure"):
        fzero.tree_map(torch.add, a, {"v": torch.ones(3)})
    with pytest.raises(
        ValueError, match="could not convert"
    ):  # what the function raises is its own
        fzero.tree_map(lambda x: float("one"), a)
    with pytest.raises(ShardError, match="live in different ways"):
        fzero.tree_vdot(a, fzero.shard(a))
    with pytest.raises(ShardError, match="has no parameter"):
        fzero.apply_updates(a, {"v": torch.ones(3)})
    with pytest.raises(ShardError, match="has shape"):
        fzero.apply_updates(a, {"w": torch.ones(2)})
    with pytest.raises(ConfigError, match="distribution='cauchy'"):
        fzero.tree_random_like(a, 0, "cauchy")
    with pytest.raises(ShardError, match="must be floating"):
        fzero.tree_random_like({"n": torch.zeros(2, dtype=torch.int64)}, 0)
