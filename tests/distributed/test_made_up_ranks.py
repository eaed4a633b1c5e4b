"""A simulated world leaves the real one as it was."""

import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fzero
from fzero.distributed.made_up_ranks import made_up_ranks
from tests.ranks import fake_ranks, run_ranks


def _simulated() -> Any:
    def model_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"]).square().mean()

    cfg, params = fzero.Config(stage=3), {"w": torch.ones(8, 6)}
    report = fzero.simulate(model_fn, fzero.optim.adamw(0.1), cfg, params, torch.ones(4, 8), (2, 8))
    return report.without_program()


def test_errors_are_told_as_before() -> None:
    hook = sys.excepthook  # torch's names a rank before each line
    _simulated()
    assert sys.excepthook is hook


def _beside_a_real_world(rank_sum: float) -> Any:
    group = dist.new_group([0, 1])
    before = (dist.group.WORLD, dist.get_world_size(), dist.get_backend())
    x = torch.ones(1)
    under_way = dist.all_reduce(x, group=group, async_op=True)
    report = _simulated()
    assert under_way is not None
    under_way.wait()
    assert (dist.group.WORLD, dist.get_world_size(), dist.get_backend()) == before
    y = torch.ones(1)
    dist.all_reduce(y, group=group)
    z = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", group.group_name)
    z = torch.ops._c10d_functional.wait_tensor(z)
    assert x.item() == y.item() == z.item() == rank_sum
    dist.destroy_process_group(group)
    return report


def test_ranks_can_simulate_and_go_on() -> None:
    assert run_ranks(2, _beside_a_real_world, 2.0) == [_simulated()] * 2


def _trained() -> torch.Tensor:
    def model_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"]).square().mean()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.adamw(0.1), fzero.Config(stage=3))
    params, state = step_fn.init({"w": torch.ones(8, 6)})
    for rows in (2, 4):  # each staged out
        params, state = step_fn(params, state, torch.full((rows, 8), 1.0 + _rank()))
    return fzero.unshard(params)["w"]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _beside_a_simulation() -> bool:
    """Whether a step trains beside a made-up world as it does alone."""
    wanted, here = _trained(), _rank()
    inside, done, seen = threading.Event(), threading.Event(), list[int]()

    def simulates() -> None:
        with made_up_ranks(2, 4):
            inside.set()
            seen.append(dist.get_world_size())
            done.wait(60)
            seen.append(dist.get_world_size())

    thread = threading.Thread(target=simulates)
    thread.start()
    try:
        assert inside.wait(60)
        found, there = _trained(), _rank()
        assert not dist.is_initialized() or dist.get_world_size() == 2
        report = _simulated()  # in a second world beside the first
    finally:
        done.set()
        thread.join()
    assert report == _simulated()
    return torch.equal(found, wanted) and there == here and seen == [8, 8]


def test_other_threads_are_in_the_real_world_meanwhile() -> None:
    assert _beside_a_simulation()
    assert not dist.is_initialized()
    assert run_ranks(2, _beside_a_simulation) == [True, True]


def test_a_fake_world_is_left_as_it_was() -> None:
    with fake_ranks(3, rank=1):
        assert _simulated() == _simulated()
        assert (dist.get_world_size(), dist.get_rank()) == (3, 1)
    assert not dist.is_initialized()


def test_a_failure_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), made_up_ranks(2, 4):
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with made_up_ranks(1, 1) as mesh:
        assert (mesh.size(0), mesh.size(1)) == (1, 1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_is_made_up_beside_real_ones(world: int) -> None:
    """Without a mesh of its own it would look for theirs."""
    assert run_ranks(2, _alone, world) == [(world, 2)] * 2


def _alone(world: int) -> tuple[int, int]:
    found = fzero.simulate(
        lambda p, x: (p["w"] * x).sum(),
        fzero.optim.sgd(0.1),
        None,
        {"w": torch.ones(4)},
        torch.ones(4),
        world_size=world,
    )
    return found.world_size, dist.get_world_size()


def test_torchruns_variables_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # without the rest: starting it would raise
    _simulated()
    assert not dist.is_initialized()
