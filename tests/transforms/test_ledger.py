"""A ledger holds as long as every object that it noted is where it was."""

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fzero.functional.outside import Fact, Place, object_getattr
from fzero.functional.reads import MISSING
from fzero.transforms import ledger
from fzero.transforms.ledger import Ledger

NAMES = ("a", "b", "c")
PLACE = Place(None, "x")


def noted(spaces: list[dict[str, Any]], names: list[tuple[int, str]]) -> list[Fact]:
    return [
        Fact(spaces[i].get, name, spaces[i].get(name, MISSING), PLACE, spaces[i])
        for i, name in names
    ]


@pytest.fixture(params=["versions", "none"])
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With versions of dicts, and on an interpreter or a torch that has none."""
    if request.param == "none":
        monkeypatch.setattr(ledger, "versions_of", lambda dicts: None)


class Equal:
    """Equal to all, and no other's stand-in."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


KINDS = st.sampled_from(["set", "del", "back", "look"])
PLACES = st.tuples(st.integers(0, 2), st.sampled_from(NAMES))


@given(
    facts=st.lists(PLACES, max_size=6),
    whole=st.sets(st.integers(0, 2)),
    changes=st.lists(
        st.tuples(st.sampled_from(["set", "del", "back", "look"]), PLACES), max_size=12
    ),
    versions=st.booleans(),
)
def test_a_ledger_holds_as_its_dicts_do(
    facts: list[tuple[int, str]],
    whole: set[int],
    changes: list[tuple[str, tuple[int, str]]],
    versions: bool,
) -> None:
    first = {name: Equal() for name in NAMES}
    spaces = [dict(first) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        if not versions:
            patch.setattr(ledger, "versions_of", lambda dicts: None)
        book = Ledger(noted(spaces, facts), [spaces[i] for i in sorted(whole)], [])
        for kind, (i, name) in changes:
            if kind == "set":
                spaces[i][name] = Equal()
            elif kind == "del":
                spaces[i].pop(name, None)
            elif kind == "back":
                spaces[i].clear()
                spaces[i].update(first)
            same = all(spaces[i].get(name) is first[name] for i, name in facts) and all(
                list(spaces[i]) == list(NAMES) and all(spaces[i][k] is first[k] for k in NAMES)
                for i in whole
            )
            assert book.holds() == same


def attribute(x: Any, name: str) -> Fact:
    get = functools.partial(object_getattr, x)
    return Fact(get, name, get(name, MISSING), PLACE, x)


class Other(nn.Linear):
    pass


class Plain:
    a: int


class Slots:
    __slots__ = ("a",)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    "made",
    [
        dict,
        list,
        set,
        deque,
        OrderedDict,
        lambda: defaultdict(int),
        lambda: OrderedDict(a=1, b=2),
        lambda: [1],
        lambda: {1},
    ],
)
def test_containers(made: Callable[[], Any]) -> None:
    container = made()
    book = Ledger([], [container], [])
    assert book.holds()
    assert book.holds()
    if isinstance(container, OrderedDict) and container:
        container.move_to_end("a")
    elif isinstance(container, dict):
        container["c"] = 1
    elif isinstance(container, set):
        container.add(2)
    else:
        container.append(2)
    assert not book.holds()


@pytest.mark.usefixtures("counted")
def test_objects() -> None:
    x, y = Plain(), Slots()
    x.a = y.a = 1
    module = nn.Linear(1, 1)
    facts = [attribute(x, "__dict__"), attribute(y, "a"), attribute(module, "__class__")]
    changes: list[Callable[[], Any]] = [
        lambda: setattr(x, "__dict__", {"a": 1}),
        lambda: setattr(y, "a", 2),
        lambda: setattr(module, "__class__", Other),
    ]
    for fact, change in zip(facts, changes, strict=True):
        book = Ledger([fact], [], [])
        assert book.holds()
        change()
        assert not book.holds()


def test_what_changes_while_it_is_looked_at_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    space = {"a": object()}
    book = Ledger(noted([space], [(0, "a")]), [], [])
    holds = ledger._Space.holds

    def looked_at(one: Any) -> bool:
        same = holds(one)
        space["a"] = object()  # by another thread
        return same

    with monkeypatch.context() as patch:
        patch.setattr(ledger._Space, "holds", looked_at)
        book.holds()
    assert not book.holds()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.requires_grad_(),
        lambda x: x.resize_(3),
        lambda x: setattr(x, "data", torch.ones(2, dtype=torch.float64)),
    ],
)
def test_forms_of_tensors(change: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(2)
    book = Ledger([], [], [x])
    x.add_(1)  # values are a Program's own
    assert book.holds()
    change(x)
    assert not book.holds()
