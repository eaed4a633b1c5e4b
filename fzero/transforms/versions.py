"""Versions of dicts: which have changed since they were last looked at.

CPython counts the changes of its dicts for those who compile what reads them. `torch.compile` asks
for that count, through a private function of torch's (`PyDict_Watch` from Python 3.12 on, a field
of the dict before). There is no public one in Python; without it each value is compared, which
takes some three times as long. What the count does is tried before it is relied on: Python 3.13.0
does not count what is stored as an attribute.
"""

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any


def versions_of(dicts: Iterable[dict[Any, Any]]) -> list[int] | None:
    """A number of each dict that no change of it leaves as it was; None: there is none.

    A change is another key, another value or another order of a dict's own. Orders that an
    `OrderedDict` keeps beside it, and changes inside of a value, are none.

    Examples:
        >>> space = {"a": 1}
        >>> before = versions_of([space])
        >>> before == versions_of([space])
        True
        >>> space["a"] = 2
        >>> before is not None and before == versions_of([space])
        False
    """
    version = _version()
    return None if version is None else list(map(version, dicts))


@functools.cache
def _version() -> Callable[[dict[Any, Any]], int] | None:
    try:
        from torch._C._dynamo.guards import dict_version
    except ImportError:
        return None
    return dict_version if tells(dict_version) else None


class _Object:
    stored: Any


def tells(version: Callable[[dict[Any, Any]], int]) -> bool:
    """Whether each kind of change makes this another number, and nothing else does."""

    def changes(space: dict[Any, Any], change: Callable[[], Any]) -> bool:
        before = version(space)
        _ = space.get(1), list(space.values()), len(space)
        same = version(space) == before
        change()
        return same and version(space) != before

    x = _Object()
    attributes = vars(x)

    def store() -> None:
        x.stored = object()  # in a loop: Python makes a quicker instruction of it

    space: dict[Any, Any] = {1: 1.0}
    cls: type = type("New", (), {})
    (of_class,) = gc.get_referents(cls.__dict__)  # behind its proxy
    return all(
        (
            changes(space, lambda: space.__setitem__(1, float("1"))),  # an equal one
            changes(space, lambda: space.__setitem__(2, None)),
            changes(space, lambda: space.update({2: 3})),
            changes(space, lambda: space.setdefault(3, 4)),
            changes(space, lambda: space.__ior__({4: 5})),
            changes(space, lambda: space.pop(2)),
            changes(space, lambda: space.__delitem__(3)),
            changes(space, space.popitem),
            changes(space, space.clear),
            all(changes(attributes, store) for _ in range(40)),
            changes(attributes, lambda: setattr(x, "set", 1)),
            changes(attributes, lambda: object.__setattr__(x, "set", 2)),
            changes(attributes, lambda: delattr(x, "set")),
            changes(of_class, lambda: setattr(cls, "set", 1)),
            changes(of_class, lambda: setattr(cls, "set", 2)),
            changes(of_class, lambda: delattr(cls, "set")),
        )
    )
