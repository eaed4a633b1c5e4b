"""Ranks tell each other bytes of any length; who is elsewhere is told, and none is aborted."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from fzero.distributed import whereabouts, works
from fzero.distributed.exchange import exchange
from fzero.distributed.mesh import group_along, resolve_mesh
from fzero.distributed.whereabouts import Circle, circle_for, circle_of
from fzero.errors import RankMismatchError
from tests.ranks import run_fresh, run_ranks


def _exchanged(cases: list[list[bytes]], shape: tuple[int, ...]) -> list[list[bytes]]:
    mesh = init_device_mesh("cpu", shape)
    circle, rank = circle_of(mesh), dist.get_rank()
    groups = [group_along(mesh, i) for i in range(mesh.ndim)]
    with circle.at("a test"):
        return [exchange(by_rank[rank], groups, circle) for by_rank in cases]


_bytes = st.binary(max_size=5)


@settings(max_examples=10)
@given(st.lists(st.tuples(_bytes, _bytes, _bytes, _bytes), min_size=1, max_size=4))
def test_every_rank_has_the_bytes_of_all_in_the_order_of_the_mesh(
    cases: list[tuple[bytes, ...]],
) -> None:
    expected = [list(case) for case in cases]
    for shape in ((4,), (2, 2)):
        assert run_ranks(4, _exchanged, expected, shape) == [expected] * 4


PLACES = ["a gather", "a sum", "a part of a sum", "a bucket", "another exchange"]


def _come_to(place: str, group: ProcessGroup, circle: Circle) -> None:
    with circle.at(place):
        _run(place, group, circle)


def _run(place: str, pg: ProcessGroup, circle: Circle) -> object:
    """What a rank may be at, each with as many bytes as no other sends."""
    x, world, group = torch.ones(2), pg.size(), pg.group_name
    match place:
        case "a gather":
            flying = works.all_gather_into_tensor(x, world, group, circle)
        case "a sum":
            flying = works.all_reduce(x, "sum", group, circle)
        case "a part of a sum":
            flying = works.reduce_scatter_tensor(x, "sum", world, group, circle)
        case "a bucket":
            gather = works.LAUNCHES["_c10d_functional::all_gather_into_tensor"]
            flying = gather(x, world, group, circle)
        case "another exchange":
            return exchange(b"longer than the first one's" * 2, [pg], circle)
        case _:
            return exchange(b"short", [pg], circle)
    return works.wait(flying)


def _elsewhere() -> list[str]:
    resolve_mesh(None, "cpu")  # starts the ranks
    told: list[str] = []
    ranks = list(range(dist.get_world_size()))
    with mock.patch.object(whereabouts, "PATIENCE", 0.5):
        for place in PLACES:
            group = dist.new_group()
            assert isinstance(group, ProcessGroup)
            circle = circle_for(ranks, [group], group.group_name)
            with pytest.raises(RankMismatchError) as info:
                _come_to(place if dist.get_rank() else "an exchange", group, circle)
            told.append(str(info.value))
    return told


def test_a_rank_at_anything_else_is_told_and_so_are_the_others() -> None:
    for place, *messages in zip(PLACES, *run_fresh(2, _elsewhere), strict=True):
        assert messages[0] == messages[1]
        assert f"rank 1 to {place!r}" in messages[0] or f"rank 1 came to {place!r}" in messages[0]
        assert "never under `if rank == 0:`" in messages[0]
