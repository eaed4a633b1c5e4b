"""Bucketed collectives give plain sums and joins, whatever the buckets and who waits when."""

import itertools
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fzero.distributed import buckets, transport, works
from fzero.distributed.journal import Journal
from fzero.distributed.mesh import Axes, Axis, Mesh, resolve_mesh
from fzero.distributed.transport import Transport
from fzero.distributed.whereabouts import circle_of
from fzero.layout import Layout, LeafLayout
from fzero.layout.flats import plan_flats
from tests.ranks import fake_ranks, run_ranks

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64 = torch.complex64
# shape, dim, dtype, compute dtype, dtype that gradients are reduced in
KINDS = [
    ((7, 3), 0, F32, BF16, F32),
    ((4, 6), 1, F32, BF16, None),
    ((3,), None, F32, None, F64),
    ((1, 5), 0, F64, None, None),
    ((8, 2), 0, C64, None, None),
    ((), None, C64, None, None),
    ((2, 9), 1, BF16, None, F32),
    ((12, 3), 0, F16, None, None),  # even on 2, 3 and 4 ranks, and together in one bucket
    ((24,), 0, F16, None, None),
    ((5, 4), 0, F32, None, None),
    ((2, 3), 1, F32, None, None),
    ((9,), 0, F32, None, None),
]


def _axes(mesh: Mesh) -> Axes:
    return Axes(
        Axis(mesh.shard_group, mesh.shard_size, mesh.shard_rank),
        Axis(mesh.replicate_group, mesh.replicate_size, mesh.replicate_rank),
    )


def _leaves(world: int, *, flat: bool = False) -> list[LeafLayout]:
    leaves = [
        LeafLayout(f"leaf {i}", shape, dtype, dim, world, compute=compute, reduce=reduce)
        for i, (shape, dim, dtype, compute, reduce) in enumerate(KINDS)
    ]
    # two trees whose leaves have the same places in their flats
    return [*plan_flats(Layout(tuple(leaves), world), 2**20)] * 2 if flat else leaves


def _values(leaf: LeafLayout, seed: int) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, leaf.shape, generator=generator).to(leaf.dtype)


def _same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y), (x, y)
        assert x.is_contiguous()


def _parts(full: list[Tensor], leaves: list[LeafLayout], at: int) -> list[Tensor]:
    pairs = zip(full, leaves, strict=True)
    return [x if leaf.dim is None else leaf.split(x, at) for x, leaf in pairs]


def _all_ways(hybrid: bool, flat: bool) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = resolve_mesh(init_device_mesh("cpu", (2, world // 2)) if hybrid else None, "cpu")
    axes = _axes(mesh)
    leaves, at = _leaves(axes.shard.size, flat=flat), axes.shard.rank
    assert any(leaf.home is not None for leaf in leaves) == (flat and axes.shard.size > 1)
    journal = Journal(mesh, active=False)
    full = [_values(leaf, i) for i, leaf in enumerate(leaves)]
    shards = _parts(full, leaves, at)
    gathered = [x.to(leaf.compute or x.dtype) for x, leaf in zip(full, leaves, strict=True)]
    by_rank = [[_values(leaf, 100 * r + i) for i, leaf in enumerate(leaves)] for r in range(world)]
    sums = [
        torch.stack([x.to(leaf.reduce or x.dtype) for x in xs]).sum(0)
        for leaf, *xs in zip(leaves, *by_rank, strict=True)
    ]
    parts = _parts(sums, leaves, at)
    for limit, exchanged, alone in itertools.product((None, 1, 100, 2**20), (True, False), (0, 99)):
        with (
            mock.patch.object(buckets, "is_gloo", return_value=exchanged),
            mock.patch.multiple(buckets, ALONE_FROM=alone, ALONE_FROM_ON_DEVICES=alone),
        ):
            carry = Transport(mesh, axes, journal, limit=limit)
            handles = [carry.gather(shards, leaves) for _ in range(2)]
            for handle in handles:
                _same(handle.wait(), gathered)
            for scatter, wanted in ((True, parts), (False, sums)):
                mine = [x.clone() for x in by_rank[rank]]
                _same(carry.reduce([*mine], leaves, scatter=scatter, over=False).wait(), wanted)
                _same(mine, by_rank[rank])
                handle = carry.reduce(mine, leaves, scatter=scatter, before=0.5, after=4)
                _same(handle.wait(), [2 * x for x in wanted])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("world", "hybrid"), [(2, False), (3, False), (4, True), (2, True)])
@pytest.mark.quick("3-False-True", "4-True-True")
def test_values_are_those_of_plain_sums_and_joins(world: int, hybrid: bool, flat: bool) -> None:
    run_ranks(world, _all_ways, hybrid, flat)


@pytest.mark.parametrize("limit", [None, 1])
def test_with_a_limit_one_bucket_is_under_way_at_a_time(limit: int | None) -> None:
    log: list[str] = []

    def told(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return function(*args, **kwargs)

        return run

    with fake_ranks(4):
        mesh = resolve_mesh(None, "cpu")
        leaves = _leaves(4)
        journal = Journal(mesh, active=False)
        carry = Transport(mesh, _axes(mesh), journal, limit=limit)
        with (
            mock.patch.object(journal, "announce", told("announce", journal.announce)),
            mock.patch.object(transport, "launch", told("launch", transport.launch)),
            mock.patch.object(works, "wait", told("wait", works.wait)),
        ):
            shards = [torch.zeros(leaf.shard_shape(0), dtype=leaf.dtype) for leaf in leaves]
            carry.gather(shards, leaves).wait()
    rounds = ["announce", "launch", "wait"]
    if limit is None:
        sent = len(log) // 3
        assert log == rounds[:2] * sent + ["wait"] * sent
    else:
        assert log == rounds * sum(leaf.dim is not None for leaf in leaves)


@pytest.mark.parametrize("flat", [False, True])
def test_a_gradient_is_gone_once_it_is_in_its_bucket(flat: bool) -> None:
    """Held up to the end, all gradients and all buckets would be there at once."""
    alive: list[list[str]] = []
    with fake_ranks(2):
        mesh = resolve_mesh(None, "cpu")
        leaves = [LeafLayout(name, (64, 64), F32, 0, 2) for name in "abcdef"]
        if flat:
            leaves = [*plan_flats(Layout(tuple(leaves), 2), 2**20, 2 * 64 * 64 * 4)]
        carry = Transport(mesh, _axes(mesh), Journal(mesh, active=False))
        grads = [torch.ones(64, 64) for _ in leaves]
        held = {leaf.name: weakref.ref(grad) for leaf, grad in zip(leaves, grads, strict=True)}

        def noted(bucket: buckets.Bucket, *rest: Any, **over: Any) -> Any:
            there = [name for name, ref in held.items() if ref() is not None]
            alive.append([leaf.name for leaf in bucket.leaves])
            assert not {*there} & {name for names in alive for name in names}
            return launch(bucket, *rest, **over)

        launch = transport.launch
        with mock.patch.object(transport, "launch", noted):
            carry.reduce(grads, leaves, scatter=True).wait()
    assert grads == []
    assert len(alive) == (3 if flat else 1)
    assert sorted(name for names in alive for name in names) == list("abcdef")


def test_a_large_leaf_travels_in_its_own_memory() -> None:
    large = LeafLayout("large", (256, 512), F32, 0, 2)
    small = [LeafLayout(name, (4, 2), F32, 0, 2) for name in "ab"]
    odd = LeafLayout("odd", (255, 515), F32, 0, 2)
    with fake_ranks(2):
        mesh = resolve_mesh(None, "cpu")
        carry = Transport(mesh, _axes(mesh), Journal(mesh, active=False))
        leaves = [small[0], large, odd, small[1]]
        shards = [torch.zeros(leaf.shard_shape(0), dtype=leaf.dtype) for leaf in leaves]
        sent: list[tuple[int, int]] = []

        def noted(bucket: buckets.Bucket, send: Tensor, *rest: Any, **over: Any) -> Any:
            sent.append((len(bucket.leaves), send.data_ptr()))
            return launch(bucket, send, *rest, **over)

        launch = transport.launch
        with (
            mock.patch.object(buckets, "is_gloo", return_value=True),
            mock.patch.object(transport, "launch", noted),
        ):
            carry.gather(shards, leaves).wait()
    assert [count for count, _ in sent] == [1, 3]
    assert sent[0][1] == shards[1].data_ptr()


def _one_buffer(world: int) -> bool:
    mesh = resolve_mesh(None, "cpu")
    leaves = [leaf for leaf in _leaves(world) if leaf.dtype == F16]
    bucket = buckets.bucket_of(buckets.GATHER, leaves, F16, _axes(mesh).shard)
    full = [_values(leaf, 1) for leaf in leaves]
    send = buckets.pack_shards(_parts(full, leaves, mesh.shard_rank), bucket)
    brought = works.wait(buckets.launch(bucket, send, circle_of(mesh)))
    _same(buckets.unpack_full(brought, bucket), full)
    return brought.data_ptr() == send.data_ptr()


def test_what_comes_is_written_around_what_is_sent() -> None:
    assert run_ranks(2, _one_buffer, 2) == [True, True]
    with fake_ranks(2), mock.patch(f"{__name__}._same"):  # nobody sends
        assert _one_buffer(2)
