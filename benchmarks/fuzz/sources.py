"""Where a model may read a value from outside, and what writes another one there.

A source is `make(module, value) -> (read, write)`. Each is written as a user would write it, since
what is noted while a step is recorded depends on the code.
"""

import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

Source = Callable[[nn.Module, Any], tuple[Callable[[], Any], Callable[[Any], None]]]

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
