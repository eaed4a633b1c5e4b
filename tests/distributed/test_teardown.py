"""What is told before torch's process groups are gone, and what of torch is relied on for it."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fzero
from fzero.distributed import teardown
from fzero.distributed.teardown import before_teardown
from tests.ranks import fake_ranks, run_fresh


class Held:
    def __init__(self, told: list[bool]) -> None:
        self.told = told

    def release(self) -> None:
        self.told.append(dist.is_initialized())


def test_it_is_told_once_and_before_the_groups_are_gone() -> None:
    told: list[bool] = []
    first, second = Held(told), Held(told)
    for _ in range(2):  # another world is another matter
        with fake_ranks(2):
            dist.new_group([0])
            before_teardown(first)
            before_teardown(first)
            before_teardown(second)
            assert not told
        assert told == [True, True]
        told.clear()


def test_a_group_alone_that_goes_tells_nobody() -> None:
    told: list[bool] = []
    held = Held(told)
    with fake_ranks(2):
        before_teardown(held)
        dist.destroy_process_group(dist.new_group([0, 1]))
        assert not told
    assert told == [True]


def test_what_is_gone_is_not_kept() -> None:
    told: list[bool] = []
    with fake_ranks(2):
        before_teardown(Held(told))
        gc.collect()
    assert not told


def test_a_program_that_destroys_nothing_tells_it_too() -> None:
    program = """
import torch.distributed as dist
from fzero.distributed.teardown import before_teardown
class Held:
    def release(self):
        print("released", dist.is_initialized())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held = Held()
before_teardown(held)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.split() == ["released", "True"]


_world: Any = None  # the name that the code of torch has for it


def _shuts_down_first(group: Any = None) -> None:
    for each in _world.pg_names:
        each.shutdown()
    for comm in _world.comms:
        comm.finalize()


def _forgets(group: Any = None) -> None:
    for each in _world.pg_names:
        each.shutdown()


def _asks_for_more(group: Any = None) -> None:
    dist.barrier()


@pytest.mark.parametrize("destroy", [_shuts_down_first, _forgets, _asks_for_more])
def test_a_torch_that_does_otherwise_is_not_relied_on(destroy: Any) -> None:
    assert not teardown._finalizes_first(destroy)


def test_asking_torch_destroys_nothing() -> None:
    with fake_ranks(2):
        group = dist.new_group([0, 1])
        assert teardown._finalizes_first(dist.destroy_process_group)
        assert dist.is_initialized()
        assert dist.get_world_size(group) == 2


def _worlds(folder: Path, by_user: bool) -> list[tuple[bool, int, int]]:
    """Of three process groups, one after the other: whether each is left, threads, open files."""
    seen: list[tuple[bool, int, int]] = []
    for cycle in range(3):
        if by_user:
            # a store of its own: addresses of the last are in the other
            rank, store = int(os.environ["RANK"]), dist.FileStore(f"{folder}/store {cycle}", 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            del store
        step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.adam(1e-3))
        state = step_fn.init({"w": torch.ones(4)})
        state = step_fn(*state, torch.ones(4))
        fzero.checkpoint.save(folder / str(cycle), *state, asynchronous=True)
        engine = fzero.Engine(torch.nn.Linear(2, 2), fzero.optim.sgd(0.1))
        engine(torch.ones(1, 2)).sum().backward()
        engine.step()
        world = weakref.ref(dist.group.WORLD)
        fzero.checkpoint.wait()
        dist.barrier()
        dist.destroy_process_group()
        del step_fn, state, engine
        gc.collect()
        counts = [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]
        seen.append((world() is None, counts[0], counts[1]))
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux shows in /proc")
@pytest.mark.parametrize("by_user", [False, True])
def test_nothing_is_left_of_a_world_that_was_destroyed(by_user: bool, tmp_path: Path) -> None:
    for seen in run_fresh(2, _worlds, tmp_path, by_user):
        assert all(gone for gone, _, _ in seen)
        (_, threads, files), (_, more_threads, more_files) = seen[0], seen[-1]
        assert more_threads <= threads
        assert more_files <= files
