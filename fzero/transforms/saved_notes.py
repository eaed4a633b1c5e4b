"""Notes as plain data: whether what another process recorded still holds here. [Note: prints].

[Note: prints] In one process a fact is held by identity: this holder has this object. Another
process has other objects, so there it is held by a *print* of the object: the value of plain data,
the code of a function, the shape of a tensor, the class of all else, whose attributes that were
read are facts of their own. A walk comes to everything in the same order in both processes; what it
came to is told by its place and how many of that name there were before. As in one process, what is
not noted (the clock, files, the environment, C extensions) is not seen.
"""

import collections
import enum
import functools
import hashlib
import re
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fzero.errors import FzeroError
from fzero.functional.library import HEAP_TYPE, is_library_module, is_machinery
from fzero.functional.outside import Walk, attributes_of, bytes_of, is_hooks
from fzero.functional.reads import MISSING, Reads
from fzero.numerics.host import on_host, strided_parts
from fzero.numerics.precision import class_name
from fzero.transforms.ambient import Ambient, changes
from fzero.transforms.notes import Notes, Seen, tokens_of

Json = Any
At = list[Any]
"""[place, number]: where a walk met an object, and how many of that place it had met before."""


class Gone(FzeroError):
    """What another process recorded does not hold here.

    Args:
        differences: in words.
    """

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = list(differences)
        super().__init__("; ".join(self.differences))


class Saved:
    """Notes that hold, as data.

    Args:
        notes: of a recording of this process.

    Raises:
        FzeroError: a place holds what can't be told from another by any process.
    """

    def __init__(self, notes: Notes) -> None:
        reads = _Placed(notes.reads)
        walk = Walk(notes.roots, reads)
        self.places = _places(walk)
        seen = notes.seen()
        self.data: Json = {
            "ambient": Ambient.of_now().as_data(),
            "sources": sources_of(walk),
            "reads": [[*at, list(names)] for at, names in reads.found.items()],
            "written": sorted(seen.written),
            "tokens": [[*at, text] for at, text in _prints(walk, seen.written).items()],
            "arrays": [_digest(bytes_of(x)[-1]) for x, _ in walk.arrays],
            "values": [[self.at(x), _digest_of(x)] for x in seen.values if id(x) in self.places],
        }

    def at(self, x: Tensor) -> At | None:
        """Where a tensor is; None if no walk comes to it."""
        found = self.places.get(id(x))
        return None if found is None else list(found)


class Resumed:
    """Notes of another process, held against what is here.

    Args:
        roots: the functions that it recorded.
        data: from `Saved`.

    Raises:
        Gone: something is otherwise; it is named.
    """

    def __init__(self, roots: Mapping[str, Any], data: Json) -> None:
        if changed := changes(data["ambient"], Ambient.of_now().as_data()):
            raise Gone(changed[:3])
        if changed := [x for x, digest in data["sources"].items() if source_of(x) != digest]:
            raise Gone([f"the code of the module {name!r}" for name in changed[:3]])
        reads = _Remembered({(place, n): names for place, n, names in data["reads"]})
        walk = Walk(roots, reads)
        written = frozenset(data["written"])
        old = {(place, n): text for place, n, text in data["tokens"]}
        new = _prints(walk, written, strict=False)
        rows = [
            (at, old.get(at, "nothing"), new.get(at, "nothing"))
            for at in dict.fromkeys((*old, *new))
        ]
        if changed := [f"{at[0]} from {a} to {b}" for at, a, b in rows if a != b]:
            raise Gone(changed[:3])
        if [_digest(bytes_of(x)[-1]) for x, _ in walk.arrays] != data["arrays"]:
            raise Gone(["the values of a numpy array"])
        self.tensors = {at: x for x, at in _tensors(walk)}
        values = [self.tensor(at) for at, _ in data["values"]]
        if [_digest_of(x) for x in values] != [digest for _, digest in data["values"]]:
            raise Gone(["the values of a tensor that Python read"])
        self.notes = Notes.resumed(roots, walk, reads, Seen(written, values))

    def tensor(self, at: At) -> Tensor:
        """The tensor at a place."""
        place, number = at
        return self.tensors[place, number]


class _Placed(Reads):
    """Notes where a walk meets the objects that were read."""

    def __init__(self, reads: Reads) -> None:
        super().__init__(reads.met)
        self.names, self.objects = reads.names, reads.objects
        self.found: dict[tuple[str, int], list[str]] = {}
        self._count: Counter[str] = Counter()

    def names_of(self, value: Any, place: str) -> Iterable[str]:
        names = list(super().names_of(value, place))
        self.found[place, self._count[place]] = names
        self._count[place] += 1
        return names


class _Remembered(Reads):
    """Says by its place which attributes of an object another process read."""

    def __init__(self, found: Mapping[tuple[str, int], list[str]]) -> None:
        super().__init__(lambda value: None)
        self.found = found
        self._count: Counter[str] = Counter()

    def names_of(self, value: Any, place: str) -> Iterable[str]:
        names = self.found.get((place, self._count[place]), [])
        self._count[place] += 1
        if names:
            self.objects[id(value)] = value
            self.names[id(value)] = dict.fromkeys(names, MISSING)
        return names


def _tensors(walk: Walk) -> list[tuple[Tensor, tuple[str, int]]]:
    count: Counter[str] = Counter()
    found = []
    for x, place in walk.tensors:
        name = str(place)
        found.append((x, (name, count[name])))
        count[name] += 1
    return found


def _places(walk: Walk) -> dict[int, tuple[str, int]]:
    return {id(x): at for x, at in _tensors(walk)}


# ------------------------------------------------------------------------------------ sources
def sources_of(walk: Walk) -> dict[str, str]:
    """The user's modules that a walk came to, and those that they name, each with a digest.

    Another process may run edited code that no walk sees: of a class that is only made inside, of
    what a base class does. So whatever is edited in these modules counts, but comments and lines.
    """
    todo = {getattr(x, "__module__", None) for x in walk.seen.values() if _is_code(x)}
    todo |= {base.__module__ for x in walk.seen.values() for base in type(x).__mro__}
    found: dict[str, str] = {}
    while todo:
        name = todo.pop()
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is None or name in found or is_library_module(module):
            continue
        found[str(name)] = source_of(str(name))
        if not found[str(name)].startswith("version"):
            for value in list(vars(module).values()):
                there = isinstance(value, types.ModuleType)
                todo.add(value.__name__ if there else getattr(value, "__module__", None))
    return dict(sorted(found.items()))


def source_of(name: str) -> str:
    """What the code of a module is known by: a digest, or the version of an installed package."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or not isinstance(file, str) or not Path(file).exists():
        return "no file"
    if {"site-packages", "dist-packages"} & set(Path(file).parts):
        top = sys.modules.get(name.partition(".")[0])
        return f"version {getattr(top, '__version__', 'unknown')}"
    # without docstrings; what a line says of its number is not in the code
    return _code(compile(Path(file).read_bytes(), "", "exec", dont_inherit=True, optimize=2))


def _is_code(x: Any) -> bool:
    return isinstance(x, (types.FunctionType, type))


# ------------------------------------------------------------------------------------- prints
def _prints(
    walk: Walk, written: frozenset[str], *, strict: bool = True
) -> dict[tuple[str, int], str]:
    """What stands for each value that must stay as it is; `strict` refuses what nothing can."""
    found = {}
    roots = {(label, -1): root for label, root in walk.roots.items()}
    tokens = roots | tokens_of(walk, written)
    printer = _Printer.of(tokens)
    for at, value in tokens.items():
        text = printer.hooks_of(value) if is_hooks(at[0]) else printer.print(value)
        if text is None and strict:
            raise FzeroError(
                f"the recording can't be saved: {at[0]} is a {type(value).__name__}, an object "
                "of C that another process can't tell from another. Read what is needed of it "
                "before the step, or pass it in the batch."
            )
        found[at] = text or "?"
    return found


def print_of(value: Any) -> str | None:
    """What two processes know a value by; None if there is nothing.

    >>> print_of(1), print_of([1.0, "a"]), print_of(torch.float32)
    ('int 1', "list[float 1.0, str 'a']", 'dtype torch.float32')
    >>> print_of(torch.ones(2, 3))
    'Tensor float32 (2, 3) (3, 1) cpu'
    """
    return _Printer({}).print(value)


class _Printer:
    """Prints of the values of one walk.

    Args:
        hooks: the numbers that torch has given to hooks, and their order.
    """

    def __init__(self, hooks: Mapping[int, int]) -> None:
        self.hooks = hooks
        # objects that are only ever told from each other: which places have the same one
        self.marks: dict[int, int] = {}

    @classmethod
    def of(cls, tokens: Mapping[tuple[str, int], Any]) -> "_Printer":
        """For these values, by place.

        A number tells which hook of one table belongs to which entry of another, so all tables
        have one order.
        """
        tables = [x for at, x in tokens.items() if is_hooks(at[0]) and isinstance(x, dict)]
        numbers = sorted({key for table in tables for key in table if type(key) is int})
        return cls({number: i for i, number in enumerate(numbers)})

    def hooks_of(self, table: Any) -> str | None:
        """Of a table of hooks."""
        if isinstance(table, dict) and all(type(key) is int for key in table):
            ordered = type(table)((self.hooks[key], hook) for key, hook in table.items())
            return self.print(ordered)
        return self.print(table)

    def print(self, value: Any, above: tuple[int, ...] = ()) -> str | None:
        """Of any value; `above` are the containers that it is in."""
        text = "object" if type(value) is object else _print(value, above, self.print)
        # it may be compared by `is` alone
        if text == "object" or ((text or "").startswith("a ") and not is_machinery(type(value))):
            return f"{text} {self.marks.setdefault(id(value), len(self.marks))}"
        return text


def _print(
    value: Any, above: tuple[int, ...], inner: Callable[[Any, tuple[int, ...]], str | None]
) -> str | None:
    kind = type(value)
    if value is MISSING:
        return "nothing"
    if kind in _BY_VALUE:
        return f"{kind.__name__} {value!r}"
    if isinstance(value, types.CodeType):
        return f"code {value.co_name} {_code(value)}"
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        strides = value.stride() if value.layout is torch.strided else value.layout
        grad = " requires_grad" if value.requires_grad else ""
        return f"{kind.__name__} {dtype} {tuple(value.shape)} {strides} {value.device}{grad}"
    if isinstance(value, enum.Enum):
        return f"{class_name(kind)}.{value.name} {inner(value.value, above)}"
    if isinstance(value, type):
        return f"class {class_name(value)}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, ContextVar):  # what it says is a fact of its own
        return f"ContextVar {value.name}"
    if isinstance(value, re.Pattern):
        return inner((value.pattern, value.flags), above)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return inner((value.func, value.args, value.keywords), above)
    if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, _CONTAINERS):
        said = inner(value.__self__, above)
        return None if said is None else f"{value.__name__} of {said}"
    if isinstance(value, (*_VIEWS, *_WRAPPERS)):  # what is in it has a print of its own
        return kind.__name__
    if isinstance(value, _FUNCTIONS):
        name = getattr(value, "__qualname__", kind.__name__)
        return f"{kind.__name__} {getattr(value, '__module__', None)}.{name}"
    if isinstance(value, _CONTAINERS):
        if id(value) in above:
            return "itself"
        return _container(value, lambda x: inner(x, (*above, id(value))))
    machinery = is_machinery(kind)
    if not machinery and (kind.__flags__ & HEAP_TYPE or isinstance(value, nn.Module)):
        own = _own_value(value)
        return f"a {class_name(kind)}{own}"  # what was read of it are facts
    text = repr(value)
    if " at 0x" not in text:
        return f"{class_name(kind)} {text}"
    return f"a {class_name(kind)}" if machinery else None


def _own_value(value: Any) -> str:
    """What an object is beside its attributes: a number of a class of one's own, a C object."""
    numbers: tuple[Any, ...] = _BY_VALUE
    for base in numbers:
        if isinstance(value, base):
            return f" {base.__repr__(value)}"
    root = type(value).__module__.partition(".")[0]
    # such as operator.attrgetter, which has no attributes to note
    if root in sys.stdlib_module_names and attributes_of(value) is None:
        text = repr(value)
        return "" if " at 0x" in text else f" {text}"
    return ""


def _container(value: Any, inner: Callable[[Any], str | None]) -> str | None:
    kind = type(value).__name__
    if isinstance(value, dict):
        rows = [(inner(k), inner(v)) for k, v in dict.items(value)]
        texts = [None if None in row else f"{row[0]}: {row[1]}" for row in rows]
    else:
        texts = [inner(x) for x in value]
    if None in texts:
        return None
    said = [text for text in texts if text is not None]
    if isinstance(value, (set, frozenset)):
        said.sort()
    text = f"{kind}[{', '.join(said)}]"
    # long ones by their digest: a vocabulary may be read
    return text if len(text) < 1000 else f"{kind} of {len(said)}, {_digest(text.encode())}"


def _code(code: types.CodeType) -> str:
    """A digest of what a function does; lines and files may change."""
    consts = [_code(x) if isinstance(x, types.CodeType) else print_of(x) for x in code.co_consts]
    said = (
        *(code.co_code.hex(), consts, code.co_names, code.co_varnames, code.co_freevars),
        *(code.co_cellvars, code.co_flags, code.co_argcount, code.co_kwonlyargcount),
        *(code.co_posonlyargcount, code.co_exceptiontable.hex()),
    )
    return _digest(repr(said).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _digest_of(x: Tensor) -> str:
    flat = [on_host(part).reshape(-1).view(torch.uint8) for part in strided_parts(x)]
    return _digest(b"".join(part.numpy().tobytes() for part in flat))


_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_VIEWS = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property, weakref.ref)
_BY_VALUE = (int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype)
_BY_VALUE += (torch.device, torch.layout, torch.memory_format, torch.Size, range, slice)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FUNCTIONS += (types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType)
_FUNCTIONS += (types.ClassMethodDescriptorType, types.GetSetDescriptorType)
_FUNCTIONS += (types.MemberDescriptorType,)
