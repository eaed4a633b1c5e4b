"""What a function reads from outside, as plain data: [Note: facts].

A function's arguments are not all that it reads. It has closure cells, globals that its code names,
defaults; these hold objects, modules and containers, and so on. `Walk` goes through them from a
few roots and writes down *facts*: this holder has this value under this key. As long as all facts
hold, the function reads what it read before.

Of an object only those attributes count that were really read, as `functional.reads` has seen. So a
counter in an object that the function happens to reach is no fact.

What lies in torch, numpy, Python's library, test runners and this package is not walked through,
but closures of their functions are, since they hold functions of the user's.
"""

import array
import collections
import ctypes
import enum
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dis import get_instructions
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.functional.library import (
    HEAP_TYPE,
    is_library,
    is_library_class,
    is_library_module,
    is_machinery,
)
from fzero.functional.reads import MISSING, Reads


class Place(NamedTuple):
    """Where a value was found, from a root down."""

    parent: "Place | None"
    label: str

    def __str__(self) -> str:
        parts, place = [], self
        while place is not None:
            parts.append(place.label)
            place = place.parent
        return "".join(reversed(parts))


class Fact(NamedTuple):
    """`get(key, MISSING)` was `value`; `holder` is what `get` looks into."""

    get: Callable[[Any, Any], Any]
    key: Any
    value: Any
    place: Place
    holder: Any


class Walk:
    """All facts that can be reached from `roots`; see [Note: facts].

    Args:
        roots: by what messages call them.
        reads: what was read of objects; None while that is not known yet.
        watch: told of each object, if `reads` is None.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        reads: Reads | None = None,
        watch: Callable[[Any], bool] | None = None,
    ) -> None:
        self.roots, self.reads, self.watch = roots, reads, watch
        self.facts: list[Fact] = []
        self.containers: list[tuple[Any, Place]] = []
        self.arrays: list[tuple[Any, Place]] = []
        self.generators: list[tuple[Any, Place]] = []
        self.seen: dict[int, Any] = {}
        self.tensors: list[tuple[Tensor, Place]] = []
        self._noted: set[tuple[int, Any]] = set()
        self._todo: list[tuple[Any, Place]] = []
        self._classes: set[type] = set()
        self._spaces: list[tuple[Any, Place]] = []  # see [Note: who has a name for it]
        self._names: set[str] = set()  # of all code so far
        self._paired = (0, 0)  # how many spaces and names there were then
        self._bound: set[tuple[int, int]] = set()  # classes and the code of their class methods
        for label, root in roots.items():
            self.visit(root, Place(None, label))

    def visit(self, value: Any, place: Place) -> None:
        """Write down all facts that can be reached from `value`."""
        self._todo.append((value, place))
        while self._todo or self._pair():
            value, place = self._todo.pop()
            if type(value) not in _PLAIN and id(value) not in self.seen:
                self.seen[id(value)] = value
                self._visit(value, place)

    def _later(self, value: Any, place: Place) -> None:
        if type(value) not in _PLAIN:
            self._todo.append((value, place))

    def _note(self, get: Any, key: Any, place: Place, holder: Any, follow: bool = True) -> None:
        if (id(holder), key) in self._noted:
            return
        self._noted.add((id(holder), key))
        try:
            value = get(key, MISSING)
        except ValueError:  # an empty cell
            return
        self.facts.append(Fact(get, key, value, place, holder))
        if follow:
            self._later(value, place)

    def _visit(self, value: Any, place: Place) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value, place)
        elif isinstance(value, types.MethodType):
            self._later(value.__func__, place)
            if isinstance(value.__self__, type):  # a class method of it
                self._read_by_class(value.__self__, value, place)
            else:
                self._later(value.__self__, _named(value.__self__, place))
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            self._later(value.__self__, place)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            for inner in (value.func, value.args, value.keywords):
                self._later(inner, place)
        elif isinstance(value, (staticmethod, classmethod, functools._lru_cache_wrapper)):
            self._later(value.__wrapped__, place)
        elif isinstance(value, property):
            self._later(value.fget, place)
        elif isinstance(value, functools.cached_property):
            self._later(value.func, place)
        elif isinstance(value, weakref.ref):
            self._later(value(), place)
        elif isinstance(value, ContextVar):
            self._note(_Value(value).get, "value", place, value)
        elif isinstance(value, _VIEWS):  # has no name for what it shows
            for inner in gc.get_referents(value):
                self._later(inner, place)
        elif is_generator(value):
            self.generators.append((value, place))
        elif _is_array(value):
            self.arrays.append((value, place))
            if value.dtype.hasobject:  # it holds them by identity
                for i, item in enumerate(value.ravel().tolist()):
                    self._later(item, Place(place, f"[{i}]"))
        elif isinstance(value, _MEMORIES):
            self.arrays.append((value, place))
        elif isinstance(value, Tensor):
            self.tensors.append((value, place))
            # what torch and this package put there is nothing that a user's code reads
            for name in sorted(name for name in vars(value) if not name.startswith(_INTERNAL)):
                self._note(vars(value).get, name, Place(place, f".{name}"), vars(value))
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
            # torch calls these: no code of the user's names them
            for base in value.__mro__:
                for name, member in sorted(vars(base).items()):
                    if not is_library_class(base) and isinstance(member, _CALLED):
                        self._later(member, Place(place, f".{name}"))
        elif isinstance(value, type):
            self._data_of(value, place)
            if not is_library_class(value):
                self._spaces.append((value, place))
        elif isinstance(value, types.ModuleType):
            if not is_library_module(value):
                self._spaces.append((value, place))
        elif isinstance(value, enum.Enum):
            if not is_library_class(type(value)):
                self._spaces.append((value, place))
        elif isinstance(value, _CONTAINERS):
            self._container(value, place)
            # of an ordered table of hooks torch reads no attribute
            if type(value) not in _CONTAINERS and not is_hooks(place.label):
                self._object(value, place)
        else:
            self._object(value, place)

    def _container(self, value: Any, place: Place) -> None:
        if getattr(type(value), "made_by_functionalize", False):
            return
        if not isinstance(value, (tuple, frozenset)):
            self.containers.append((value, place))
        for label, item in labelled(value, place):
            self._later(item, Place(place, label))

    # ------------------------------------------------------------------------------- functions
    def _function(self, fn: types.FunctionType, place: Place) -> None:
        code = fn.__code__
        known = is_library(code.co_filename)
        passed = frozenset() if known else passed_on(code)
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            get = functools.partial(getattr, cell)
            follow = known or name in passed or not _is_space(self._cell(fn, name))
            self._note(get, "cell_contents", Place(None, name), cell, follow)
        if known:
            return
        get = functools.partial(getattr, fn)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._note(get, name, Place(place, f".{name}"), fn)
        names = _names(code)
        self._names |= names
        self._spaces.append((fn, place))
        there = names & fn.__globals__.keys()
        if any(not isinstance(fn.__globals__[name], _DEFINED) for name in there):
            there &= _global_names(code)  # data: names of attributes are no globals
        # sorted: another process is to come to all in the same order
        for name in sorted(_global_names(code) - fn.__globals__.keys()):
            self._note(fn.__globals__.get, name, Place(None, name), fn.__globals__)
        for name in sorted(there):
            self._note_named(fn.__globals__, name, Place(None, name), passed)
            self._namespace(fn.__globals__[name], names, Place(None, name), passed)
        for inner in code.co_freevars:
            value = self._cell(fn, inner)
            self._namespace(value, names, Place(None, inner), passed)
            if inner == "__class__" and isinstance(value, type):  # super() may come to any base
                for base in value.__mro__[1:]:
                    self._namespace(base, names, Place(None, "super()"), passed)
        for name in sorted(names & sys.modules.keys()):  # imported inside
            self._namespace(sys.modules[name], names, Place(None, name), passed)
            if f"import {name}" in passed:
                self._later(sys.modules[name], Place(None, name))
        for first, *attributes in sorted(_dotted(code)):
            of = self._cell(fn, first) if first in code.co_freevars else fn.__globals__.get(first)
            self._dotted_names(of, attributes, Place(None, first))

    def _cell(self, fn: types.FunctionType, name: str) -> Any:
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        try:
            return cells[name].cell_contents
        except ValueError:
            return None

    def _note_named(
        self, space: dict[str, Any], name: str, place: Place, passed: frozenset[str]
    ) -> None:
        """What code has a name for; a class or a module only goes on where the code hands it on."""
        follow = name in passed or not _is_space(space[name])
        self._note(space.get, name, place, space, follow)

    def _pair(self) -> bool:
        """Note what all code so far may read of all spaces so far; whether that leads on.

        [Note: who has a name for it] Classes, modules, functions and members of enums can't be
        watched, as objects are. What code does with one that it has a name for is seen in the code:
        `CFG.beta` reads `beta`. But it may hand it on, `loss(out, CFG)`, or an object may hold it,
        `self.cfg = CFG`. Who reads it then names the attribute alone, so all names of all code
        count.
        """
        if self._paired == (len(self._spaces), len(self._names)):
            return False
        self._paired = len(self._spaces), len(self._names)
        for value, place in self._spaces[:]:
            of_class = isinstance(value, type)
            holders = [vars(base) for base in value.__mro__] if of_class else [vars(value)]
            for name in sorted(self._names & set().union(*holders)):
                inner = Place(place, f".{name}")
                if of_class:
                    self._class_attribute(value, name, inner)
                else:
                    self._note(vars(value).get, name, inner, vars(value))
        return bool(self._todo)

    def _namespace(
        self, value: Any, names: set[str], place: Place, passed: frozenset[str], depth: int = 3
    ) -> None:
        """What code that has these names may read of a class or a module."""
        if isinstance(value, type):
            special = [k for k in value.__dict__ if k[:2] == k[-2:] == "__"]
            for name in [*sorted(names), *special]:
                self._class_attribute(value, name, Place(place, f".{name}"))
        elif isinstance(value, types.ModuleType) and not is_library_module(value):
            space = value.__dict__
            for name in sorted(names & space.keys()):
                inner = Place(place, f".{name}")
                self._note_named(space, name, inner, passed)
                if depth:
                    self._namespace(space[name], names, inner, passed, depth - 1)

    def _dotted_names(self, value: Any, names: list[str], place: Place) -> None:
        """What code that says `value.a.b` reads of classes, modules, functions and tensors.

        Also where there is none: it asks with `hasattr`, or catches the exception.
        """
        for name in names:
            place = Place(place, f".{name}")
            if name[:2] == "__" or (isinstance(value, Tensor) and hasattr(type(value), name)):
                return
            if isinstance(value, type):
                self._class_attribute(value, name, place, absent=True)
                value = _class_value(value, name)
            elif _has_own_names(value):
                space = vars(value)
                self._note(space.get, name, place, space, not _is_space(space.get(name)))
                value = space.get(name)
            else:  # an object is watched
                return

    def _data_of(self, cls: type, place: Place) -> None:
        """What a class holds beside what it does."""
        for base in cls.__mro__:
            if base.__flags__ & HEAP_TYPE and not is_library_class(base):
                for name, member in sorted(vars(base).items()):
                    data = not isinstance(member, type) and not hasattr(type(member), "__get__")
                    if data and name[:1] != "_":
                        inner = Place(place, f".{name}")
                        self._note(_class_dict(base).get, name, inner, base, follow=False)
                        self._later(member, inner)

    def _class_attribute(self, cls: type, name: str, place: Place, *, absent: bool = False) -> bool:
        """Note an attribute of a class, in all classes that may come to have it; whether it has.

        Args:
            cls: the class, of whose bases any may have it.
            name: of the attribute.
            place: where it is.
            absent: note also that no class has it: whoever asked found none.
        """
        found = False
        for i, base in enumerate(cls.__mro__):
            if name in base.__dict__:
                if base.__flags__ & HEAP_TYPE and not is_library_class(base):
                    # also where it is not: a class may get one of its own
                    self._note_in(cls.__mro__[: i + 1], name, place)
                    self._later(base.__dict__[name], place)
                    if isinstance(base.__dict__[name], classmethod):
                        self._read_by_class(cls, base.__dict__[name], place)
                found = True
                if not _calls_super(base.__dict__[name]):
                    break  # else the next one of that name runs, too
        if absent and not found:
            own = [base for base in cls.__mro__ if not is_library_class(base)]
            self._note_in([base for base in own if base.__flags__ & HEAP_TYPE], name, place)
        return found

    def _note_in(self, classes: Sequence[type], name: str, place: Place) -> None:
        for base in classes if name[:2] != "__" else ():
            self._note(_class_dict(base).get, name, place, base, follow=False)

    def _read_by_class(self, cls: type, method: Any, place: Place) -> None:
        """What a class method reads of the class that it is called on."""
        code = getattr(method.__func__, "__code__", None)
        if code is None or is_library(code.co_filename) or (id(cls), id(code)) in self._bound:
            return
        self._bound.add((id(cls), id(code)))  # class methods may call each other
        self._namespace(cls, _names(code), place, frozenset())

    # --------------------------------------------------------------------------------- objects
    def _object(self, value: Any, place: Place) -> None:
        cls = type(value)
        if is_machinery(cls):
            # what the library has made of a function reads what that reads
            self._later((attributes_of(value) or {}).get("__wrapped__"), place)
            return
        if cls.__flags__ & HEAP_TYPE:  # an object may be given another class
            self._note(functools.partial(getattr, value), "__class__", place, value, follow=False)
        if cls not in self._classes:
            self._classes.add(cls)
            for name in _dunder_functions(cls):
                self._class_attribute(cls, name, place)
            if isinstance(value, nn.Module):  # hooks of all modules; no names, no facts
                for name in GLOBAL_HOOKS:
                    self._later(vars(nn.modules.module).get(name), Place(None, name))
        attributes = attributes_of(value)
        if self.reads is None:
            if not (self.watch and self.watch(value)) and attributes is not None:
                self._later(attributes, place)
            return
        if cls.__flags__ & HEAP_TYPE == 0:  # can't be watched: all it has
            if attributes is not None:
                self._later(attributes, place)
            return
        names = self.reads.names_of(value, str(place))
        if names and attributes is not None:  # an object may be given other attributes, all at once
            get = functools.partial(object_getattr, value)
            self._note(get, "__dict__", place, value, follow=False)
        for name in names:
            if name == "__dict__" and attributes is not None:
                self.containers.append((attributes, place))
                continue
            self._attribute(value, attributes, name, Place(place, f".{name}"))

    def _attribute(self, value: Any, attributes: Any, name: str, place: Place) -> None:
        if attributes is not None:
            self._note(attributes.get, name, place, attributes)
            if name in attributes:
                return
        if self._class_attribute(type(value), name, place, absent=True):
            if isinstance(_class_value(type(value), name), types.MemberDescriptorType):  # a slot
                get = functools.partial(object_getattr, value)
                self._note(get, name, place, value)
            return
        if attributes is not None and isinstance(value, nn.Module):
            for table in _TABLES:  # in which it may come to be
                if isinstance(entries := attributes.get(table), dict):
                    self._note(entries.get, name, place, entries)


def _calls_super(member: Any) -> bool:
    """Whether a member of a class may go on to the one that it overrides."""
    inner = member.fget if isinstance(member, property) else member
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    return code is not None and "super" in code.co_names


def object_getattr(value: Any, name: str, default: Any) -> Any:
    """An attribute as `object` finds it."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


class _Value(NamedTuple):
    """What a context variable says, as of an attribute."""

    variable: ContextVar[Any]

    def get(self, key: str, default: Any) -> Any:
        del key
        try:
            return self.variable.get()  # its own default, if it has one
        except LookupError:
            return default


def put(fact: Fact, value: Any) -> None:
    """Give the holder of a fact another value under its key."""
    if isinstance(fact.holder, ContextVar):
        if value is not MISSING:
            fact.holder.set(value)
    elif isinstance(fact.holder, dict):
        if value is MISSING:
            fact.holder.pop(fact.key, None)
        else:
            fact.holder[fact.key] = value
    elif value is not MISSING:
        setattr(fact.holder, fact.key, value)


def items_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """A container's keys and items, whatever its class makes of them."""
    if isinstance(value, dict):
        return iter(list(dict.items(value)))
    return enumerate(list(value))


def labelled(value: Any, place: Place) -> Iterator[tuple[str, Any]]:
    """A container's items, with what places call them.

    Torch numbers hooks as they come in a process, so of these the order counts.
    """
    hooks = is_hooks(place.label)
    for i, (key, item) in enumerate(items_of(value)):
        yield f"[{i if hooks else key!r}]", item


def is_hooks(label: str) -> bool:
    """Whether a place ends in a module's table of hooks.

    >>> is_hooks("module.first._forward_hooks"), is_hooks("module.hooks")
    (True, False)
    """
    return label.rpartition(".")[2] in _HOOK_TABLES


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers from a state of its own."""
    import random

    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return isinstance(value, kinds)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def bytes_of(memory: Any) -> tuple[Any, ...]:
    """What an array, or another object that shows its memory, holds.

    >>> bytes_of(bytearray(b"a"))
    ('B', (1,), b'a')
    """
    if _is_array(memory):  # memoryview knows fewer dtypes
        return memory.dtype, memory.shape, memory.tobytes()
    with memoryview(memory) as view:
        return view.format, view.shape, view.tobytes()


def put_bytes(memory: Any, noted: Any) -> None:
    """Write what a copy of an object's memory holds back into it, if it has room."""
    if _is_array(memory):
        if memory.shape == noted.shape and memory.flags.writeable:
            memory[...] = noted
    elif bytes_of(memory)[:2] == bytes_of(noted)[:2] and bytes_of(noted)[2]:
        old, new = (torch.frombuffer(x, dtype=torch.uint8) for x in (noted, memory))
        new.copy_(old)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Its `__dict__`, if it has one."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _class_value(cls: type, name: str) -> Any:
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)


def _class_dict(cls: type) -> dict[str, Any]:
    """What is behind the proxy, to be read: a dict alone can be asked whether it has changed."""
    (found,) = gc.get_referents(cls.__dict__)
    return found


def _has_own_names(value: Any) -> bool:
    """Whether code that names it reads its `__dict__`, which nobody watches."""
    if isinstance(value, types.ModuleType):
        return not is_library_module(value)
    if isinstance(value, types.FunctionType):
        return not is_library(value.__code__.co_filename)
    return isinstance(value, (Tensor, enum.Enum))


def _named(value: Any, place: Place) -> Place:
    return Place(None, type(value).__name__) if place.parent is None else place


def _names(code: types.CodeType) -> set[str]:
    """All names that a code and those inside it have."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found


def _remembered(fn: Callable[[types.CodeType], frozenset[Any]]) -> Any:
    """Code is met again at each recording, often by the thousand, and never says anything else."""
    known = functools.lru_cache(maxsize=4096)(fn)

    @functools.wraps(fn)
    def call(code: types.CodeType) -> frozenset[Any]:
        try:
            return known(code)
        except TypeError:  # of a constant without a hash, in code that no compiler has made
            return fn(code)

    return call


@_remembered
def passed_on(code: types.CodeType) -> frozenset[str]:
    """Names of what a code does more with than to call it or to read an attribute.

    Of a module that it imports itself: "import name".

    >>> sorted(passed_on((lambda f: a.b + f(c, f(d.e))).__code__))
    ['b', 'c', 'e']
    """
    found: set[str] = set()
    steps = [step for step in get_instructions(code) if step.opname not in _NOTHING]
    for i, step in enumerate(steps):
        if step.opname not in _LOADS:
            continue
        beside = steps[i + 1 if sys.version_info >= (3, 13) else max(i - 1, 0)].opname
        called = "NULL" in step.argrepr or beside == "PUSH_NULL" or step.opname == "LOAD_METHOD"
        if not called and steps[i + 1].opname not in _OF_IT:
            found.add(f"import {step.argval}" if step.opname == "IMPORT_NAME" else step.argval)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= passed_on(const)
    return frozenset(found - {"__class__"})  # super() loads it, and reads its attribute by itself


def _is_space(value: Any) -> bool:
    """Whether what is read of it is seen in code that names it; torch itself calls Functions."""
    of_torch = isinstance(value, type) and issubclass(value, torch.autograd.Function)
    return isinstance(value, (type, types.ModuleType)) and not of_torch


@_remembered
def _global_names(code: types.CodeType) -> frozenset[str]:
    found = {
        instruction.argval
        for instruction in get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _global_names(const)
    return frozenset(found)


@_remembered
def _dotted(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """What a code reads of what it has a name for, from the name down.

    >>> sorted(_dotted((lambda x: cfg.model.width * x.y + getattr(cfg.model, "k", f(g))).__code__))
    [('cfg', 'model', 'k'), ('cfg', 'model', 'width')]
    """
    found: set[tuple[str, ...]] = set()
    steps = [step for step in get_instructions(code) if step.opname not in _NOTHING]
    asks = not {"getattr", "hasattr"}.isdisjoint(code.co_names)
    for i, step in enumerate(steps):
        if step.opname not in _NAMES_OF_CODE:
            continue
        names = [step.argval]
        while (after := steps[i + len(names)]).opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(after.argval)
        told = after.argval if asks and after.opname == "LOAD_CONST" else None
        if isinstance(told, str) and told.isidentifier():
            names.append(told)
        if len(names) > 1:
            found.add(tuple(names))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _dotted(const)
    return frozenset(found)


def _dunder_functions(cls: type) -> list[str]:
    """Special methods, which Python looks up in the class, past `__getattribute__`."""
    return [
        name
        for base in cls.__mro__
        if base.__flags__ & HEAP_TYPE and not is_library_class(base)
        for name, value in base.__dict__.items()
        if name[:2] == "__" and isinstance(value, types.FunctionType)
        if value.__module__ != Reads.__module__  # what watches it
    ]


# instructions, by their names in Python 3.11 to 3.13
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_ATTR", "LOAD_METHOD")
_LOADS += ("LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS", "IMPORT_NAME", "IMPORT_FROM")
_NAMES_OF_CODE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_OF_IT = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "IMPORT_FROM", "DELETE_ATTR")
_NOTHING = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
_HOOK_TABLES = frozenset(
    name
    for space in (vars(nn.Module()), vars(nn.modules.module))
    for name, value in space.items()
    if "_hooks" in name and isinstance(value, dict)
)
_TABLES = ("_parameters", "_buffers", "_modules")
_INTERNAL = ("_", "fzero_")
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_VIEWS = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
# memory that Python code writes in place; `multiprocessing.Value` keeps its number in the last kind
_MEMORIES = (bytearray, array.array, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
_CALLED = (types.FunctionType, staticmethod, classmethod)
_DEFINED = (types.FunctionType, types.ModuleType, type, types.BuiltinFunctionType)
_PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device}
    | {torch.layout, torch.memory_format, torch.Size, range, slice, types.CodeType}
)
