"""What a rank writes of where it is, the others read; the first word about all of them holds."""

from typing import Any

import pytest
from torch.distributed import HashStore

from fzero.distributed import store as stores
from fzero.distributed.stations import Station, Stations, differ


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Stations, Stations]:
    store = HashStore()
    monkeypatch.setattr(stores, "default_store", lambda: store)
    return Stations((2, 5), 2), Stations((2, 5), 5)


def test_what_one_says_the_other_reads(pair: Any) -> None:
    one, other = pair
    assert other.read() == ({2: Station(0, 0, "(nothing)")}, {2: ""})
    one.say(Station(3, 99, "call 1", left=True), " a hint")
    assert other.read() == ({2: Station(3, 99, "call 1", left=True)}, {2: " a hint"})
    assert other.names.keys() == {2, 5}


def test_what_did_not_change_is_written_once(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair
    written: list[str] = []
    monkeypatch.setattr(Stations, "set", lambda self, key, text, _: written.append(key))
    for number in (1, 1, 2, 2):
        one.say(Station(number, 0, "call"), "")
    assert written == ["at 2"] * 2


def test_the_first_text_holds(pair: Any) -> None:
    one, other = pair
    assert not one.has(["verdict"])
    assert one.first("verdict", "mine") == "mine"
    assert other.first("verdict", "another") == "mine"
    assert other.has(["verdict"])
    assert other.get("verdict") == "mine"


def test_names_and_turns_have_entries_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(stores, "default_store", lambda: store)
    boards = [Stations((0, 1), 0), Stations((0, 1), 0), Stations((0, 1), 0, "named")]
    keys = [board.set("k", str(i)) for i, board in enumerate(boards)]
    assert len(set(keys)) == 3  # the second is of a process group that was made anew
    assert [board.get("k") for board in boards] == ["0", "1", "2"]


def test_two_ranks_that_differ_are_named_in_order() -> None:
    said = differ((5, Station(1, 1, "b")), (2, Station(1, 2, "a")))
    assert said.startswith("rank 2 came to 'a', and rank 5 to 'b': their collectives")
    assert "by another way" in differ((0, Station(1, 1, "a")), (1, Station(1, 2, "a")))
