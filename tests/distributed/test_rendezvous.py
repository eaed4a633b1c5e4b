"""Ranks that meet at the store bring the same, or are told what differs."""

import time

import pytest
import torch.distributed as dist

from fzero.distributed.mesh import resolve_mesh
from fzero.distributed.rendezvous import rendezvous, says
from fzero.errors import RankMismatchError
from tests.ranks import fake_ranks, run_ranks


def _rendezvous(key: str, texts: list[str], delays: list[float]) -> str | None:
    time.sleep(delays[dist.get_rank()])
    try:
        rendezvous(key, texts[dist.get_rank()], resolve_mesh(None, "cpu"))
    except RankMismatchError as error:
        return str(error)
    return None


def test_rendezvous_passes_when_all_bring_the_same() -> None:
    assert run_ranks(3, _rendezvous, "same", ["x"] * 3, [0, 0, 0.1]) == [None] * 3


def test_rendezvous_names_the_first_line_that_differs_and_all_may_go_on() -> None:
    texts = ["gather 8 B\nreduce 8 B", "gather 8 B\nreduce 4 B"]
    for message in run_ranks(2, _rendezvous, "Program 2", texts, [0, 0]):
        assert "line 2: rank 0: reduce 8 B; rank 1: reduce 4 B" in message
    assert run_ranks(2, _rendezvous, "Program 3", ["x"] * 2, [0, 0.1]) == [None] * 2


def _says() -> str:
    return says("order", f"of rank {dist.get_rank()}", resolve_mesh(None, "cpu"))


def test_all_get_what_the_first_rank_says() -> None:
    assert run_ranks(3, _says) == ["of rank 0"] * 3


@pytest.mark.parametrize("world", [1, 4])
def test_a_world_that_is_not_there_meets(world: int) -> None:
    with fake_ranks(world):
        mesh = resolve_mesh(None, "cpu")
        rendezvous("key", "text", mesh)
        assert says("key", "text", mesh) == "text"
