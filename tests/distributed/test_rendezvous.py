"""Ranks that meet at the store bring the same, or are told what differs."""

import time

import pytest
import torch.distributed as dist

from fzero.distributed.mesh import resolve_mesh
from fzero.distributed.rendezvous import rendezvous, says
from fzero.errors import RankMismatchError
from tests.ranks import fake_ranks, run_ranks


def _rendezvous(key: str, texts: list[str], delays: list[float], calls: bool = False) -> str | None:
    time.sleep(delays[dist.get_rank()])
    try:
        rendezvous(key, texts[dist.get_rank()], resolve_mesh(None, "cpu"), calls=calls)
    except RankMismatchError as error:
        return str(error)
    return None


def test_rendezvous_passes_when_all_bring_the_same() -> None:
    assert run_ranks(3, _rendezvous, "same", ["x"] * 3, [0, 0, 0.1]) == [None] * 3


def test_rendezvous_names_the_first_line_that_differs_and_all_may_go_on() -> None:
    texts = ["gather 8 B\nreduce 8 B", "gather 8 B\nreduce 4 B"]
    for message in run_ranks(2, _rendezvous, "Program 2", texts, [0, 0]):
        assert "row 2 of the collectives: rank 0: reduce 8 B; rank 1: reduce 4 B" in message
        assert "Give every rank a batch of the same structure" in message
    assert run_ranks(2, _rendezvous, "Program 3", ["x"] * 2, [0, 0.1]) == [None] * 2


def test_other_calls_are_not_blamed_on_the_batch() -> None:
    for message in run_ranks(2, _rendezvous, "engine 7", ["full_grad", "update"], [0, 0], True):
        assert "ranks differ in engine 7: rank 0: full_grad; rank 1: update. It" in message
        assert "All ranks must call the same functions and methods in the same order" in message
        assert "batch" not in message


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
