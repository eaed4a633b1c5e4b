"""What is read is seen, with its first value; nothing stays behind in the classes."""

import threading
from typing import Any

from fzero.functional.reads import MISSING, Reads


class Base:
    """Has a class attribute."""

    kind = "base"

    def __init__(self, value: Any) -> None:
        self.value = value


class Own(Base):
    """Asks another for its attributes, as users' classes do."""

    def __getattribute__(self, name: str) -> Any:
        if name == "forwarded":
            return self.value
        return super().__getattribute__(name)


def _seen(thing: Any, *names: str) -> dict[str, Any]:
    with Reads(lambda value: None) as reads:
        assert reads.watch(thing)
        for name in names:
            getattr(thing, name, None)
    return reads.names.get(id(thing), {})


def test_only_what_is_read_is_seen() -> None:
    assert _seen(Base(1), "value") == {"value": 1}
    assert _seen(Base(1), "kind") == {"kind": "base"}
    assert _seen(Base(1)) == {}


def test_what_is_asked_for_and_missing_is_seen_as_such() -> None:
    assert _seen(Base(1), "absent") == {"absent": MISSING}


def test_what_a_class_asks_for_itself_is_seen_too() -> None:
    assert _seen(Own(2), "forwarded") == {"value": 2}


def test_the_first_value_counts() -> None:
    thing = Base(1)
    with Reads(lambda value: None) as reads:
        reads.watch(thing)
        for value in (1, 2):
            thing.value = value
            assert thing.value == value
    assert reads.names[id(thing)] == {"value": 1}


def test_each_value_is_met_once_before_its_reader_has_it() -> None:
    thing, order = Base("v"), []
    with Reads(order.append) as reads:
        reads.watch(thing)
        for _ in range(2):
            order.append(("read", thing.value))
    assert order == ["v", ("read", "v"), ("read", "v")]


def test_vars_reads_all() -> None:
    thing = Base(1)
    with Reads(lambda value: None) as reads:
        reads.watch(thing)
        assert vars(thing)
    assert reads.names[id(thing)] == {"__dict__": MISSING, "value": 1}  # and which there are


def test_other_threads_are_not_what_runs() -> None:
    thing = Base(1)
    with Reads(lambda value: None) as reads:
        reads.watch(thing)
        other = threading.Thread(target=lambda: thing.value)
        other.start()
        other.join()
    assert not reads.names


def test_classes_are_as_before() -> None:
    originals = [cls.__dict__.get("__getattribute__") for cls in (Base, Own)]
    _seen(Own(1), "value")
    assert [cls.__dict__.get("__getattribute__") for cls in (Base, Own)] == originals


def test_what_cannot_be_changed_is_said() -> None:
    with Reads(lambda value: None) as reads:
        assert not reads.watch(object())
        assert not reads.watch([])
