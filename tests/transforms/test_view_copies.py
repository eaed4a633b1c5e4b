"""Views across the dim that is split are views: what is written through them is written."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

import fzero
from fzero import tree
from fzero.distributed.ragged import is_supported
from fzero.errors import ShardError
from fzero.transforms import view_copies
from fzero.transforms.whole import WholeLeaves
from tests.ranks import run_ranks

NEEDS_RAGGED = pytest.mark.skipif(
    not is_supported(), reason="flats want a torch whose DTensors can be ragged"
)
F64 = torch.float64
SHAPES = [(6, 5), (7, 5), (4, 4), (12,), (2, 3)]  # with nothing on one of three ranks at the last


def _set(x: Tensor, at: Any, value: Any) -> None:
    x[at] = value


def _before_and_after(x: Tensor) -> Tensor:
    rows = x[0:2]
    x.mul_(2)
    return rows.sum() + x.sum()


def _each_other(x: Tensor) -> Tensor:
    rows, row = x[0:2], x[1]
    row.zero_()
    rows.add_(1)
    x[0].mul_(3)
    return row.sum() * 2 + rows.sum()


def _by_two_steps(x: Tensor) -> Tensor:
    first = x[0:2]
    inner = first[1:]
    inner.add_(5)
    x.add_(1)
    return inner.sum() + first.sum()


def _by_detached(x: Tensor) -> None:
    x.detach()[1:].detach().zero_()


# each changes the clone of a leaf that it is given, and may give what it has read
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "first": lambda x: _set(x, 0, -1),
    "last": lambda x: _set(x, -1, -1),
    "some": lambda x: _set(x, slice(1, 3), 0),
    "some in place": lambda x: x[1:3].mul_(3),
    "of the others": lambda x: _set(x, (..., 0), 0),
    "mask": lambda x: _set(x, x > 1, 0),
    "select": lambda x: x.select(0, 1).zero_(),
    "narrow": lambda x: x.narrow(0, 1, 1).fill_(7),
    "chunk": lambda x: x.chunk(2)[0].zero_(),
    "chunks": lambda x: [part.mul_(i) for i, part in enumerate(x.chunk(2))],
    "split": lambda x: x.split(1)[1].add_(1),
    "row from row": lambda x: _set(x, 0, x[1]),
    "copy": lambda x: x[0].copy_(x[1]),
    "lists": lambda x: torch._foreach_mul_([x[0], x[1]], 3),
    "out": lambda x: torch.mul(x[1], 2, out=x[0]),
    "flat": lambda x: _set(x.view(-1), 2, 7) if len(x) % 6 == 0 else None,
    "diagonal": lambda x: x.diagonal().zero_() if x.dim() > 1 else None,
    "transposed": lambda x: _set(x.transpose(0, -1), 0, 7),
    "by itself": lambda x: x[0:1].add_(x.sum(0)),
    "not a view": lambda x: x[0].clone().zero_(),
    "a copy, or not": lambda x: x.transpose(0, -1).contiguous().zero_(),
    "sorted": lambda x: x[0:2].copy_(x[0:2].sort(0).values),
    "seen by views before": _before_and_after,
    "seen by other views": _each_other,
    "views of views": _by_two_steps,
    "detached": _by_detached,
}


def _leaf(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=F64) * 1.5 + 0.1


def _of_clones(x: Tensor) -> dict[str, list[Tensor]]:
    found = {}
    for name, write in WRITES.items():
        y = x.clone()
        try:
            read = write(y)
        except ShardError as error:
            if "RaggedDTensor" not in str(error):  # leaves of flats have no views, and say so
                raise
            continue
        found[name] = [y, read] if isinstance(read, Tensor) and read.dim() == 0 else [y]
    return found


def _close(found: Any, wanted: Any) -> bool:
    full = [x.full_tensor() if isinstance(x, DTensor) else x for x in found]
    return all(map(torch.allclose, full, wanted))


RUNS: dict[str, Callable[..., Any]] = {
    "jit": lambda tree, cfg: fzero.jit(lambda tree: _of_clones(tree["w"]), cfg)(tree),
    "tree_map": lambda tree, cfg: fzero.tree_map(_of_clones, {"w": tree["w"]})["w"],
    "both": lambda tree, cfg: fzero.jit(
        lambda tree: fzero.tree_map(_of_clones, {"w": tree["w"]})["w"], cfg
    )(tree),
}


def _lost(layout: Any, executor: Any, way: str, shapes: list[tuple[int, ...]]) -> list[str]:
    """What was written, and is not there."""
    cfg, lost = fzero.Config(stage=3, layout=layout, executor=executor), []
    for shape in shapes:
        leaf = _leaf(shape)
        tree = {"w": leaf.clone(), "z": torch.ones(3, dtype=F64)}  # so that borders are uneven
        shards = fzero.shard(tree, cfg)
        found, wanted = RUNS[way](shards, cfg), _of_clones(leaf)
        assert layout == "flat" or found.keys() == wanted.keys()
        lost += [f"{x} of {shape}" for x in found if not _close(found[x], wanted[x])]
        assert torch.equal(shards["w"].full_tensor(), leaf)
    return lost


@pytest.mark.parametrize("way", ["jit", "tree_map"])
@pytest.mark.parametrize("layout", ["rows", pytest.param("flat", marks=NEEDS_RAGGED)])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.quick("2-rows-jit", "3-rows-tree_map", "2-flat-jit", "3-flat-tree_map")
def test_what_is_written_through_a_view_is_written(world: int, layout: Any, way: str) -> None:
    assert run_ranks(world, _lost, layout, "eager", way, SHAPES) == [[]] * world


@pytest.mark.parametrize("way", ["jit", "both"])
@pytest.mark.quick("jit")
def test_what_is_staged_out_writes_through_views(way: str) -> None:
    assert run_ranks(2, _lost, "rows", "traced", way, [(6, 5)]) == [[], []]


# what uses a view and is no operator of torch's; an operator beside them
READS: dict[str, Callable[[Any], Any]] = {
    "returned": lambda v: v,
    "returned, a view of it": lambda v: v[1:],
    "an operator": lambda v: v + 0,
    "full": lambda v: v.full_tensor() if isinstance(v, DTensor) else v,
    "elsewhere": lambda v: (
        v.redistribute(placements=[Replicate()]) if isinstance(v, DTensor) else v
    ),
    "local": lambda v: v.to_local() if isinstance(v, DTensor) else v,  # it is whole everywhere
    "norm": lambda v: fzero.tree_norm([v]),
    "vdot": lambda v: fzero.tree_vdot([v], [v]),
    "updates": lambda v: fzero.apply_updates([v], [v])[0],
    "updated": lambda v: fzero.optim.sgd(0.1).update([v], fzero.optim.sgd(0.1).init([v]), [v])[0][
        0
    ],
    "mapped": lambda v: fzero.tree_map(lambda x: x, [v])[0],
    "differentiated": lambda v: (
        fzero.grad(lambda p: (p[0] ** 3).sum(), CFG)([v])[0] if isinstance(v, DTensor) else 3 * v**2
    ),
}
CFG = fzero.Config(stage=3, layout="rows")


def _outdated(executor: Any, way: str) -> list[str]:
    """By which readers a view is not what was written into its base."""
    leaf, found = _leaf((6, 5)), []
    cfg = replace(CFG, executor=executor)
    for name, read in READS.items():

        def fn(x: Tensor, read: Any = read) -> Any:
            y = x.clone()
            view = y[1:4]
            y.mul_(2)
            first = read(view)
            y[0:2].add_(1)  # and once more
            return first, read(view)

        shards = fzero.shard({"w": leaf}, cfg)
        if way == "jit":
            given = fzero.jit(lambda tree, fn=fn: fn(tree["w"]), cfg)(shards)
        else:
            given = fzero.tree_map(fn, shards)["w"]
        # from here on one rank may look alone
        stale = [x for x in tree.leaves(given) if isinstance(x, view_copies._Outdated)]
        found += [f"{name}: outdated" for _ in stale]
        wanted = fn(leaf)
        # a view that is returned twice is one, and has what was written last
        wanted = [x.clone() for x in wanted]
        if not _close(given, wanted):
            found.append(name)
    return found


@pytest.mark.parametrize("way", ["jit", "tree_map"])
@pytest.mark.parametrize("executor", ["eager", "traced"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.quick("2-traced-jit", "3-eager-jit", "3-traced-tree_map", "2-eager-tree_map")
def test_whoever_reads_a_view_sees_what_was_written(world: int, executor: Any, way: str) -> None:
    assert run_ranks(world, _outdated, executor, way) == [[]] * world


def _inside_inference(way: str) -> list[list[float]]:
    """What is made under inference mode, and left outside of it."""

    def fn(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x.clone()
            view = y[1:3]
            y.mul_(2)
        return view

    shards = fzero.shard({"w": torch.arange(4.0)}, CFG)
    if way == "jit":
        run = fzero.jit(lambda tree: fn(tree["w"]), replace(CFG, executor="eager"))
        return [run(shards).full_tensor().tolist()]
    return [fzero.tree_map(fn, shards)["w"].full_tensor().tolist()]


@pytest.mark.parametrize("way", ["jit", "tree_map"])
def test_views_leave_inference_mode_with_what_was_written(way: str) -> None:
    assert run_ranks(2, _inside_inference, way) == [[[2.0, 4.0]]] * 2


def _shown() -> list[str]:
    """What one rank shows of an outdated view, alone."""
    x, found = fzero.shard({"w": torch.arange(4.0)}, CFG)["w"], []
    with WholeLeaves():
        y = x.clone()
        view: Any = y[1:3]
        y.mul_(2)
        if torch.distributed.get_rank() == 0:
            found.append(repr(view))
        assert view.full_tensor().tolist() == [2, 4]
    return found


def test_one_rank_may_show_a_view_alone() -> None:
    (shown,), others = run_ranks(2, _shown)
    assert others == []
    assert shown.startswith("DTensor(outdated: tensor([1., 2.])")


def _under_inference(leaf: Tensor, fn: Callable[[Tensor], Any]) -> bool:
    shards = fzero.shard({"w": leaf}, fzero.Config(stage=3, layout="rows"))
    with torch.inference_mode():
        found = fzero.tree_map(fn, shards)["w"].full_tensor()
        return torch.equal(found, fn(leaf))


def _copied(x: Tensor) -> Tensor:
    y = x.clone()
    y.transpose(0, 1).contiguous().zero_()
    return y


def _reshaped(x: Tensor) -> Tensor:
    y = x.clone()
    y.transpose(1, 2).reshape(len(y), -1).mul_(2)
    return y


def _copies() -> bool:
    # of (3, 3) a rank's part of one row is contiguous however it lies
    return all(_under_inference(_leaf((n, 3)), _copied) for n in (3, 4)) and all(
        _under_inference(_leaf((n, 4, 5)), _reshaped) for n in (4, 5)
    )


@pytest.mark.parametrize("world", [2, 3])
def test_what_may_copy_is_no_view_under_inference_mode(world: int) -> None:
    assert run_ranks(world, _copies, timeout=100) == [True] * world


def _gradients(executor: Any) -> bool:
    cfg, leaf = fzero.Config(stage=3, layout="rows", executor=executor), _leaf((6, 5))

    def gradient(tree: Any) -> Tensor:
        x = tree["w"].detach().requires_grad_()
        with torch.enable_grad():
            y = x * 2
            y[0] = y[1] * 2
            y[1:4].mul_(3)
            loss = y.square().sum()
        return torch.autograd.grad(loss, x)[0]

    found = fzero.jit(gradient, cfg)(fzero.shard({"w": leaf}, cfg))
    return torch.allclose(found.full_tensor(), gradient({"w": leaf}))


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_gradients_pass_through_what_is_written(executor: Any) -> None:
    assert run_ranks(2, _gradients, executor) == [True, True]


def _kept() -> list[int]:
    cfg, held = fzero.Config(stage=3, layout="rows"), []
    x = fzero.shard({"w": _leaf((6, 5))}, cfg)["w"]
    with WholeLeaves() as mode:
        for _ in range(3):
            row = x[0]
            held.append(len(mode._copies._copies))
        del row
        gc.collect()
        return [*held, len(mode._copies._copies)]


def test_views_go_when_nobody_has_them() -> None:
    assert run_ranks(2, _kept) == [[1, 1, 1, 0]] * 2
