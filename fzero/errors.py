"""Every error that fzero raises on purpose.

A message says what was found, where (leaf path, rank, field), the rule, and what to do next.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import reprlib
import sys
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
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


# how a step function keeps what a call changes, for messages that lead there
STATEFUL = "model_fn(params, state, batch) -> (loss, new_state), after step_fn.init(params, state)"


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 200 characters; its class where it says nothing.

    >>> first_line(ValueError("too large\\nin line 3")), first_line(ValueError())
    ('too large', 'ValueError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


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
            near = meant(name, known) or " or ".join(map(repr, get_close_matches(name, known, n=2)))
            hint = f" Did you mean {near}?" if near else ""
            raise ConfigError(
                f"{what} has no field {name!r}.{hint} Its fields: {', '.join(known)}."
            )


def meant(name: str, known: Iterable[str]) -> str:
    """What of `known` goes by another name elsewhere, for a message; "" if nothing does.

    >>> meant("betas", ["lr", "b1", "b2"]), meant("init_value", ["peak", "steps"]), meant("x", [])
    ("'b1' and 'b2'", "'peak'", '')
    """
    known = list(known)
    for here in _ELSEWHERE.get(name, ()):
        words = here.split()
        if set(words) <= set(known):
            return " and ".join(map(repr, words))
    return ""


# as torch.optim, optax, transformers, Lightning, accelerate and DeepSpeed call what is here
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "learning_rate": ("lr", "value"),
    "betas": ("b1 b2",),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "epsilon": ("eps",),
    # optax's schedules: where there is a start of its own, that is meant
    "init_value": ("start", "peak", "value"),
    "peak_value": ("peak",),
    "end_value": ("end",),
    "decay_steps": ("total_steps", "steps"),
    "transition_steps": ("steps",),
    "T_max": ("steps",),
    "eta_min": ("end",),
    "num_warmup_steps": ("warmup_steps",),
    "num_training_steps": ("total_steps", "steps"),
    # of a config
    "gradient_accumulation_steps": ("accum_steps",),
    "accumulate_grad_batches": ("accum_steps",),
    "max_grad_norm": ("clip_norm",),
    "gradient_clipping": ("clip_norm",),
    "gradient_clip_val": ("clip_norm",),
    "mixed_precision": ("precision",),
    "dtype": ("precision",),
    "zero_stage": ("stage",),
    "device_mesh": ("mesh",),
    "cpu_offload": ("offload",),
}

NO_PARAMETERS = (
    "Parameters and groups are not passed here, as torch.optim has them: {0}(3e-4) is for any, and "
    "init(params) takes them. Groups are fzero.optim.multi_transform."
)


def is_many(value: Any) -> bool:
    """Whether this looks like parameters or groups where a number belongs."""
    return (
        isinstance(value, Iterable) and not isinstance(value, str) and not hasattr(value, "shape")
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


def shown(value: Any) -> str:
    """A user's value for a message: short, on one line, tensors by what they are.

    >>> shown("a"), shown({"lr": [0.1] * 9})
    ("'a'", "{'lr': [0.1, 0.1, 0.1, 0.1, ...]}")
    """
    return _SHOWN.repr(value)


class _Shown(reprlib.Repr):
    """Tensors by class and shape, named tuples by name; the rest cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother, self.maxstring = 3, 80, 80
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 4

    def repr1(self, x: Any, level: int) -> str:
        name = type(x).__name__
        if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type):
            return f"a {name} of shape {tuple(x.shape)}"
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return f"{name}(...)"
        return " ".join(super().repr1(x, level).split())


_SHOWN = _Shown()


def check_flag(
    where: str, field: str, value: Any, *, optional: bool = False, hint: str = ""
) -> None:
    """Raise a ConfigError unless a flag is True or False itself: nearly every object is true.

    Args:
        where: what it was given to.
        field: its name there.
        value: what was given.
        optional: whether it may be None.
        hint: what to do; empty: of what may mean a flag, how to make one of it.

    Raises:
        ConfigError: it is another object.

    Examples:
        >>> check_flag("engine.step", "boundary", len)
        Traceback (most recent call last):
        ...
        fzero.errors.ConfigError: engine.step: boundary=<built-in function len>, but boundary ...
    """
    if value is True or value is False or (optional and value is None):
        return
    rule = "True, False or None" if optional else "True or False"
    if not hint and (isinstance(value, int) or getattr(value, "shape", None) == ()):
        hint = "Pass bool(...) of it."
    raise ConfigError(
        f"{where}: {field}={shown(value)}, but {field} must be {rule}. {hint}".rstrip()
    )


def arguments_by_name(fn: Callable[P, T], name: str = "") -> Callable[P, T]:
    """A function that says what it takes when it is called with other arguments.

    Meant for what people call with the names of other libraries. Python itself finds that a call
    does not fit. What is annotated as `bool`, or as `bool | None`, is checked by `check_flag`.

    Args:
        fn: a function.
        name: what its callers call it; empty: as it is called itself.

    Examples:
        >>> @arguments_by_name
        ... def adamw(lr: float, b1: float = 0.9, b2: float = 0.999): ...
        >>> adamw(0.1, betas=(0.9, 0.95))
        Traceback (most recent call last):
        ...
        fzero.errors.ConfigError: adamw has no argument 'betas'. Did you mean 'b1' and 'b2'? ...
    """

    flags = _flags_of(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for at, flag, optional in flags:
            value = args[at] if at < len(args) else kwargs.get(flag, False)
            if value is not True and value is not False:
                check_flag(_called(fn, name), flag, value, optional=optional)
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            # what came as far as a line of the function is not about its arguments
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise ConfigError(_misfit(fn, name, str(error), args, kwargs)) from None

    return call


def _flags_of(fn: Callable[..., Any]) -> list[tuple[int, str, bool]]:
    """Where a function takes flags: position, name, and whether it may be None."""
    kinds: dict[Any, bool] = {bool: False, bool | None: True}
    takes = inspect.signature(fn).parameters.values()
    found = [(at, x) for at, x in enumerate(takes) if isinstance(x.annotation, Hashable)]
    return [
        (sys.maxsize if x.kind is x.KEYWORD_ONLY else at, x.name, kinds[x.annotation])
        for at, x in found
        if x.annotation in kinds
    ]


def _called(fn: Callable[..., Any], name: str) -> str:
    return name or fn.__qualname__.removesuffix(".__init__")


def _one_less(number: re.Match[str]) -> str:
    return str(int(number[0]) - 1)


def _misfit(
    fn: Callable[..., Any], name: str, complaint: str, args: Sequence[Any], given: dict[str, Any]
) -> str:
    name = _called(fn, name)
    takes = inspect.signature(fn).parameters
    known = [x for x in takes.values() if x.name != "self"]
    if "self" in takes:  # which Python counts
        counted = r"takes .*positional arguments? but \d+ .*given"
        complaint = re.sub(counted, lambda m: re.sub(r"\d+", _one_less, m[0]), complaint)
    names = [x.name for x in known]
    found = f"{complaint.replace(fn.__qualname__, name)}."
    for unknown in [x for x in given if x not in names][:1]:
        near = get_close_matches(unknown, names, n=2) or [x for x in names if x in unknown]
        hints = [f"Did you mean {x}?" for x in [meant(unknown, names), *map(repr, near)] if x][:1]
        hints = [f"It is a field of {x}(...)." for x in _owners(fn, unknown)] or hints
        found = " ".join([f"{name} has no argument {unknown!r}.", *hints])
    if names[:1] == ["lr"] and ("params" in given or ("lr" in given and any(map(is_many, args)))):
        found = f"{found} {NO_PARAMETERS.format(name)}"
    plain = [x.replace(annotation=inspect.Parameter.empty) for x in known]
    return f"{found} Call it as {name}{inspect.Signature(plain)}."


def _owners(fn: Callable[..., Any], field: str) -> Iterator[str]:
    """The arguments of a function that are dataclasses with this field: `cfg=Config`."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(NameError, TypeError):  # of names for a type checker alone
        hints = typing.get_type_hints(fn)
    for argument, hint in hints.items():
        for kind in typing.get_args(hint):
            if field in getattr(kind, "__dataclass_fields__", ()):
                yield f"{argument}=fzero.{kind.__name__}"


def users_line() -> int:
    """The `stacklevel` with which a warning names the line that called into this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and _PASSED_ON.match(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


# contextlib's frames lie between a context manager here and whoever enters it, torch's between an
# optimizer's step and whoever calls it
_PASSED_ON = re.compile(r"(fzero|contextlib|torch\.optim)(\.|$)")
