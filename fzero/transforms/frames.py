"""Batches and aux, taken apart: their tensors, and the frame that these came in.

A batch is taken apart into its tensors, which vary from call to call, and a frame, which is part
of what a step was staged out for: containers, dataclasses, mappings such as transformers'
`ModelOutput` and `BatchEncoding`, numbers, strings. The model function gets it put together again.
"""

import copy
import dataclasses
import enum
import functools
import inspect
from collections import OrderedDict, UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import ShardError, shown
from fzero.functional.memory import overlapping
from fzero.tree import PyTree

# Their equality is all there is to them, so that they can be part of a signature.
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum)
_PLAIN += (torch.dtype, torch.device, torch.memory_format, torch.layout)


class Static:
    """A leaf that is no tensor; equal to one of the same type and value alone, see `tree.exact`."""

    def __init__(self, value: Any) -> None:
        self.value, self._exact = value, tree.exact(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._exact == other._exact

    def __hash__(self) -> int:
        return hash(self._exact)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


@dataclass(frozen=True)
class Opened:
    """An object that holds leaves: its class, and the frame of what is in it."""

    kind: type
    frame: "Frame"
    rest: tuple[tuple[str, Static], ...] = ()


@dataclass(frozen=True)
class Frame:
    """A tree without its tensors; hashable.

    Args:
        spec: the containers.
        parts: one per leaf of `spec`; None is a tensor's place.
        paths: of the tensors.
        names: of the tensors, dotted.
        orders: keys of the dicts, as they stand there.
        same: of inputs, see [Note: one tensor, or two].
        overlap: of inputs, whether two of them have elements in common.
    """

    spec: tree.Spec
    parts: tuple[Static | Opened | None, ...]
    paths: tuple[str, ...]
    names: tuple[str, ...]
    orders: tuple[tuple[Any, ...], ...] = ()
    same: tuple[int, ...] = ()
    overlap: bool = False

    @property
    def num_leaves(self) -> int:
        """How many tensors it has places for."""
        return len(self.paths)

    def of_inputs(self, tensors: Sequence[Tensor]) -> "Frame":
        """The frame that a function is staged out for, where these are its tensors."""
        same = first_places(tensors)
        apart = [x for i, x in enumerate(tensors) if not same or same[i] == i]
        overlap = next(overlapping(apart, [True] * len(apart)), None) is not None
        return dataclasses.replace(self, same=same, overlap=overlap) if same or overlap else self

    def unflatten(self, tensors: Sequence[Any]) -> PyTree:
        """The tree with these tensors in their places: the inverse of `take_apart`."""
        rest = iter([tensors[i] for i in self.same] if self.same else tensors)
        built = []
        for part in self.parts:
            if part is None:
                built.append(next(rest))
            elif isinstance(part, Static):
                built.append(part.value)
            else:
                inner = part.frame.unflatten([next(rest) for _ in part.frame.paths])
                built.append(_closed(part, inner))
        return tree.unflatten(self.spec, built)


def values_apart(old: Frame, new: Frame) -> list[tuple[str, str, str]]:
    """Path, old and new value of the leaves that are no tensors and differ; [] if more does.

    >>> frames = [take_apart({"x": torch.ones(2), "t": t})[1] for t in (0.5, 1)]
    >>> values_apart(*frames)
    [("['t']", '0.5', '1')]
    """
    if old.spec != new.spec or old.paths != new.paths:
        return []
    below = tree.paths(tree.unflatten(new.spec, range(len(new.parts))))
    found: list[tuple[str, str, str]] = []
    for path, a, b in zip(below, old.parts, new.parts, strict=True):
        if isinstance(a, Static) and isinstance(b, Static):
            found += [(path, shown(a.value), shown(b.value))] if a != b else []
        elif isinstance(a, Opened) and isinstance(b, Opened):
            inner = values_apart(a.frame, b.frame)
            if a != b and (not inner or (a.kind, a.rest) != (b.kind, b.rest)):
                return []
            found += [(f"{path}{rest}", before, now) for rest, before, now in inner]
        elif a != b:
            return []
    return found


# What to do about those.
AS_TENSORS = (
    "Numbers and strings are part of what is recorded, as they are: pass a tensor instead, "
    "torch.tensor(x), or leave them out."
)


def first_places(tensors: Sequence[Any]) -> tuple[int, ...]:
    """For each tensor the place where it comes first; () if none comes twice.

    [Note: one tensor, or two] Python code can ask whether two of its inputs are one tensor
    (`query is key`), and writing to one in place is writing to the other then. So what a function
    is staged out for tells it, and it gets one tensor where its caller passed one. Two tensors that
    overlap are as any two until one is written to in place, which is refused then.

    >>> x, y = torch.ones(1), torch.ones(1)
    >>> first_places([x, y, x]), first_places([x, y])
    ((0, 1, 0), ())
    """
    first: dict[int, int] = {}
    places = tuple(first.setdefault(id(x), i) for i, x in enumerate(tensors))
    return places if len(first) < len(places) else ()


def take_apart(
    value: PyTree, what: str = "batch", *, numbers: bool = False
) -> tuple[list[Tensor], Frame]:
    """The tensors of `value`, and the frame that they were in. `numbers` become tensors, too.

    Raises:
        ShardError: a leaf is neither a tensor nor plain (numbers, strings, enums, dtypes).

    Examples:
        >>> tensors, frame = take_apart({"x": torch.ones(2), "task": "qa"})
        >>> tensors, frame.unflatten([torch.zeros(2)])
        ([tensor([1., 1.])], {'x': tensor([0., 0.]), 'task': 'qa'})
    """
    return _apart(value, what, "", (), numbers)


def stacked(values: Sequence[PyTree]) -> PyTree:
    """Trees of one frame as one, their tensors stacked; a single one as it is.

    Examples:
        >>> stacked([{"n": torch.tensor(1), "task": "qa"}, {"n": torch.tensor(2), "task": "qa"}])
        {'n': tensor([1, 2]), 'task': 'qa'}
    """
    if len(values) == 1 or values[0] is None:
        return values[0]
    columns, frames = zip(*(take_apart(value, "aux") for value in values), strict=True)
    if len({len(column) for column in columns}) > 1:
        raise ShardError(
            f"aux has the leaves {frames[0].paths} in one micro-batch and others in another "
            f"({[frame.paths for frame in frames]}); it must have the same in all of a step."
        )
    return frames[0].unflatten([torch.stack(row) for row in zip(*columns, strict=True)])


def _apart(
    value: PyTree, what: str, path: str, above: tuple[int, ...], numbers: bool
) -> tuple[list[Tensor], Frame]:
    leaves, spec = tree.flatten(value)
    tensors: list[Tensor] = []
    parts: list[Static | Opened | None] = []
    paths: list[str] = []
    names: list[str] = []
    for leaf, below, name in zip(leaves, tree.paths(value), tree.names(value), strict=True):
        here = path + below
        if numbers and type(leaf) in (bool, int, float, complex):
            leaf = torch.as_tensor(leaf, device="cpu")
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            parts.append(None)
            paths.append(here)
            names.append(name)
        elif isinstance(leaf, _PLAIN):
            parts.append(Static(leaf))
        # an object that holds itself would be opened for ever
        elif (found := _opened(leaf)) is not None and id(leaf) not in above:
            inner, rest = found
            more, frame = _apart(inner, what, here, (*above, id(leaf)), numbers)
            tensors += more
            parts.append(Opened(type(leaf), frame, rest))
            paths += frame.paths
            names += [f"{name}.{x}".strip(".") for x in frame.names]
        else:
            raise ShardError(
                f"{what}{here} is a {type(leaf).__name__} ({leaf!r:.60}); every leaf must be a "
                "torch.Tensor, or a number, string or enum that the step is staged out for. Make "
                "it a tensor with torch.as_tensor, or keep it out of the tree."
            )
    places = tuple(paths), tuple(names)
    return tensors, Frame(spec, tuple(parts), *places, tree.orders(value))


def _opened(x: Any) -> tuple[dict[str, Any], tuple[tuple[str, Static], ...]] | None:
    """What is in an object, and what else it says of itself; None if it can't be opened."""
    if isinstance(x, type):
        return None
    if isinstance(x, UserDict | dict):
        items = dict(x.items())
        fields = {k: v for k, v in getattr(x, "__dict__", {}).items() if k not in items}
        # which the function computes from the items that it gets
        fields = {k: v for k, v in fields.items() if not _is_cached(type(x), k)}
        # the items of a UserDict once more
        fields.pop("data", None)
        return items, tuple((k, _attribute(type(x), k, v)) for k, v in fields.items())
    if dataclasses.is_dataclass(x):
        return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}, ()
    return None


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def _attribute(kind: type, name: str, value: Any) -> Static:
    """What a mapping has beside its items, as it is now; a tokenizer's own objects become None.

    Raises:
        ShardError: it holds a tensor, which would not reach the function.
    """
    if _is_plain(value):
        return Static(copy.deepcopy(value))
    if any(isinstance(x, Tensor) or hasattr(x, "__array__") for x in tree.leaves(value)):
        raise ShardError(
            f"a {kind.__name__} has a tensor in its attribute {name!r}, which is none of its items "
            f"and would not reach the function. Make it an item, batch[{name!r}], or make the "
            "class a dataclass."
        )
    return Static(None)


def _is_plain(x: Any) -> bool:
    if isinstance(x, dict):
        return all(map(_is_plain, (*x.keys(), *x.values())))
    if isinstance(x, list | tuple | set | frozenset):
        return all(map(_is_plain, x))
    return x is None or isinstance(x, _PLAIN)


def _closed(part: Opened, items: Mapping[str, Any]) -> Any:
    made_by: Any = OrderedDict if issubclass(part.kind, OrderedDict) else dict
    # past __init__, whose arguments nobody knows
    new: Any = (made_by if issubclass(part.kind, dict) else object).__new__(part.kind)
    rest = {key: copy.deepcopy(one.value) for key, one in part.rest}
    if isinstance(new, UserDict):
        vars(new).update(rest, data=dict(items))
    elif isinstance(new, dict):  # a ModelOutput keeps its attributes in step with its keys
        for key, value in rest.items():
            object.__setattr__(new, key, value)
        for key, value in items.items():
            new[key] = value
    else:
        for key, value in items.items():
            object.__setattr__(new, key, value)  # a frozen one, too
    return new
