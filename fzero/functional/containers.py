"""Tensors inside of what functions take and give: tuples, mappings, dataclasses, any object.

Libraries return records of their own (`ModelOutput` of transformers, a cache of keys and values),
which no pytree knows. What holds a tensor is copied, with another thing in the tensor's place;
everything else stays the very object that it was. Modules and functions are not looked into.
"""

import copy
import dataclasses
import enum
import logging
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, complex, type, enum.Enum, torch.dtype, torch.device, type(None))
_OTHERS = (*_PLAIN, types.ModuleType, logging.Logger)  # which would bring everything else


@dataclasses.dataclass(frozen=True)
class Place:
    """Stands for the tensor of this index."""

    index: int


def take_apart(value: Any) -> tuple[list[Tensor], Any]:
    """The tensors in `value`, and what `put_together` makes the same of.

    >>> tensors, template = take_apart({"b": torch.ones(1), "a": (2, [torch.zeros(1)])})
    >>> tensors
    [tensor([0.]), tensor([1.])]
    >>> put_together(template, [3, 4])
    {'b': 4, 'a': (2, [3])}
    """
    tensors: list[Tensor] = []

    def place(x: Tensor) -> Place:
        tensors.append(x)
        return Place(len(tensors) - 1)

    return tensors, _mapped(place, value, Tensor, {})


def put_together(template: Any, tensors: Sequence[Any]) -> Any:
    """What was taken apart, with these tensors."""
    return _mapped(lambda place: tensors[place.index], template, Place, {})


def others(value: Any) -> Iterator[Any]:
    """All in `value` that is neither a tensor nor holds anything.

    >>> list(others({"a": (2, [torch.ones(1)]), "b": None}))
    [2, None]
    """
    for x in _walk(value, set()):
        if not isinstance(x, Tensor) and _items(x) is None:
            yield x


class Contents:
    """What containers hold now, to see and undo what a call changes in them.

    >>> losses = [1.0]
    >>> contents = Contents(losses)
    >>> losses.append(2.0)
    >>> contents.restored(), losses
    (True, [1.0])
    """

    def __init__(self, value: Any) -> None:
        self.kept: list[tuple[Any, Any]] = []
        for x in _walk(value, set()):
            if isinstance(x, list | MutableMapping):
                self.kept.append((x, copy.copy(x)))
            elif not isinstance(x, Tensor | tuple) and _items(x) is not None:
                self.kept.append((x, dict(_items(x) or ())))

    def restored(self) -> bool:
        """Whether something was changed; it no longer is.

        Of an object's attributes those count that hold a tensor, before or now: others may be
        counters or caches.
        """
        changed = False
        for x, before in self.kept:
            if isinstance(x, list):
                if not _same(list(enumerate(x)), list(enumerate(before))):
                    changed = True
                    x[:] = before
            elif isinstance(x, MutableMapping):
                if not _same(list(x.items()), list(before.items())):
                    changed = True
                    x.clear()
                    x.update(before)
            else:
                now = dict(_items(x) or ())
                for name in {**before, **now}:
                    old, new = before.get(name), now.get(name)
                    if old is not new and (_holds(old, Tensor) or _holds(new, Tensor)):
                        changed = True
                        object.__setattr__(x, name, old)
        return changed


def _same(some: list[tuple[Any, Any]], more: list[tuple[Any, Any]]) -> bool:
    pairs = zip(some, more, strict=False)
    return len(some) == len(more) and all(a == c and b is d for (a, b), (c, d) in pairs)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """What a container holds, in an order that is no matter of who filled it; None: it is none."""
    if isinstance(value, (*_OTHERS, Place)) or callable(value):
        return None
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return sorted(value.items(), key=lambda item: str(item[0]))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return sorted(vars(value).items()) if hasattr(value, "__dict__") else None


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    yield value
    if isinstance(value, Tensor) or id(value) in seen:
        return
    items = _items(value)
    if items is not None:
        seen.add(id(value))
        for _, x in items:
            yield from _walk(x, seen)


def _holds(value: Any, kind: type) -> bool:
    return any(isinstance(x, kind) for x in _walk(value, set()))


def _mapped(fn: Callable[[Any], Any], value: Any, kind: type, made: dict[int, Any]) -> Any:
    if isinstance(value, kind):
        return fn(value)
    if id(value) in made:
        return made[id(value)]
    if not _holds(value, kind):
        return value
    items = _items(value) or []
    if isinstance(value, tuple):
        found = [_mapped(fn, x, kind, made) for _, x in items]
        # not by its constructor, which may look at what it is given
        make = getattr(value, "_make", type(value))
        made[id(value)] = new = make(found)
        return new
    made[id(value)] = new = copy.copy(value)
    for key, x in items:
        x = _mapped(fn, x, kind, made)
        if isinstance(new, list | MutableMapping):
            new[key] = x
        else:
            object.__setattr__(new, key, x)  # of a frozen one, too
    return new
