"""`unshard(shard(x)) == x` on real ranks, for any tree of any leaves."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import fzero
from fzero import Config, tree
from fzero.distributed.ragged import RaggedDTensor, is_supported
from fzero.state.sharding import lies_flat
from tests.layout.test_layout import leaves
from tests.ranks import run_ranks


class Pair(NamedTuple):
    first: Any
    second: Any


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Dicts, lists, tuples, namedtuples and None, nested."""
    return st.recursive(
        leaf | st.none(),
        lambda inner: (
            st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )


def _same(a: Any, b: Any) -> bool:
    (left, spec), (right, other) = tree.flatten(a), tree.flatten(b)
    return spec == other and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(left, right, strict=True)
    )


def _shared(new: Any, old: Any) -> bool:
    """Whether the two trees have memory in common."""

    def places(of: Any) -> set[int]:
        leaves = [x.to_local() if isinstance(x, DTensor) else x for x in tree.leaves(of)]
        return {x.untyped_storage().data_ptr() for x in leaves if x.numel()}

    return bool(places(new) & places(old))


def _wrong(drawn: list[Any], hybrid: bool) -> list[str]:
    """On a rank: the laws that some tree breaks."""
    mesh = init_device_mesh("cpu", (2, 2)) if hybrid else None
    cfg, wrong = Config(mesh=mesh), []
    for i, full in enumerate(drawn):
        kept = tree.map(torch.clone, full)
        sharded = fzero.shard(full, cfg)
        if not _same(fzero.unshard(sharded), full):
            wrong.append(f"tree {i}: unshard does not undo shard")
        if _shared(fzero.unshard(sharded), sharded) or _shared(fzero.unshard(full), full):
            wrong.append(f"tree {i}: unshard gives no copies")
        if not _same(fzero.unshard(sharded, copy=False), full):
            wrong.append(f"tree {i}: copy=False")
        gathered = fzero.unshard(sharded, rank0_only=True)
        if gathered is not None and _shared(gathered, sharded):
            wrong.append(f"tree {i}: rank0_only gives no copies")
        if not (_same(gathered, full) if dist.get_rank() == 0 else gathered is None):
            wrong.append(f"tree {i}: rank0_only")
        for x, y in zip(tree.leaves(full), tree.leaves(sharded), strict=True):
            if not isinstance(y, DTensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
                wrong.append(f"tree {i}: {y}")
                continue
            theirs = distribute_tensor(x.contiguous(), y.device_mesh, y.placements)
            if not torch.equal(theirs.to_local(), y.to_local()):
                wrong.append(f"tree {i}: not the part of a DTensor")
            y.to_local().zero_()
        if not _same(full, kept):
            wrong.append(f"tree {i}: shards share memory with the input")
        if not _same(fzero.unshard(kept), kept):
            wrong.append(f"tree {i}: unshard changes full tensors")
    return wrong


@pytest.mark.parametrize(("world", "hybrid"), [(1, False), (2, False), (3, False), (4, True)])
def test_unshard_undoes_shard(world: int, hybrid: bool) -> None:
    @settings(max_examples=8)
    @given(st.lists(trees(leaves()), min_size=1, max_size=6))
    def law(drawn: list[Any]) -> None:
        assert run_ranks(world, _wrong, drawn, hybrid) == [[]] * world

    law()


@settings(max_examples=40)
@given(trees(leaves()))
def test_without_a_process_group_too(full: Any) -> None:
    assert not dist.is_initialized()
    assert _same(fzero.unshard(fzero.shard(full)), full)


def _commutes(x: Tensor) -> bool:
    def f(x: Tensor) -> Tensor:  # of correctly rounded operations, wherever a vector ends
        return (x * x + 3).sqrt().relu()

    return torch.equal(fzero.shard(f(x)).to_local(), f(fzero.shard(x).to_local()))


def test_sharding_commutes_with_elementwise_operations() -> None:
    for shape in ((7, 15), (16, 17), (1, 3), (5,), ()):
        assert run_ranks(3, _commutes, torch.randn(shape)) == [True] * 3


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_leave_what_was_unsharded_alone(stage: int, executor: str) -> None:
    cfg = Config(stage=stage, executor=executor)  # pyright: ignore
    step_fn = fzero.make_train_step(
        lambda p, x: (p["w"] * x).sum() * p["s"], fzero.optim.sgd(0.1), cfg
    )
    params, opt_state = step_fn.init({"w": torch.ones(3), "s": torch.tensor(1.0)})
    best = fzero.unshard(params)
    params, opt_state = step_fn(params, opt_state, torch.ones(4, 3))
    assert _same(best, {"w": torch.ones(3), "s": torch.tensor(1.0)})
    assert not _same(fzero.unshard(params), best)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_by_default_leaves_lie_end_to_end_where_parameters_are_whole(stage: int) -> None:
    """And where the optimizer works on shards: others are given DTensors to work on."""
    ours = fzero.optim.adamw(0.1)
    theirs = ours._replace(foreign=True)
    few, many = ([torch.empty(64, 64, device="meta")] * n for n in (4, 256))
    assert lies_flat(Config(stage=stage), ours, few) == (stage in (1, 2) and is_supported())
    assert lies_flat(Config(stage=stage), ours, many) == (stage > 0 and is_supported())
    for params in (few, many):
        assert not lies_flat(Config(stage=stage), theirs, params)
        assert not lies_flat(Config(stage=stage), None, params)
        for opt in (ours, theirs, None):
            assert lies_flat(Config(stage=stage, layout="flat"), opt, params)
            assert not lies_flat(Config(stage=stage, layout="rows"), opt, params)


def _small_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.stack([(x @ w).square().mean() for w in params.values()]).sum()


def _on_from(layout: str) -> tuple[bool, float]:
    """On a rank: a default step on what lies so; if its leaves lie end to end, and its error."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    full, x = {f"w{i}": drawn(64, 64) for i in range(256)}, drawn(2 * 4, 64)
    cfg, opt = Config(stage=3), fzero.optim.sgd(0.1, momentum=0.9)
    first = fzero.make_train_step(_small_loss, opt, cfg.replace(layout=layout))
    state = first.init(full)
    mine = x.chunk(2)[dist.get_rank()]
    step_fn = fzero.make_train_step(_small_loss, opt, cfg)
    for _ in range(2):
        state = step_fn(*state, mine)
    plain = {name: w.clone().requires_grad_() for name, w in full.items()}
    theirs = torch.optim.SGD(plain.values(), lr=0.1, momentum=0.9)
    for _ in range(2):
        theirs.zero_grad()
        _small_loss(plain, x).backward()
        theirs.step()
    found = fzero.unshard(state[0])
    error = max((found[name] - w).abs().max().item() for name, w in plain.items())
    return all(isinstance(w, RaggedDTensor) for w in state[0].values()), error


@pytest.mark.parametrize("layout", ["auto", "rows"])
def test_a_default_step_goes_on_with_small_leaves_however_they_lie(layout: str) -> None:
    for flat, error in run_ranks(2, _on_from, layout):
        assert flat == (layout != "rows" and is_supported())
        assert error < 1e-12
