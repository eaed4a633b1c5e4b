"""Where a model may read a value from outside, and what reading another value changes.

A source is `make(module, value) -> (read, write)`. Each is written as a user would write it, since
what is noted while a step is recorded depends on the code. `use(x, value)` tells apart values
that are equal but not the same: `1`, `1.0` and `True`, `0.0` and `-0.0`, two orders of one dict.
"""

import collections
import dataclasses
import enum
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Source = Callable[[nn.Module, Any], tuple[Callable[[], Any], Callable[[Any], None]]]


class Color(enum.Enum):
    """Two choices."""

    RED = 1
    BLUE = 2


class Half(float):
    """A float that is another type."""


def soft(x: Tensor) -> Tensor:
    """A function of the user's."""
    return x.tanh() * 0.8


def hard(x: Tensor) -> Tensor:
    """Another one."""
    return x.clamp(-0.5, 0.5)


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    """For partials."""
    return x * by


class Caller:
    """An object that is called."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


VALUES: dict[str, Callable[[], Any]] = {
    "1": lambda: 1,
    "1.0": lambda: 1.0,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "0.0": lambda: 0.0,
    "-0.0": lambda: -0.0,
    "2": lambda: 2,
    "-1.5": lambda: -1.5,
    "Half(1.0)": lambda: Half(1.0),
    "np 1.0": lambda: np.float64(1.0),
    "np 3": lambda: np.int64(3),
    "1+2j": lambda: 1 + 2j,
    "None": lambda: None,
    "tanh": lambda: "tanh",
    "sin": lambda: "sin",
    "RED": lambda: Color.RED,
    "BLUE": lambda: Color.BLUE,
    "soft": lambda: soft,
    "hard": lambda: hard,
    "partial": lambda: functools.partial(scaled, by=0.5),
    "partial2": lambda: functools.partial(scaled, by=-0.5),
    "lambda": lambda: lambda x: x * 0.25,
    "caller": lambda: Caller(0.5),
    "caller2": lambda: Caller(-0.5),
    "tensor": lambda: torch.tensor(0.5, dtype=torch.float64),
    "tensor2": lambda: torch.tensor(-0.5, dtype=torch.float64),
    "tanh module": lambda: nn.Tanh(),
    "elu 0.5": lambda: nn.ELU(0.5),
    "elu 2": lambda: nn.ELU(2.0),
    "list": lambda: ["sin", 2],
    "list2": lambda: [2, "sin"],
    "tuple": lambda: ("sin", 2),
    "nested": lambda: {"a": [1, {"b": (0.5, "tanh")}]},
    "nested2": lambda: {"a": [1, {"b": (0.5, "sin")}]},
    "dict": lambda: {"a": "sin", "b": 2.0},
    "dict2": lambda: {"b": 2.0, "a": "sin"},
    "slice": lambda: slice(0, 2),
    "slice2": lambda: slice(1, 3),
    "range": lambda: range(2),
    "range2": lambda: range(3),
    "dtype": lambda: torch.float32,
    "dtype2": lambda: torch.float64,
    "bytes": lambda: b"ab",
    "bytes2": lambda: b"abc",
    "array": lambda: np.array([0.5, 2.0]),
    "array2": lambda: np.array([2.0, 0.5]),
    "type": lambda: nn.Tanh,
    "type2": lambda: nn.Sigmoid,
}


def use(x: Tensor, value: Any) -> Tensor:
    """`x`, changed by a value; nearly every pair of values changes it in two ways."""
    if value is None:
        return x
    if isinstance(value, bool):
        return x + 0.3 if value else x - 0.3
    if isinstance(value, Half):
        return x * 0.7
    if isinstance(value, np.generic):
        return x * (0.6 + 0.1 * float(value))
    if isinstance(value, int):
        return x * (0.9 + 0.1 * value)
    if isinstance(value, float):
        return x * (1 + 0.1 * value) + 0.1 * math.copysign(1.0, value)
    if isinstance(value, complex):
        return x * value.real + value.imag
    if isinstance(value, str):
        return getattr(torch, value)(x)
    if isinstance(value, bytes):
        return x + len(value)
    if isinstance(value, enum.Enum):
        return x + 0.4 if value is Color.RED else x - 0.4
    if isinstance(value, slice):
        return torch.cat([x[:, value] * 0.5, x], 1)[:, : x.shape[1]]
    if isinstance(value, range):
        for _ in value:
            x = x.sin()
        return x
    if isinstance(value, torch.dtype):
        return x * (0.5 if value == torch.float32 else 1.5)
    if isinstance(value, np.ndarray):
        return use(x, float(value[0]))
    if isinstance(value, Tensor):
        return x * value.to(x.dtype)
    if isinstance(value, type):
        layer: Any = value()
        return layer(x)
    if callable(value):
        made: Any = value(x)
        return made
    if isinstance(value, dict):
        for key, item in value.items():
            x = use(x, item) + 0.01 * len(key)
        return x
    for item in value:
        x = use(x, item)
    return x


def number(value: Any) -> float:
    """A rate between 0.02 and 0.2 for any value, without tensors but for a value that is one."""
    return 0.02 + 0.18 / (1 + math.exp(-_score(value)))


def _score(value: Any) -> float:
    if value is None:
        return -2.0
    if isinstance(value, bool):
        return 0.7 if value else -0.7
    if isinstance(value, Half):
        return 1.3
    if isinstance(value, np.generic):
        return 0.2 * float(value) + 0.05
    if isinstance(value, float):
        return math.copysign(0.3, value) + 0.4 * value
    if isinstance(value, int):
        return 0.25 * value
    if isinstance(value, complex):
        return value.real - value.imag
    if isinstance(value, (str, bytes)):
        return 0.1 * sum(value if isinstance(value, bytes) else value.encode()) % 1.0
    if isinstance(value, enum.Enum):
        return 0.9 if value is Color.RED else -0.9
    if isinstance(value, slice):
        return 0.3 * value.start
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, np.ndarray):
        return float(value[0])
    if isinstance(value, functools.partial):
        return value.keywords["by"]
    if isinstance(value, Caller):
        return 2 * value.by
    if isinstance(value, nn.ELU):
        return value.alpha
    if callable(value):
        return 0.01 * len(getattr(value, "__name__", type(value).__name__))
    if isinstance(value, torch.dtype):
        return 0.1 if value == torch.float32 else 0.6
    items = value.items() if isinstance(value, dict) else value
    total = 0.0
    for item in items:  # the order counts
        total = 0.5 * total + _score(item)
    return total


# --- sources ---------------------------------------------------------------------------------

GLOBAL: Any = None
TABLE: dict[str, Any] = {}


class Box:
    """An object with an attribute."""

    kind: Any = None

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def shown(self) -> Any:
        """The value through a property."""
        return self._inner()

    def _inner(self) -> Any:
        return self.value

    def __getitem__(self, key: str) -> Any:
        return self.value


class Slotted:
    """An object without a dict."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Options:
    """A dataclass in a dataclass."""

    value: Any
    inner: "Options | None" = None


def module_attribute(module: nn.Module, value: Any) -> Any:
    module.value = value
    return lambda: module.value, lambda new: setattr(module, "value", new)


def module_dict(module: nn.Module, value: Any) -> Any:
    module.options = {"deep": [{"value": value}]}  # pyright: ignore
    return (
        lambda: module.options["deep"][0]["value"],  # pyright: ignore
        lambda new: module.options["deep"][0].update(value=new),  # pyright: ignore
    )


def module_vars(module: nn.Module, value: Any) -> Any:
    module.value = value
    return lambda: vars(module)["value"], lambda new: vars(module).update(value=new)


def module_getattr(module: nn.Module, value: Any) -> Any:
    name = "val" + "ue"
    module.value = value
    return lambda: getattr(module, name), lambda new: setattr(module, name, new)


def global_name(module: nn.Module, value: Any) -> Any:
    def write(new: Any) -> None:
        globals()["GLOBAL"] = new

    write(value)
    return lambda: GLOBAL, write


def global_table(module: nn.Module, value: Any) -> Any:
    TABLE["value"] = value
    return lambda: TABLE.get("value"), lambda new: TABLE.update(value=new)


def closure(module: nn.Module, value: Any) -> Any:
    held = value

    def write(new: Any) -> None:
        nonlocal held
        held = new

    return lambda: held, write


def closure_of_closure(module: nn.Module, value: Any) -> Any:
    read, write = closure(module, value)

    def outer() -> Any:
        def inner() -> Any:
            return read()

        return inner()

    return outer, write


def default_list(module: nn.Module, value: Any) -> Any:
    held = [value]

    def read(held: list[Any] = held) -> Any:
        return held[0]

    return read, lambda new: held.__setitem__(0, new)


def keyword_default(module: nn.Module, value: Any) -> Any:
    def read(*, held: Any = value) -> Any:
        return held

    def write(new: Any) -> None:
        read.__kwdefaults__ = {"held": new}

    return read, write


def default_replaced(module: nn.Module, value: Any) -> Any:
    def read(held: Any = value) -> Any:
        return held

    def write(new: Any) -> None:
        read.__defaults__ = (new,)

    return read, write


def partial_argument(module: nn.Module, value: Any) -> Any:
    held = {"x": value}
    return functools.partial(lambda d, k: d[k], held, "x"), lambda new: held.update(x=new)


def function_attribute(module: nn.Module, value: Any) -> Any:
    def read() -> Any:
        return read.value  # pyright: ignore

    read.value = value  # pyright: ignore
    return read, lambda new: setattr(read, "value", new)


def object_attribute(module: nn.Module, value: Any) -> Any:
    box = Box(value)
    return lambda: box.value, lambda new: setattr(box, "value", new)


def object_property(module: nn.Module, value: Any) -> Any:
    box = Box(value)
    return lambda: box.shown, lambda new: setattr(box, "value", new)


def object_item(module: nn.Module, value: Any) -> Any:
    box = Box(value)
    return lambda: box["any"], lambda new: setattr(box, "value", new)


def bound_method(module: nn.Module, value: Any) -> Any:
    box = Box(value)
    return box._inner, lambda new: setattr(box, "value", new)


def class_attribute(module: nn.Module, value: Any) -> Any:
    kind = type("Kind", (Box,), {"kind": value})
    box = kind(0)
    return lambda: box.kind, lambda new: setattr(kind, "kind", new)


def attribute_over_class(module: nn.Module, value: Any) -> Any:
    kind = type("Kind", (Box,), {"kind": value})
    box = kind(0)
    return lambda: box.kind, lambda new: setattr(box, "kind", new)


def slots(module: nn.Module, value: Any) -> Any:
    box = Slotted(value)
    return lambda: box.value, lambda new: setattr(box, "value", new)


def nested_dataclass(module: nn.Module, value: Any) -> Any:
    options = Options(0, Options(value))
    return lambda: options.inner.value, lambda new: setattr(options, "inner", Options(new))  # pyright: ignore


def namespace(module: Any, value: Any) -> Any:
    module.config = types.SimpleNamespace(value=value)  # pyright: ignore
    return lambda: module.config.value, lambda new: setattr(module.config, "value", new)


def deque(module: nn.Module, value: Any) -> Any:
    held = collections.deque([value], maxlen=1)
    return lambda: held[-1], held.append


def stack(module: nn.Module, value: Any) -> Any:
    held = [value]
    return lambda: held[-1], held.append


def chain_map(module: nn.Module, value: Any) -> Any:
    front: dict[str, Any] = {}
    held = collections.ChainMap(front, {"value": value})
    return lambda: held["value"], lambda new: front.update(value=new)


def user_dict(module: nn.Module, value: Any) -> Any:
    held = collections.UserDict(value=value)
    return lambda: held["value"], lambda new: held.update(value=new)


def default_dict(module: nn.Module, value: Any) -> Any:
    held: Any = collections.defaultdict(lambda: value)
    return lambda: held["value"], lambda new: held.update(value=new)


def proxy(module: nn.Module, value: Any) -> Any:
    held = {"value": value}
    shown = types.MappingProxyType(held)
    return lambda: shown["value"], lambda new: held.update(value=new)


def missing_key(module: nn.Module, value: Any) -> Any:
    held: dict[str, Any] = {}
    return lambda: held.get("value", value), lambda new: held.update(value=new)


def missing_attribute(module: nn.Module, value: Any) -> Any:
    box = types.SimpleNamespace()
    return lambda: getattr(box, "value", value), lambda new: setattr(box, "value", new)


def membership(module: nn.Module, value: Any) -> Any:
    held, other = set(), [value]

    def write(new: Any) -> None:
        held.add("changed")
        other[0] = new

    return lambda: other[0] if "changed" in held else value, write


def length(module: nn.Module, value: Any) -> Any:
    held: list[Any] = [value]
    return lambda: held[len(held) - 1], held.append


def code_replaced(module: nn.Module, value: Any) -> Any:
    held = [value, value]

    def read() -> Any:
        return held[0]

    def other() -> Any:
        return held[1]

    def write(new: Any) -> None:
        held[1] = new
        read.__code__ = other.__code__

    return read, write


def method_replaced(module: nn.Module, value: Any) -> Any:
    box = Box(value)
    return lambda: box._inner(), lambda new: setattr(box, "_inner", lambda: new)


def subclass_of_list(module: nn.Module, value: Any) -> Any:
    class Items(list):  # pyright: ignore
        pass

    held = Items([value])
    return lambda: held[0], lambda new: held.__setitem__(0, new)


def iterated(module: nn.Module, value: Any) -> Any:
    held = {"x": value}

    def read() -> Any:
        for item in held.values():
            return item
        return None

    return read, lambda new: held.update(x=new)


def child_module(module: Any, value: Any) -> Any:
    child = nn.Identity()
    child.value = value  # pyright: ignore
    module.child = child
    return lambda: module.child.value, lambda new: setattr(module.child, "value", new)


def other_module(module: nn.Module, value: Any) -> Any:
    child = nn.Identity()
    child.value = value  # pyright: ignore
    return lambda: child.value, lambda new: setattr(child, "value", new)


def by_dict_of_object(module: nn.Module, value: Any) -> Any:
    box = Box(value)
    return lambda: box.value, lambda new: box.__dict__.update(value=new)


def exception_caught(module: nn.Module, value: Any) -> Any:
    held: dict[str, Any] = {}

    def read() -> Any:
        try:
            return held["value"]
        except KeyError:
            return value

    return read, lambda new: held.update(value=new)


def object_attribute_missing(module: nn.Module, value: Any) -> Any:
    box = Box(value)

    def read() -> Any:
        return box.extra if hasattr(box, "extra") else box.value  # pyright: ignore

    return read, lambda new: setattr(box, "extra", new)


def dir_of_object(module: nn.Module, value: Any) -> Any:
    box = types.SimpleNamespace(a=value)
    return (
        lambda: list(vars(box).values())[-1],
        lambda new: setattr(box, "b", new),
    )


SOURCES: dict[str, Source] = {
    make.__name__: make
    for make in (
        module_attribute, module_dict, module_vars, module_getattr, global_name, global_table,
        closure, closure_of_closure, default_list, keyword_default, default_replaced,
        partial_argument, function_attribute, object_attribute, object_property, object_item,
        bound_method, class_attribute, attribute_over_class, slots, nested_dataclass, namespace,
        deque, stack, chain_map, user_dict, default_dict, proxy, missing_key, missing_attribute,
        membership, length, code_replaced, method_replaced, subclass_of_list, iterated,
        child_module, other_module, by_dict_of_object, exception_caught,
        object_attribute_missing, dir_of_object,
    )
}  # fmt: skip
