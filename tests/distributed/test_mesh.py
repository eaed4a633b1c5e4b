"""A step's ranks: every world size, one axis and two, and no process group at all."""

import atexit
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fzero
from fzero.distributed.mesh import Mesh, _attempt, is_simulated, resolve_mesh
from fzero.distributed.store import group_limit
from fzero.errors import ConfigError, ShardError
from tests.ranks import fake_ranks, local_ranks, run_fresh, run_ranks


@pytest.mark.parametrize("world", [2, 3, 1024])
def test_one_axis_over_all_ranks(world: int) -> None:
    with fake_ranks(world, rank=world - 1):
        mesh = resolve_mesh(None, "cpu")
        assert (mesh.shard_size, mesh.shard_rank) == (world, world - 1)
        assert (mesh.replicate_group, mesh.replicate_size, mesh.replicate_rank) == ("", 1, 0)
        assert (mesh.world_size, mesh.rank) == (world, world - 1)
        assert mesh.ranks == tuple(range(world))
        assert mesh.placements(1) == (Shard(1),)
        assert is_simulated(mesh)


@pytest.mark.parametrize(("replicas", "shards"), [(2, 3), (1, 4), (4, 1), (32, 32)])
def test_two_axes_are_replicate_and_shard(replicas: int, shards: int) -> None:
    rank = replicas * shards - 1
    with fake_ranks(replicas * shards, rank):
        mesh = resolve_mesh(init_device_mesh("cpu", (replicas, shards)), "cpu")
        assert (mesh.replicate_size, mesh.replicate_rank) == (replicas, replicas - 1)
        assert (mesh.shard_size, mesh.shard_rank) == (shards, shards - 1)
        assert (mesh.world_size, mesh.rank) == (replicas * shards, rank)
        assert bool(mesh.replicate_group) == (replicas > 1)
        assert bool(mesh.shard_group) == (shards > 1)
        assert mesh.placements(0) == (Replicate(), Shard(0))
        assert mesh.placements(None) == (Replicate(), Replicate())


def test_the_same_ranks_are_equal_and_hash_alike() -> None:
    with fake_ranks(4):
        assert resolve_mesh(None, "cpu") == resolve_mesh(None, "cpu")
        assert len({resolve_mesh(None, "cpu"), resolve_mesh(None, "cpu")}) == 1
        assert resolve_mesh(None, "cpu") != resolve_mesh(init_device_mesh("cpu", (2, 2)), "cpu")


@pytest.mark.parametrize(
    ("make", "device_type", "found"),
    [
        (lambda: init_device_mesh("cpu", (2, 1, 2)), "cpu", "mesh has 3 axes .*Slice"),
        (lambda: DeviceMesh("cpu", [0, 1]), "cpu", r"mesh holds ranks \[0, 1\].*this is rank 3"),
        (lambda: init_device_mesh("cpu", (4,)), "cuda", "'cpu' devices .* on 'cuda'"),
        (lambda: DeviceMesh("cpu", [3, 1, 0, 2]), "cpu", r"\[3, 1, 0, 2\] .*as \[0, 1, 2, 3\]"),
        (lambda: DeviceMesh("cpu", [[0, 2], [3, 1]]), "cpu", r"\[3, 1\] along its shard axis"),
    ],
)
def test_a_mesh_that_cannot_be_used(
    make: Callable[[], DeviceMesh], device_type: str, found: str
) -> None:
    with fake_ranks(4, rank=3), pytest.raises(ConfigError, match=found):
        resolve_mesh(make(), device_type)


@pytest.mark.parametrize("ranks", [[[2, 3], [0, 1]], [[0, 2], [1, 3]], [[1, 2], [0, 3]]])
def test_replicas_come_in_any_order(ranks: list[list[int]]) -> None:
    with fake_ranks(4, rank=3):
        assert sorted(resolve_mesh(DeviceMesh("cpu", ranks), "cpu").ranks) == [0, 1, 2, 3]


def _ring(hybrid: bool) -> tuple[int, list[list[float]]]:
    mesh = resolve_mesh(init_device_mesh("cpu", (2, 2)) if hybrid else None, "cpu")
    ops = torch.ops._c10d_functional
    x = torch.tensor([float(mesh.rank)])
    sums = [
        ops.wait_tensor(ops.all_reduce(x, "sum", group)).tolist()
        for group in (mesh.shard_group, mesh.replicate_group)
        if group
    ]
    return mesh.rank, sums


def test_the_groups_reach_the_ranks_of_their_axis() -> None:
    assert run_ranks(3, _ring, False) == [(rank, [[3.0]]) for rank in range(3)]
    assert run_ranks(4, _ring, True) == [
        (0, [[1.0], [2.0]]),
        (1, [[1.0], [4.0]]),
        (2, [[5.0], [2.0]]),
        (3, [[5.0], [4.0]]),
    ]


def test_local_ranks_see_one_rank_each() -> None:
    with local_ranks(4) as mode:
        mesh = resolve_mesh(init_device_mesh("cpu", (2, 2)), "cpu")
        ones = mode.rank_map(lambda rank: torch.ones(4))
        rows = ones.narrow(0, mesh.shard_rank * 2, 2) * mesh.replicate_rank
        assert [rows._local_tensors[rank].tolist() for rank in range(4)] == (
            [[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2
        )


def _alone() -> Mesh:
    assert not dist.is_initialized()
    mesh = resolve_mesh(None, "cpu")
    assert not dist.is_initialized()
    return mesh


def test_alone_nothing_is_started_and_dtensors_work() -> None:
    # Fails here first when torch changes what `_mesh_of_one` builds on.
    mesh = _alone()
    local = torch.arange(6.0).reshape(3, 2)
    whole = DTensor.from_local(local, mesh.device_mesh, mesh.placements(0))
    assert torch.equal(whole.full_tensor(), local)
    assert whole.to_local().data_ptr() == local.data_ptr()
    tripled = whole * 2 + whole
    assert isinstance(tripled, DTensor)
    assert torch.equal(tripled.full_tensor(), local * 3)
    assert torch.equal(whole.redistribute(placements=[Replicate()]).to_local(), local)
    assert resolve_mesh(mesh.device_mesh, "cpu") == mesh


def test_alone_a_process_group_can_still_be_started_later() -> None:
    before = _alone()
    with fake_ranks(2, rank=1):
        assert resolve_mesh(None, "cpu").rank == 1
    assert _alone() == before


def _started(end: str) -> tuple[tuple[int, int], str, bool]:
    """Let `resolve_mesh` start the ranks; then what the process's end does."""
    at_exit: list[Callable[[], Any]] = []
    atexit.register = at_exit.append
    mesh = resolve_mesh(None, "cpu")
    found = (mesh.rank, mesh.world_size), dist.get_backend()
    if end == "by the user":
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    for call in at_exit:
        call()
    return *found, dist.is_initialized()


def test_torchruns_environment_starts_the_ranks_and_the_exit_ends_them() -> None:
    assert run_fresh(2, _started, "by us") == [((r, 2), "gloo", False) for r in range(2)]


def _limit() -> float:
    resolve_mesh(None, "cpu")
    return group_limit()


def test_a_group_of_ours_has_the_time_limit_of_one_that_is_started_by_hand() -> None:
    assert run_fresh(2, _limit) == [dist.default_pg_timeout.total_seconds()] * 2


def test_the_exit_leaves_a_group_of_the_users_alone() -> None:
    assert [left for *_, left in run_fresh(2, _started, "by the user")] == [True, True]


def _refused() -> str:
    with pytest.raises(ConfigError) as info:
        resolve_mesh(None, "cpu")
    return str(info.value)


def test_half_of_torchruns_environment_is_an_error() -> None:
    env = {"MASTER_PORT": None, "RANK": None}
    assert "WORLD_SIZE=2" in run_fresh(2, _refused, env=env)[0]
    assert "RANK, MASTER_PORT is not set" in run_fresh(2, _refused, env=env)[1]


def _resolve_without_group(environment_world: str) -> bool:
    os.environ["WORLD_SIZE"] = environment_world
    return resolve_mesh(None, "cpu").world_size == 1 and not dist.is_initialized()


def test_a_torchrun_of_one_rank_starts_nothing() -> None:
    assert run_fresh(1, _resolve_without_group, "1") == [True]


@pytest.mark.parametrize(
    ("changed", "attempt"),
    [
        ({}, 2),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, 0),  # then each attempt has a store of its own
        ({"LOCAL_WORLD_SIZE": "2"}, 0),  # launchers of several nodes count for themselves
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, 0),
    ],
)
def test_a_restart_on_a_shared_store_is_told(changed: dict[str, str], attempt: int) -> None:
    environ = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert _attempt(environ | changed) == attempt


def _meets_in(attempt: str) -> list[float]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
    mesh = resolve_mesh(None, "cpu")
    x = torch.ones(1)
    dist.all_reduce(x)
    return [x.item(), float(mesh.world_size)]


@pytest.mark.parametrize("attempt", ["0", "1"])
def test_ranks_meet_at_every_attempt(attempt: str) -> None:
    assert run_fresh(2, _meets_in, attempt) == [[2.0, 2.0]] * 2


def _starts_again() -> list[float]:
    found = []
    for _ in range(3):
        found += _meets_in("0")
        dist.destroy_process_group()
        if os.environ["RANK"] == "1":  # when the others start, its old address is still there
            time.sleep(0.5)
    return found


def test_ranks_start_again_after_their_group_was_destroyed() -> None:
    assert run_fresh(2, _starts_again, timeout=30) == [[2.0, 2.0] * 3] * 2


def _without_values() -> list[str]:
    """What is said of parameters on meta, by a step and by a tree of shards."""
    params = {"w": torch.ones(3, 4, device="meta")}
    step_fn = fzero.make_train_step(lambda p, x: (x @ p["w"].t()).sum(), fzero.optim.sgd(0.1))
    state = step_fn.init(params)
    step_fn.lower(*state, torch.ones(2, 4, device="meta"))
    with pytest.raises(ShardError) as caught:
        step_fn(*state, torch.ones(2, 4))
    shards: Any = fzero.shard(params)
    return [str(caught.value), f"{shards['w'].device.type} on {shards['w'].device_mesh.size()}"]


def test_ranks_of_what_has_no_values_are_those_of_what_has() -> None:
    assert resolve_mesh(None, "meta").device_type in ("cpu", "cuda")
    for said, kind in run_ranks(2, _without_values):
        assert "params['w'] is on the meta device" in said
        assert "step_fn.init(build)" in said
        assert kind == "meta on 2"
