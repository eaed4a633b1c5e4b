"""Ranks that differ are told so, all of them, and none hangs."""

import string
import time

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from fzero.distributed.agree import agree
from fzero.distributed.mesh import resolve_mesh
from fzero.errors import RankMismatchError
from tests.ranks import fake_ranks, run_fresh, run_ranks

Items = list[tuple[str, str]]


def _message(by_rank: list[Items], hybrid: bool) -> str | None:
    """What `agree` raised on this rank."""
    shape = (2, dist.get_world_size() // 2)
    mesh = resolve_mesh(init_device_mesh("cpu", shape) if hybrid else None, "cpu")
    try:
        agree("params", by_rank[dist.get_rank()], mesh, timeout=10)
    except RankMismatchError as error:
        return str(error)
    return None


def _messages(cases: list[list[Items]], hybrid: bool = False) -> list[list[str | None]]:
    per_rank = run_ranks(len(cases[0]), _each, cases, hybrid)
    return [list(messages) for messages in zip(*per_rank, strict=True)]


def _each(cases: list[list[Items]], hybrid: bool) -> list[str | None]:
    return [_message(case, hybrid) for case in cases]


_items = st.lists(
    st.tuples(st.text(string.ascii_letters + "é", max_size=4), st.sampled_from(["f32", "f64"])),
    max_size=3,
)


@settings(max_examples=20)
@given(st.lists(st.tuples(_items, _items), min_size=1, max_size=4))
def test_raises_exactly_when_the_items_differ_and_says_the_same_everywhere(
    cases: list[tuple[Items, Items]],
) -> None:
    for (a, b), messages in zip(cases, _messages([list(c) for c in cases]), strict=True):
        assert len(set(messages)) == 1
        assert (messages[0] is None) == (a == b)


@pytest.mark.parametrize("hybrid", [False, True])
def test_names_the_first_path_and_who_has_what(hybrid: bool) -> None:
    same: Items = [("['b']", "float32 (4,)"), ("['w']", "float32 (3, 4)")]
    other: Items = [("['b']", "float32 (4,)"), ("['w']", "float32 (3, 5)")]
    messages = _messages([[same, same, same, other], [same, other, same, same]], hybrid)
    for message, listing in zip(
        messages,
        [
            "ranks 0-2: float32 (3, 4); rank 3: float32 (3, 5)",
            "ranks 0, 2-3: float32 (3, 4); rank 1: float32 (3, 5)",
        ],
        strict=True,
    ):
        assert set(message) == {message[0]}
        assert f"ranks differ in params at ['w']: {listing}" in str(message[0])


def test_a_missing_entry_is_named() -> None:
    (messages,) = _messages([[[("a", "f32")], [("a", "f32"), ("b", "f32")]]])
    assert messages[0] is not None
    assert "at b: rank 0: (nothing); rank 1: f32" in messages[0]


def _lone_agree() -> str | None:
    mesh = resolve_mesh(None, "cpu")
    if dist.get_rank() == 1:
        time.sleep(8)  # alive, and late
        return None
    with pytest.raises(RankMismatchError) as info:
        agree("config", [], mesh, timeout=0.5)
    return str(info.value)


def test_a_rank_that_is_late_beyond_the_limit_is_named() -> None:
    message, _ = run_fresh(2, _lone_agree)
    assert "waited 0 s at 'a comparison of config', and rank 1 did not come" in message
    assert "Config(timeout=" in message


@pytest.mark.parametrize("world", [1, 4])
def test_a_world_that_is_not_there_agrees(world: int) -> None:
    with fake_ranks(world):
        mesh = resolve_mesh(None, "cpu")
        agree("params", [("a", "f32")], mesh)
