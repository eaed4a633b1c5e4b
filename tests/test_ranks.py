"""The shared ranks themselves: what they return, and how they fail."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.ranks import RanksFailed, fake_ranks, local_ranks, run_fresh, run_ranks


def _sum_of_ranks(x: torch.Tensor) -> torch.Tensor:
    total = x * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_returns_its_result(world: int) -> None:
    results = run_ranks(world, _sum_of_ranks, torch.ones(2))
    expected = torch.full((2,), world * (world + 1) / 2)
    assert len(results) == world
    assert all(torch.equal(result, expected) for result in results)


def test_ranks_are_reused() -> None:
    assert run_ranks(2, os.getpid) == run_ranks(2, os.getpid)


def _pids_with_groups(groups: int) -> int:
    for _ in range(groups):
        dist.new_group(ranks=[0, 1]).barrier()
    return os.getpid()


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux does")
def test_groups_of_a_call_end_with_it_and_their_threads() -> None:
    """Each thread wakes up a hundred times a second, until the ranks are called again."""
    pids = run_ranks(2, _pids_with_groups, 0)
    before = [_threads(pid) for pid in pids]
    assert run_ranks(2, _pids_with_groups, 8) == pids
    while any(
        _threads(pid) > n for pid, n in zip(pids, before, strict=True)
    ):  # else the test's own time ends
        time.sleep(0.05)


def _raise_on_rank_1() -> None:
    print("a hint from", dist.get_rank())
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has no batch")
    dist.barrier()


def test_an_exception_shows_the_rank_its_traceback_and_output() -> None:
    before = run_ranks(2, os.getpid)
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 ---.*rank 1 has no batch") as info:
        run_ranks(2, _raise_on_rank_1)
    assert "in _raise_on_rank_1" in str(info.value)
    assert "a hint from 1" in str(info.value)
    assert set(before).isdisjoint(run_ranks(2, os.getpid))


def _hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def test_a_hang_is_killed_and_shows_the_stack() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)ranks \[0\] did not return.*_hang_on_rank_0"):
        run_ranks(2, _hang_on_rank_0, timeout=1)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 ---.*exit code 7"):
        run_ranks(2, os._exit, 7)


def _environment(*names: str) -> tuple[bool, list[str | None]]:
    return dist.is_initialized(), [os.environ.get(name) for name in names]


def _gathered(dtype: torch.dtype) -> tuple[bool, torch.Tensor, torch.Tensor]:
    name = "_c10d_functional::all_gather_into_tensor"
    ours = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    columns = (torch.arange(6).view(3, 2) % 4 - 3 * dist.get_rank()).to(dtype).t()
    mesh = init_device_mesh("cpu", (2,))
    odd = columns[:1, 1:].as_strided((1, 1), (3, 3))  # a number is contiguous with any strides
    full = [DTensor.from_local(x, mesh, [Shard(1)]).full_tensor() for x in (columns, odd)]
    return ours, full[0], full[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
def test_torchs_gathers_have_a_name_that_gloo_does_not_abort_of(dtype: torch.dtype) -> None:
    first = torch.arange(6).view(3, 2).t() % 4
    expected = torch.cat([first, first - 3], dim=1).to(dtype)
    for ours, full, odd in run_ranks(2, _gathered, dtype):
        assert ours
        assert torch.equal(full, expected)
        assert torch.equal(odd, expected[:1, 1:].flatten()[None, [0, 3]])


def test_fresh_ranks_see_what_torchrun_sets_and_the_changes() -> None:
    env = {"LOCAL_RANK": None, "MODE": "x"}
    results = run_fresh(2, _environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MODE", env=env)
    assert results == [(False, [str(rank), "2", None, "x"]) for rank in range(2)]


def test_nothing_is_left_of_fresh_ranks() -> None:
    before = set(multiprocessing.active_children())
    run_fresh(2, os.getpid)
    assert set(multiprocessing.active_children()) == before


def test_fake_ranks_end_with_the_block() -> None:
    with fake_ranks(1024, rank=5):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 1024)
    assert not dist.is_initialized()


def test_local_ranks_run_the_collectives_that_the_library_uses() -> None:
    ops = torch.ops._c10d_functional
    with local_ranks(3) as mode:
        group = dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
        x = mode.rank_map(lambda rank: torch.tensor([float(rank)]))
        full = ops.wait_tensor(ops.all_gather_into_tensor(x, 3, group))
        total = ops.wait_tensor(ops.all_reduce(x, "sum", group))
        shard = ops.wait_tensor(ops.reduce_scatter_tensor(full, "sum", 3, group))
        assert full.reconcile().tolist() == [0.0, 1.0, 2.0]
        assert total.reconcile().tolist() == [3.0]
        assert shard._local_tensors[2].tolist() == [6.0]
