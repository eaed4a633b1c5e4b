"""Checks of hyperparameters: a message names the optimizer, the field, the value and the rule."""

import contextlib
import functools
import inspect
import math
import types
from numbers import Real
from typing import Any

from torch import Tensor

from fzero.errors import NO_PARAMETERS, ConfigError, is_many, shown


def non_negative(where: str, **fields: Any) -> None:
    """Every field is a finite number of at least 0."""
    for field, value in fields.items():
        _require(where, field, value, _number(value) and value >= 0, "a finite number >= 0")


def positive(where: str, **fields: Any) -> None:
    """Every field is a finite number above 0."""
    for field, value in fields.items():
        _require(where, field, value, _number(value) and value > 0, "a finite number > 0")


def finite(where: str, **fields: Any) -> None:
    """Every field is a finite number."""
    for field, value in fields.items():
        _require(where, field, value, _number(value), "a finite number")


def fraction(where: str, **fields: Any) -> None:
    """Every field lies in [0, 1)."""
    for field, value in fields.items():
        _require(where, field, value, _number(value) and 0 <= value < 1, "a number in [0, 1)")


def steps(where: str, *, least: int = 1, **fields: Any) -> None:
    """Every field is a whole number of steps, `least` or more."""
    for field, value in fields.items():
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        _require(where, field, value, whole, f"a whole number >= {least}")


def learning_rate(where: str, lr: Any) -> None:
    """`lr` is a finite number of at least 0, or a schedule; or a 0-d tensor, which nobody reads."""
    rule = "a finite number >= 0, or a schedule: a function of the step, such as optim.cosine(...)"
    fits = _scalar(lr) or (_takes_step(lr) if callable(lr) else _number(lr) and lr >= 0)
    if not fits and is_many(lr):
        rule = f"{rule}. {NO_PARAMETERS.format(where)}".removesuffix(".")
    _require(where, "lr", lr, fits, rule)


def _takes_step(schedule: Any) -> bool:
    try:
        inspect.signature(schedule).bind(None)
    except TypeError:
        return False
    except ValueError:  # made in C, it doesn't say what it takes
        pass
    return True


def decay(where: str, weight_decay: Any) -> None:
    """`weight_decay` is a finite number of at least 0; or a 0-d tensor, which nobody reads."""
    if not _scalar(weight_decay):
        non_negative(where, weight_decay=weight_decay)


def decay_rate(where: str, **fields: Any) -> None:
    """Every field lies in [0, 1); or is a 0-d tensor, which nobody reads."""
    fraction(where, **{field: x for field, x in fields.items() if not _scalar(x)})


def momentum(where: str, **fields: Any) -> None:
    """Every field is a finite number of at least 0; or a 0-d tensor, which nobody reads."""
    non_negative(where, **{field: x for field, x in fields.items() if not _scalar(x)})


def state(where: str, value: Any, kind: type) -> None:
    """The state is what this optimizer keeps."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"{where}: the state is a {type(value).__name__}, and this optimizer keeps a "
            f"{kind.__name__}. Pass what init or the last update returned; of the state of a step "
            "that is opt_state.inner."
        )


def numbers_of(opt: Any) -> dict[str, str]:
    """The numbers that an optimizer of this library was made with, by the names of its arguments.

    They are where Python keeps them, in the cells of its functions. What a user's functions hold is
    theirs, and left alone.

    >>> from fzero.optim import cosine, sgd
    >>> found = numbers_of(sgd(cosine(0.1, 100), weight_decay=0.01))
    >>> found["sgd.weight_decay"], found["cosine.steps"]
    ('0.01', '100')
    """
    found: dict[str, str] = {}
    seen: set[int] = set()

    def look(value: Any, name: str) -> None:
        if isinstance(value, (int, float)) and name:
            text, number = repr(value), 1
            while found.setdefault(name if number == 1 else f"{name} ({number})", text) != text:
                number += 1
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, types.FunctionType) and value.__module__.startswith("fzero."):
            maker = value.__qualname__.partition(".")[0].lstrip("_")
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            for label, cell in cells:
                with contextlib.suppress(ValueError):  # an empty one
                    look(cell.cell_contents, f"{maker}.{label}")
        elif isinstance(value, functools.partial):
            look((value.func, value.args, value.keywords), name)
        elif isinstance(value, inspect.BoundArguments):
            look(value.arguments, name)
        elif isinstance(value, dict):
            for key, item in value.items():
                look(item, f"{name}[{key!r}]")
        elif isinstance(value, (tuple, list)):
            for item in value:
                look(item, name)

    look(opt, "")
    return found


def maker_of(opt: Any) -> str:
    """Which of this library's optimizers with a learning rate one is; "" if it is none by itself.

    >>> from fzero.optim import adamw, chain, sgd
    >>> maker_of(sgd(0.1)), maker_of(adamw(0.1)), maker_of(chain(sgd(0.1)))
    ('sgd', 'adamw', '')
    """
    update = opt.update
    if not isinstance(update, types.FunctionType) or not update.__module__.startswith("fzero."):
        return ""
    cells = dict(zip(update.__code__.co_freevars, update.__closure__ or (), strict=True))
    if "lr" not in cells:
        return ""
    if "name" in cells:  # Adam's two share a function
        return str(cells["name"].cell_contents)
    return update.__qualname__.partition(".")[0]


def _scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _require(where: str, field: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{where}: {field}={shown(value)}, but {field} must be {rule}.")
