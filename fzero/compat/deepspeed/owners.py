"""Whose a parameter is: what functions that are given bare parameters go by."""

import weakref
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fzero.engine import Engine
from fzero.errors import ShardError


class Holder(Protocol):
    """What trains a parameter: a `DeepSpeedEngine`."""

    inner: Engine


class Owner(NamedTuple):
    """Whose a parameter is.

    Args:
        holder: its engine.
        name: in the module.
    """

    holder: "weakref.ref[Holder]"
    name: str


def note(param: Tensor, owner: Owner) -> None:
    """Note whose a parameter is."""
    param.fzero_deepspeed = owner  # pyright: ignore[reportAttributeAccessIssue]


def forget(param: Tensor) -> None:
    """Note that a parameter is nobody's any more."""
    param.fzero_deepspeed = None  # pyright: ignore[reportAttributeAccessIssue]


def owner_of(param: Any) -> tuple[Engine, str] | None:
    """The engine and the name of a parameter; None where it has none."""
    owner: Owner | None = getattr(param, "fzero_deepspeed", None)
    holder = None if owner is None else owner.holder()
    return None if owner is None or holder is None else (holder.inner, owner.name)


def owned(param: Any, asked: str) -> tuple[Engine, str]:
    """The same, of a parameter that must have one.

    Raises:
        ShardError: it has none.
    """
    found = owner_of(param)
    if found is None:
        raise ShardError(
            f"{asked} was given {type(param).__name__} {tuple(getattr(param, 'shape', ()))}, which "
            "is no parameter of a model that deepspeed.initialize has taken. Pass one of "
            "engine.module.parameters()."
        )
    return found
