"""What holds tensors is taken apart and put together; what it held is seen and put back."""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.functional.containers import Contents, others, put_together, take_apart

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Record:
    value: Any
    label: str = "a record"


@dataclass(slots=True)
class Slots:
    value: Any


class Object:
    def __init__(self, value: Any) -> None:
        self.value, self.count = value, 3


class Own(OrderedDict[str, Any]):
    pass


LEAVES = st.one_of(st.builds(lambda n: torch.tensor(float(n)), st.integers(0, 9)), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("cab"), inner, max_size=3),
        st.builds(Pair, inner, inner),
        *(st.builds(kind, inner) for kind in (Record, Slots, Object)),
        st.dictionaries(st.sampled_from("cab"), inner, max_size=3).map(Own),
    ),
    max_leaves=8,
)


def shown(value: Any) -> Any:
    """Something that `==` compares."""
    if isinstance(value, Tensor):
        return ("tensor", value.item())
    if isinstance(value, dict):
        return type(value), [(key, shown(x)) for key, x in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shown(x) for x in value]
    names = ("value", "label", "count")
    held = [(name, shown(getattr(value, name))) for name in names if hasattr(value, name)]
    return (type(value), held) if held else value


@given(VALUES)
def test_what_is_taken_apart_is_put_together(value: Any) -> None:
    before = shown(value)
    tensors, template = take_apart(value)
    assert not any(isinstance(x, Tensor) for x in others(template))
    assert shown(put_together(template, tensors)) == before == shown(value)
    again, _ = take_apart(put_together(template, [x + 1 for x in tensors]))
    assert [x.item() for x in again] == [x.item() + 1 for x in tensors]


@given(VALUES)
def test_what_holds_no_tensor_is_the_very_same(value: Any) -> None:
    tensors, template = take_apart(value)
    assert tensors or template is value


@given(st.dictionaries(st.sampled_from("cab"), LEAVES, max_size=3))
def test_the_order_of_a_mapping_is_that_of_its_keys(value: dict[str, Any]) -> None:
    turned = dict(reversed(value.items()))
    some, more = take_apart(value)[0], take_apart(turned)[0]
    assert len(some) == len(more)
    assert all(a is b for a, b in zip(some, more, strict=True))


def test_what_holds_itself_and_what_two_hold() -> None:
    loop: dict[str, Any] = {"x": torch.ones(1)}
    loop["self"], loop["twice"] = loop, loop["x"]
    shared = [torch.zeros(1)]
    tensors, template = take_apart([loop, shared, shared])
    found = put_together(template, tensors)
    assert found[0]["self"] is found[0]
    assert found[1] is found[2] is not shared
    assert found[0]["x"] is tensors[0]


@given(VALUES)
def test_changes_are_seen_and_undone(value: Any) -> None:
    held = [[], {}, Object(None), value]
    before = shown(held)
    contents = Contents(held)
    assert not contents.restored()
    held[0].append(torch.ones(1))
    held[1]["x"] = torch.ones(1)
    held[2].value = torch.ones(1)
    held.pop()
    assert contents.restored()
    assert shown(held) == before


def test_counters_of_objects_are_theirs() -> None:
    held = Object(torch.ones(1))
    contents = Contents(copy.copy(held))
    held.count += 1
    assert not contents.restored()
    assert held.count == 4
