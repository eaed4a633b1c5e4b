"""Reductions travel in a group of their own beside gathers; where there can be none, as before."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from fzero.distributed import lanes as lanes_module
from fzero.distributed import whereabouts
from fzero.distributed.buckets import REDUCE_SCATTER
from fzero.distributed.mesh import resolve_mesh
from tests.ranks import Ranks, RanksFailed, fake_ranks, run_fresh, run_ranks

SMALL = fzero.Config(stage=3, bucket_mb=0.0001)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def batch_at(i: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * i + rank)
    return torch.randn(4, 7, generator=generator, dtype=torch.float64)


def trained(cfg: fzero.Config, steps: int = 3) -> dict[str, Tensor]:
    apply, params = fzero.functionalize(network())
    step_fn = fzero.make_train_step(
        lambda params, x: apply(params, x).square().mean(), fzero.optim.sgd(0.1, momentum=0.9), cfg
    )
    state = step_fn.init(params)
    for i in range(steps):
        state = step_fn(*state, batch_at(i, dist.get_rank()))
    return fzero.unshard(state[0])


def _engine() -> dict[str, Tensor]:
    engine: Any = fzero.Engine(network(), fzero.optim.sgd(0.1, momentum=0.9), SMALL)
    for i in range(3):
        engine.backward(engine(batch_at(i, dist.get_rank())).square().mean())
        engine.step()
    return engine.full_params()


def lanes() -> int:
    """How many this process has."""
    circles = whereabouts._CIRCLES.get(dist.group.WORLD, {})  # pyright: ignore
    return sum(len(circle.lanes) for circle in circles.values())


def _reference(world: int) -> dict[str, Tensor]:
    net = network()
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for i in range(3):
        opt.zero_grad()
        net(torch.cat([batch_at(i, rank) for rank in range(world)])).square().mean().backward()
        opt.step()
    return dict(net.state_dict())


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-14)


def _counted() -> tuple[Any, Any, int]:
    return trained(SMALL), trained(SMALL), lanes()


@pytest.mark.parametrize("world", [2, 3])
def test_it_is_made_once_and_carries_the_same_sums(world: int) -> None:
    for first, second, made in run_fresh(world, _counted):
        close(first, _reference(world))
        close(second, _reference(world))
        assert made == 1


def _hybrid() -> list[Any]:
    """In meshes one after the other, whose groups are destroyed in between."""
    found = []
    for _ in range(3):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        found.append(trained(replace(SMALL, mesh=mesh)))
        dist.barrier()
        for axis in range(2):
            dist.destroy_process_group(mesh.get_group(axis))
    return found


def test_each_row_of_a_mesh_has_one_and_a_new_mesh_a_new_one() -> None:
    for found in run_ranks(4, _hybrid):
        for params in found:
            close(params, _reference(4))


def _in_engine() -> tuple[Any, int]:
    return _engine(), lanes()


def test_an_engine_has_one() -> None:
    for found, made in run_fresh(2, _in_engine):
        close(found, _reference(2))
        assert made == 1


def _with_a_group_that_others_lack() -> tuple[Any, int]:
    resolve_mesh(None, "cpu")
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    return trained(SMALL), lanes()


def test_ranks_in_different_numbers_of_groups_meet_in_it() -> None:
    """Torch would give groups names that count them, and ranks would wait under different ones."""
    for found, made in run_fresh(2, _with_a_group_that_others_lack):
        close(found, _reference(2))
        assert made == 1


def _started_by_hand() -> tuple[Any, int]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    trained(SMALL)
    (circle,) = whereabouts._CIRCLES[dist.group.WORLD].values()  # pyright: ignore
    (lane,) = circle.lanes.values()
    return lane._get_backend(torch.device("cpu")).options._timeout, lane.size()


def test_it_has_the_time_limit_of_its_group() -> None:
    assert run_fresh(2, _started_by_hand) == [(timedelta(seconds=77), 2)] * 2


def _again() -> tuple[Any, int]:
    dist.init_process_group("gloo")
    trained(SMALL)
    dist.destroy_process_group()
    # the library starts the next one
    return trained(SMALL), lanes()


def test_a_new_start_has_a_new_one() -> None:
    for found, made in run_fresh(2, _again):
        close(found, _reference(2))
        assert made == 1


def apart_in(stage: int) -> list[bool]:
    with fake_ranks(4):
        apply, params = fzero.functionalize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        step_fn = fzero.make_train_step(
            lambda params, x: apply(params, x).square().mean(),
            fzero.optim.sgd(0.1),
            fzero.Config(stage=stage),
        )
        state = step_fn.init(params)
        program = step_fn.lower(*state, torch.randn(2, 8))
        buckets = [n.meta["bucket"] for n in program.graph.nodes if "bucket" in n.meta]
    return [bucket.apart for bucket in buckets if bucket.kind == REDUCE_SCATTER]


def test_only_where_backward_gathers() -> None:
    assert set(apart_in(3)) == {True}
    assert True not in apart_in(2)


def test_the_operator_itself_stays_in_the_group() -> None:
    """Who runs a graph by hand needs no second group."""
    with fake_ranks(2):
        group: Any = dist.group.WORLD
        x = torch.arange(6.0)
        assert torch.ops.fzero.reduce_apart(x, "sum", 2, group.group_name, False).shape == (3,)
        assert torch.ops.fzero.reduce_apart(x, "sum", 2, group.group_name, True).shape == (6,)


def _lost_on_the_way(victim: int, how: str, out: str) -> None:
    rank = int(os.environ["RANK"])
    made = lanes_module._gloo_group  # pyright: ignore

    def lost(*args: Any) -> Any:
        if rank == victim:
            if how == "dies":
                os._exit(9)
            raise ValueError("before the others could connect")
        return made(*args)

    lanes_module._gloo_group = lost  # pyright: ignore
    try:
        trained(SMALL, steps=1)
    except (fzero.RankMismatchError, ValueError) as error:
        Path(out, str(rank)).write_text(str(error))
        if how == "raises":
            time.sleep(10)  # its process lives: what tells the others is what it said
        raise


@pytest.mark.parametrize("how", ["dies", "raises"])
@pytest.mark.quick("dies")
def test_a_rank_that_is_lost_while_it_is_made_is_named(how: str, tmp_path: Path) -> None:
    ranks = Ranks.start(3, {}, joined=False)
    try:
        with pytest.raises(RanksFailed):
            ranks.call(_lost_on_the_way, (1, how, str(tmp_path)), 60, grace=30)
    finally:
        ranks.kill()
    for rank in (0, 2):
        told = (tmp_path / str(rank)).read_text()
        assert ("rank 1 ended" if how == "dies" else "call 1 (raised)'") in told
