"""What functions of a user are called where ranks compare them, and in messages."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any


def name_of(fn: Callable[..., Any]) -> str:
    """A function's name, the same in every process.

    Of a `functools.partial` with its arguments; of an object that can be called, its repr: a frozen
    dataclass says its fields there.

    Examples:
        >>> name_of(functools.partial(sorted, reverse=True))
        'builtins.sorted(reverse=True)'
    """
    if isinstance(fn, functools.partial):
        given = [*map(repr, fn.args), *(f"{key}={value!r}" for key, value in fn.keywords.items())]
        return f"{name_of(fn.func)}({', '.join(given)})"
    inner = inspect.unwrap(fn)
    if hasattr(inner, "__qualname__"):
        return f"{inner.__module__}.{inner.__qualname__}"
    if isinstance(inner, functools.partial):
        return name_of(inner)
    said = repr(inner)
    # the address of an object, which differs between ranks
    if re.search(r" at 0x[0-9a-f]+", said):
        return f"{type(inner).__module__}.{type(inner).__qualname__}"
    return said
