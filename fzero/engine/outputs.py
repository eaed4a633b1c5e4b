"""The tensors in what a module takes and gives: nested containers, dataclasses, any order."""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

_DEPTH = 20  # containers that hold themselves end somewhere


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in tuples, lists, sets, mappings, dataclasses and objects with attributes, once.

    >>> [x.item() for x in tensors_in({"a": torch.tensor(1), "b": (2, [torch.tensor(3)])})]
    [1, 3]
    """
    return list(_walk(value, set()))


def _walk(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen or isinstance(value, str | bytes | int | float | type | None):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        inner: Any = list(value.values())
    elif isinstance(value, tuple | list | set | frozenset):
        inner = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    # what can be called is no output: a module would bring all its parameters
    elif hasattr(value, "__dict__") and not callable(value):
        inner = list(vars(value).values())
    else:
        return
    for item in inner:
        yield from _walk(item, seen)


def loss_in(out: Any) -> Tensor | None:
    """What is likely to be the loss in a module's output: itself, its first item, its `loss`.

    >>> loss_in({"loss": torch.tensor(2.0), "logits": torch.ones(3)})
    tensor(2.)
    """
    if isinstance(out, Mapping):
        out = out.get("loss")
    elif isinstance(out, tuple | list):
        out = out[0] if out else None
    elif not isinstance(out, Tensor):
        out = getattr(out, "loss", None)
    is_loss = isinstance(out, Tensor) and out.numel() == 1 and out.is_floating_point()
    return out.detach().clone().reshape(()) if is_loss else None


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors of nested containers in `dtype`; everything else as it is.

    >>> cast((torch.ones(1), {"n": torch.tensor(1)}), torch.bfloat16)
    (tensor([1.], dtype=torch.bfloat16), {'n': tensor(1)})
    """
    return value if dtype is None else _map(lambda x: _low(x, dtype), value, _DEPTH)


def _low(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _map(fn: Callable[[Tensor], Tensor], value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if depth == 0:
        return value
    if isinstance(value, tuple):
        items = [_map(fn, x, depth - 1) for x in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list | MutableMapping):
        pairs = list(value.items() if isinstance(value, MutableMapping) else enumerate(value))
        changed = _changed(fn, pairs, depth)
        # a copy keeps the class, and whatever else a user's container carries
        new: Any = copy.copy(value) if changed else value
        for key, x in changed:
            new[key] = x
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = _changed(fn, [(name, getattr(value, name)) for name in names], depth)
        new = copy.copy(value) if changed else value
        for name, x in changed:
            object.__setattr__(new, name, x)  # a frozen one, too
        return new
    return value


def _changed(
    fn: Callable[[Tensor], Tensor], pairs: Iterable[tuple[Any, Any]], depth: int
) -> list[tuple[Any, Any]]:
    """What is another object after `fn`.

    A container without any stays the caller's own, which a module may put what it finds into.
    """
    new = [(key, x, _map(fn, x, depth - 1)) for key, x in pairs]
    return [(key, y) for key, x, y in new if y is not x]
