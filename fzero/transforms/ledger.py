"""What a walk has found, in the forms in which it is compared fastest.

A model of a thousand layers is some twenty thousand facts. Nearly all are values in dicts:
attributes of modules, and their tables of parameters. A dict is looked at only if its version is
another than when it last held (`transforms.versions`). Of tables of hooks, most of which are empty,
one call asks for all.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import repeat
from operator import attrgetter, call, eq, is_
from typing import Any, NamedTuple

from torch import Tensor

from fzero.functional.outside import Fact, attributes_of
from fzero.functional.reads import MISSING
from fzero.transforms.versions import versions_of

# what Python may ask a tensor from outside for; of its values and strides a Program asks itself
form_of = attrgetter("shape", "dtype", "device", "requires_grad")


class Ledger:
    """What must stay as it is for a recording to hold.

    Args:
        facts: what they say must still be the same object.
        containers: of them the items must be.
        tensors: their forms must be equal to what they are now.
    """

    def __init__(
        self, facts: Iterable[Fact], containers: Iterable[Any], tensors: Sequence[Tensor]
    ) -> None:
        spaces: dict[int, _Space] = {}
        others: list[Fact] = []
        self._objects: list[Any] = []
        self._types: list[Any] = []
        self._owners: list[Any] = []
        self._attributes: list[Any] = []
        for fact in facts:
            space = _dict_of(fact.get)
            if space is not None:
                one = spaces.setdefault(id(space), _Space(space, [], [], []))
                one.names.append(fact.key)
                one.values.append(fact.value)
            elif fact.key == "__class__" and type(fact.holder) is fact.value:
                # it says what it is; one that is of this class still says the same
                self._objects.append(fact.holder)
                self._types.append(fact.value)
            elif fact.key == "__dict__" and fact.value is attributes_of(fact.holder):
                self._owners.append(fact.holder)
                self._attributes.append(fact.value)
            else:
                others.append(fact)
        self._getters = [f.get for f in others]
        self._keys = [f.key for f in others]
        self._kept = [f.value for f in others]
        self._empty: list[Any] = []
        self._full: list[tuple[Any, Any]] = []
        for one in containers:
            if not len(one) and type(one) in _OF_PYTHON:
                self._empty.append(one)
            elif isinstance(one, dict) and not isinstance(one, OrderedDict):
                spaces.setdefault(id(one), _Space(one, [], [], [])).whole.append(contents(one))
            else:
                self._full.append((one, contents(one)))
        self._spaces = list(spaces.values())
        self._dicts = [one.space for one in self._spaces]
        # of what they are now, which may be later than the facts: they are looked at once
        self._versions: list[int] | None = None
        self._tensors = tensors
        self._forms = list(map(form_of, tensors))

    def holds(self) -> bool:
        """Whether all is as noted."""
        return (
            self._spaces_hold()
            and not any(self._empty)
            and all(map(is_, map(type, self._objects), self._types))
            and all(map(is_, map(_ATTRIBUTES, self._owners, repeat("__dict__")), self._attributes))
            and all(map(is_, self._now(), self._kept))
            and all(unchanged(live, noted) for live, noted in self._full)
            and all(map(eq, map(form_of, self._tensors), self._forms))
        )

    def _spaces_hold(self) -> bool:
        old, new = self._versions, versions_of(self._dicts)
        if new is None:
            return self._all_hold()
        if old is None:
            held = all(one.holds() for one in self._spaces)
        else:
            held = old == new or all(
                one.holds()
                for one, a, b in zip(self._spaces, old, new, strict=True)
                if a != b  # a script's globals, say, among which its loop keeps what it has
            )
        if held:
            self._versions = new  # of before they were looked at: what changed since is not missed
        return held

    def _all_hold(self) -> bool:
        """All values in dicts, in one loop of C: nothing tells which dicts to look at."""
        spaces, names, values = self._rows
        return all(map(is_, map(dict.get, spaces, names, repeat(MISSING)), values)) and all(
            unchanged(one.space, noted) for one in self._spaces for noted in one.whole
        )

    @cached_property
    def _rows(self) -> tuple[list[Any], list[Any], list[Any]]:
        rows = [(one, i) for one in self._spaces for i in range(len(one.names))]
        return (
            [one.space for one, _ in rows],
            [one.names[i] for one, i in rows],
            [one.values[i] for one, i in rows],
        )

    def _now(self) -> Any:
        read: Any = call  # getter(key, MISSING) for each fact; its stub takes one argument
        return map(read, self._getters, self._keys, repeat(MISSING))


class _Space(NamedTuple):
    """A dict, what it has under some keys, and all that it holds, if that counts."""

    space: dict[Any, Any]
    names: list[Any]
    values: list[Any]
    whole: list[Any]

    def holds(self) -> bool:
        found = map(dict.get, repeat(self.space), self.names, repeat(MISSING))
        return all(map(is_, found, self.values)) and all(
            unchanged(self.space, noted) for noted in self.whole
        )


_ATTRIBUTES = object.__getattribute__  # past a class's own
# whose truth is whether they hold something
_OF_PYTHON = (dict, OrderedDict, list, set, deque)


def _dict_of(get: Any) -> dict[Any, Any] | None:
    """The dict whose own `get` this is."""
    found = getattr(get, "__self__", None)
    return found if isinstance(found, dict) and get == dict.get.__get__(found) else None


def contents(container: Any) -> Any:
    """What `unchanged` compares."""
    if isinstance(container, dict):
        # past the methods of its class, which may run a user's code
        return keys_of(container), list(dict.values(container))
    return set(container) if isinstance(container, set) else list(container)


def unchanged(live: Any, noted: Any) -> bool:
    """Whether a container holds the same objects, in the same order, as when they were noted."""
    if isinstance(live, dict):
        keys, values = noted
        same = len(live) == len(keys) and all(map(is_, dict.values(live), values))
        return same and keys_of(live) == keys
    if isinstance(live, set):
        return live == noted
    return len(live) == len(noted) and all(map(is_, live, noted))


def keys_of(x: dict[Any, Any]) -> list[Any]:
    """Whatever its class makes of them; one that is ordered keeps an order beside the dict's."""
    return list(OrderedDict.keys(x) if isinstance(x, OrderedDict) else dict.keys(x))
