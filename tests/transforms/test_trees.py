"""Arithmetic on trees of shards is that of the whole leaves."""

import itertools
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
from tests.ranks import fake_ranks, run_ranks

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


REDUCTIONS: dict[str, Any] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "norm": torch.linalg.vector_norm,
    "max": torch.max,
    "any": lambda x: (x > 20).any(),
    "column sums": lambda x: x.sum(0),
    "column maxima": lambda x: x.amax(0),
    "twice the sum": lambda x: 2 * x.sum(),
}
READERS: dict[str, Any] = {
    "returned": lambda tree: tree,
    "vdot": lambda tree: fzero.tree_vdot(tree, tree),
    "norm": fzero.tree_norm,
    "global norm": optim.tree_global_norm,
    "updates": lambda tree: fzero.apply_updates(tree, tree),
    "item": lambda tree: {k: torch.tensor(float(x.max())) for k, x in tree.items()},
    "list": lambda tree: {k: torch.tensor(x.tolist()) for k, x in tree.items()},
    "in": lambda tree: {k: torch.tensor([20 in x, 21 in x]) for k, x in tree.items()},
}


def _reductions(executor: Any, stage: int) -> list[str]:
    """Which readers of which reductions differ between shards and whole leaves."""
    cfg = fzero.Config(stage=stage, executor=executor)
    full = {"w": torch.arange(21.0, dtype=F64).view(7, 3) - 3, "b": torch.arange(8.0) + 10}
    wrong = []
    for (reduction, reduce), (reader, read) in itertools.product(
        REDUCTIONS.items(), READERS.items()
    ):
        if reduction == "any" and reader not in ("returned", "item", "list"):
            continue  # there is no arithmetic of bools

        def mapped(tree: Any, reduce: Any = reduce, read: Any = read) -> Any:
            return read(fzero.tree_map(reduce, tree))

        def plain(tree: Any, reduce: Any = reduce, read: Any = read) -> Any:
            return read({k: reduce(x) for k, x in tree.items()})

        ways = {"outside": mapped, "mapped": fzero.jit(mapped, cfg), "plain": fzero.jit(plain, cfg)}
        if executor == "traced" and reader in ("item", "list", "in"):  # refused
            ways = {"outside": mapped}
        if reader == "list":  # torch's DTensor has none
            ways.pop("outside")
        for way, run in ways.items():
            found = _full(run(fzero.shard(full, cfg)))
            try:
                torch.testing.assert_close(found, plain(full))
            except AssertionError:
                wrong.append(f"{reader} of {reduction}, {way}")
    return wrong


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.quick("3-traced", "1-eager")
def test_what_reads_a_reduction_reads_that_of_whole_leaves(stage: int, executor: Any) -> None:
    assert run_ranks(2, _reductions, executor, stage) == [[], []]


def _decisions(executor: Any) -> list[float]:
    cfg = fzero.Config(stage=3, executor=executor)
    full = {"w": torch.arange(8.0).view(4, 2), "b": torch.ones(4)}

    def small(params: Any) -> Any:
        return fzero.tree_map(lambda v: v if float(v.sum()) < 10 else v * 0, params)

    run = fzero.jit(small, cfg) if executor == "eager" else small
    return [float(x.sum()) for x in _full(run(fzero.shard(full, cfg))).values()]


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_what_is_decided_by_a_reduction_is_decided_alike_on_all_ranks(executor: Any) -> None:
    assert run_ranks(2, _decisions, executor) == [[0.0, 4.0]] * 2


def test_sums_of_leaves_that_are_staged_out_travel_once() -> None:
    with fake_ranks(2):
        params = fzero.shard({"w": torch.ones(4, 2), "b": torch.ones(4)})
        total = fzero.jit(lambda p: torch.stack(tree.leaves(fzero.tree_map(torch.sum, p))).sum())
        mapped = fzero.jit(lambda p: fzero.tree_map(lambda x: x * 2, p))
        assert str(total.lower(params)).count(".all_reduce(") == 1
        assert ".all_reduce(" not in str(mapped.lower(params))


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
    with pytest.raises(ConfigError, match=r"the function comes first, and is a dict"):
        fzero.tree_map(a, torch.add)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShardError, match=r"tree_norm: a\['n'\] is a float"):
        fzero.tree_norm({"n": 1.0})
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
    for seed, found in (
        ("x", "'x'"),
        (1.5, "1.5"),
        (True, "True"),
        (2**63, "9223372036854775808"),
        (torch.zeros(2, dtype=torch.int64), r"a torch.int64 tensor of shape \(2,\)"),
        (torch.zeros(()), r"a torch.float32 tensor of shape \(\)"),
    ):
        with pytest.raises(ConfigError, match=f"seed is {found}; it must be an int of 64 bits"):
            fzero.tree_random_like(a, seed)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShardError, match="must be floating"):
        fzero.tree_random_like({"n": torch.zeros(2, dtype=torch.int64)}, 0)
