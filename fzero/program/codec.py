"""A Program as plain data, and back: [Note: saved Programs].

[Note: saved Programs] What is written down of a Program is what it is a value of: its nodes, their
operators by name, arguments, the form of every value and the storage that it is on, promises and
origins. Operators are looked up by name when it is read, functions in one table, classes of records
in another: nothing in a file is code, and nothing else than what a Program can hold is made of it.
What has no form as data, such as an island's Python, is refused when it is written.
"""

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fzero.distributed.buckets import PACKS, UNPACKS, Bucket, buffer_of, unpack_into
from fzero.distributed.mesh import Axis
from fzero.errors import FzeroError
from fzero.functional.remat import Region
from fzero.layout import Home, LeafLayout
from fzero.program.dynamic import DYNAMIC
from fzero.program.foreign import FOREIGN, Foreign
from fzero.program.graph import AGAIN, Held, Part
from fzero.program.origin import Origin
from fzero.program.placed import placed
from fzero.program.promises import PROMISE, STANDS_FOR, TURN, Promise, Source
from fzero.program.sites import SITE, WRITTEN_OUT, generator, seed

Json = Any
Constants = Callable[[str, Any], Json]
"""From a constant's name and the tensor to what stands for it."""


def encoded(part: Part, fields: Mapping[str, Any], constants: Constants) -> Json:
    """A Program as what `json` takes.

    Args:
        part: the Program.
        fields: what else it has, by name: plain data and records.
        constants: says what stands for a tensor that it closes over.

    Raises:
        FzeroError: it holds what has no form as data.
    """
    return _Encoder(part, constants).program(fields)


def decoded(data: Json, constant: Callable[[Json], Tensor]) -> dict[str, Any]:
    """The fields of a Program.

    Args:
        data: from `encoded`.
        constant: gives the tensor that something stands for.

    Raises:
        KeyError, ValueError, TypeError, AttributeError: it is no such data, or names an operator
            that is not there.
    """
    return _Decoder(data, constant).program()


# ------------------------------------------------------------------------- what may be in a file
_RECORDS = {
    cls.__name__: cls
    for cls in (Axis, Bucket, Foreign, Held, Home, LeafLayout, Origin, Region, Source)
}
_CALLED = (
    *(operator.getitem, unpack_into, seed, generator, buffer_of, placed),
    *(PACKS | UNPACKS),
)
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {fn.__name__: fn for fn in _CALLED}
    | {f"drawn {target}": fn for target, fn in WRITTEN_OUT.items() if callable(fn)}
)
"""What a node may call that is no operator, by its name in a file."""

_NAMES = {id(fn): name for name, fn in FUNCTIONS.items()}
_META = ("custom", "bucket", FOREIGN, "phase", "segment", SITE, AGAIN, TURN, PROMISE, STANDS_FOR)
_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class _Encoder:
    def __init__(self, part: Part, constants: Constants) -> None:
        self.part, self.constants = part, constants
        self.nodes: dict[fx.Node, int] = {}
        self.forms: dict[Any, int] = {}
        self.storages: dict[int, int] = {}
        self.of: dict[int, str] = {id(x): name for name, x in part.constants.items()}
        self.at: str = ""

    def program(self, fields: Mapping[str, Any]) -> Json:
        # what was read and then not used, as a module's buffers may be, is nothing that it rests on
        read = {node.target for node in self.part.graph.nodes if node.op == "get_attr"}
        there = {name: x for name, x in self.part.constants.items() if name in read}
        constants = {name: self.constants(name, x) for name, x in there.items()}
        nodes = [self.node(node) for node in self.part.graph.nodes]
        return {
            "fields": {name: self.value(x) for name, x in fields.items()},
            "constants": constants,
            "forms": [list(form) for form in self.forms],
            "nodes": nodes,
        }

    def node(self, node: fx.Node) -> Json:
        self.at = f"{node.name} of the Program {self.part.name!r}"
        target = node.target if isinstance(node.target, str) else self.target(node.target)
        kept = {key: node.meta[key] for key in _META if key in node.meta}
        if "custom" in kept:  # symbols are of this process
            kept["custom"] = {key: x for key, x in kept["custom"].items() if key != DYNAMIC}
        meta = {key: self.value(x) for key, x in kept.items()}
        if "val" in node.meta:
            meta["val"] = self.value(node.meta["val"])
        row = [node.op, node.name, target, self.value(node.args), self.value(node.kwargs), meta]
        self.nodes[node] = len(self.nodes)
        return row

    def target(self, target: Any) -> Json:
        if isinstance(target, torch._ops.OpOverload):
            return {"op": [target._schema.name, target._overloadname]}
        if id(target) not in _NAMES:
            raise self.refused(f"it calls {target}, which is Python and no operator")
        return {"fn": _NAMES[id(target)]}

    def value(self, x: Any) -> Json:
        if x is None or type(x) in (bool, int, float, str):
            return x
        if isinstance(x, fx.Node):
            return {"n": self.nodes[x]}
        if type(x) is list:
            return [self.value(y) for y in x]
        if type(x) is Promise:
            # of what is read only the form counts, not which storage it was on
            reads = [[self.form(y, shared=True) for y in row] for row in x.reads]
            rest = map(self.value, (x.number, x.what, x.sources))
            return {"promise": [*rest, reads, list(x.writes)]}
        if type(x).__name__ in _RECORDS and type(x) is _RECORDS[type(x).__name__]:
            values = x if isinstance(x, tuple) else [getattr(x, f) for f in x.__dataclass_fields__]
            return {type(x).__name__: [self.value(y) for y in values]}
        if type(x) in (tuple, torch.Size, fx.immutable_collections.immutable_list):
            return {
                "t" if type(x) is not fx.immutable_collections.immutable_list else "l": [
                    self.value(y) for y in x
                ]
            }
        if isinstance(x, dict):
            return {"d": [[self.value(k), self.value(v)] for k, v in x.items()]}
        if isinstance(x, (set, frozenset)):
            return {"set": sorted(map(self.value, x))}
        if isinstance(x, _TORCH):
            return {"torch": str(x).removeprefix("torch.")}
        if isinstance(x, torch.device):
            return {"device": str(x)}
        if isinstance(x, slice):
            return {"slice": [self.value(y) for y in (x.start, x.stop, x.step)]}
        if isinstance(x, complex):
            return {"complex": [x.real, x.imag]}
        if isinstance(x, torch._ops.OpOverload):
            return self.target(x)
        if isinstance(x, Tensor):
            return self.tensor(x)
        raise self.refused(f"it holds a {type(x).__name__}")

    def tensor(self, x: Tensor) -> Json:
        if not isinstance(x, FakeTensor):
            if id(x) not in self.of:
                raise self.refused("it holds a tensor that is no constant of the Program")
            return {"k": self.of[id(x)]}
        if x.layout is not torch.strided:
            raise self.refused(f"it makes a tensor of layout {x.layout}")
        return {"x": self.form(x)}

    def form(self, x: Tensor, *, shared: bool = False) -> int:
        """The number of a fake tensor, or of any like it."""
        dtype = str(x.dtype).removeprefix("torch.")
        form: tuple[Any, ...] = (dtype, tuple(x.shape), x.stride(), str(x.device))
        if not shared:
            storage = x.untyped_storage()
            key = self.storages.setdefault(storage._cdata, len(self.storages))
            form += (x.storage_offset(), storage.nbytes(), key)
        return self.forms.setdefault(form, len(self.forms))

    def refused(self, why: str) -> FzeroError:
        return FzeroError(
            f"{self.at} can't be saved: {why}, and a file holds data alone. Programs with opaque "
            "parts are recorded anew by each process; keep those parts out of what is saved."
        )


class _Decoder:
    def __init__(self, data: Json, constant: Callable[[Json], Tensor]) -> None:
        self.data = data
        self.constants = {name: constant(x) for name, x in data["constants"].items()}
        self.nodes: list[fx.Node] = []
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.storages: dict[int, Tensor] = {}
        self.fakes: list[Tensor | None] = [None] * len(data["forms"])

    def program(self) -> dict[str, Any]:
        graph = fx.Graph()
        with self.mode, torch.no_grad():
            for row in self.data["nodes"]:
                self.nodes.append(self.node(graph, row))
            fields = {name: self.value(x) for name, x in self.data["fields"].items()}
        return {**fields, "graph": graph, "constants": self.constants}

    def node(self, graph: fx.Graph, row: Json) -> fx.Node:
        op, name, target, args, kwargs, meta = row
        where = target if isinstance(target, str) else self.target(target)
        if op == "output":
            node = graph.output(*self.value(args))
        else:
            node = graph.create_node(op, where, self.value(args), self.value(kwargs), name=name)
        if node.name != name:
            raise ValueError(f"node {name} would be called {node.name}")
        node.meta.update((key, self.value(x)) for key, x in meta.items())
        return node

    def target(self, data: Json) -> Callable[..., Any]:
        if "fn" in data:
            return FUNCTIONS[data["fn"]]
        name, overload = data["op"]
        space, _, name = name.partition("::")
        found = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
        if not isinstance(found, torch._ops.OpOverload):
            raise ValueError(f"{name} is no operator")
        return found

    def value(self, x: Json) -> Any:
        if not isinstance(x, (dict, list)):
            return x
        if isinstance(x, list):
            return [self.value(y) for y in x]
        ((kind, inner),) = x.items()
        if kind == "n":
            return self.nodes[inner]
        if kind == "x":
            return self.tensor(inner)
        if kind in ("t", "l"):
            return (tuple if kind == "t" else list)(self.value(y) for y in inner)
        if kind in _RECORDS:
            return _RECORDS[kind](*(self.value(y) for y in inner))
        if kind == "promise":
            number, what, sources, reads, writes = inner
            tensors = tuple([self.tensor(y) for y in row] for row in reads)
            rest = (tensors, self.value(sources), tuple(writes))
            return Promise(self.value(number), what, *rest)
        if kind in ("op", "fn"):
            return self.target(x)
        return self.rest(kind, inner)

    def rest(self, kind: str, inner: Json) -> Any:
        if kind == "d":
            return {self.value(k): self.value(v) for k, v in inner}
        if kind == "set":
            return frozenset(map(self.value, inner))
        if kind == "torch":
            found = getattr(torch, inner)
            if not isinstance(found, _TORCH):
                raise ValueError(f"torch.{inner} is no dtype")
            return found
        if kind == "device":
            return torch.device(inner)
        if kind == "slice":
            return slice(*map(self.value, inner))
        if kind == "complex":
            return complex(*inner)
        if kind == "k":
            return self.constants[inner]
        raise ValueError(f"{kind!r} is nothing that a Program holds")

    def tensor(self, number: int) -> Tensor:
        found = self.fakes[number]
        if found is None:
            found = self.fakes[number] = self.fake(*self.data["forms"][number])
        return found

    def fake(
        self,
        name: str,
        shape: list[int],
        stride: list[int],
        device: str,
        offset: int = 0,
        nbytes: int | None = None,
        storage: int | None = None,
    ) -> Tensor:
        dtype = getattr(torch, name)
        if storage is None:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if storage not in self.storages:
            if not offset:  # nearly all are alone on their storage
                x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
                if x.untyped_storage().nbytes() == nbytes:
                    self.storages[storage] = x
                    return x
            self.storages[storage] = torch.empty(nbytes, dtype=torch.uint8, device=device)  # pyright: ignore
        base = self.storages[storage]
        if base.dtype != dtype:
            flat = base.as_strided((base.untyped_storage().nbytes() // base.itemsize,), (1,), 0)
            base = flat.view(torch.uint8).view(dtype)
        return base.as_strided(shape, stride, offset)
