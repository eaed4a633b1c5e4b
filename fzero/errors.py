"""Every error that fzero raises on purpose.

A message says what was found, where (leaf path, rank, field), the rule, and what to do next.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")


class FzeroError(Exception):
    """Base of all errors of this library."""


class ConfigError(FzeroError, ValueError):
    """A `Config` field, or a combination of fields, that is not allowed."""


class ShardError(FzeroError):
    """A tree or tensor that does not fit its layout or mesh."""


class TraceError(FzeroError):
    """A model function that cannot be staged out into a Program."""


class TransformOverError(TraceError):
    """What a transform of `torch.func` gave to a call is read after the transform is over."""


class RankMismatchError(FzeroError):
    """Ranks disagree on something that must be the same everywhere."""


class BackwardError(FzeroError):
    """A backward call or a step of the eager adapter that is out of order."""


class CheckpointError(FzeroError):
    """A checkpoint that cannot be written, read or trusted."""


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ConfigError that names the first of `given` that `what` has not, and near ones.

    Raises:
        ConfigError: one is not known.

    Examples:
        >>> refuse_unknown("Config", ["acum_steps"], ["stage", "accum_steps"])
        Traceback (most recent call last):
        ...
        fzero.errors.ConfigError: Config has no field 'acum_steps'. Did you mean 'accum_steps'? ...
    """
    known = list(known)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=2)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(
                f"{what} has no field {name!r}.{hint} Its fields: {', '.join(known)}."
            )


def fields_by_name(cls: type[T]) -> type[T]:
    """A dataclass that refuses arguments which are no fields of it as `refuse_unknown` does."""
    made: Any = cls.__init__
    names = [f.name for f in dataclasses.fields(cls) if f.init]  # pyright: ignore

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        refuse_unknown(cls.__name__, fields, names)
        made(self, *args, **fields)

    setattr(cls, "__init__", __init__)  # noqa: B010 - a method of a class that is any
    return cls


def users_line() -> int:
    """The `stacklevel` with which a warning names the line that called into this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "fzero":
        frame, level = frame.f_back, level + 1
    return level
