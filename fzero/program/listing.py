"""A Program as text, and its collectives as rows."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.program.graph import Part, phases
from fzero.program.memory import peak_bytes, timeline


class _Row(NamedTuple):
    kind: str
    leaves: tuple[str, ...]
    bytes: int
    phase: str


class Collective(_Row):
    """One collective of a step: a row of (kind, leaves, bytes, phase), the rest as attributes.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        leaves: names of the leaves that share it.
        bytes: of the full side, without padding.
        phase: "forward", "backward" or "update".
        wire_bytes: bytes that each rank sends, bandwidth-optimally.
        times: how often a step runs it.
        group: name of the process group it runs over.
        dtype: that it travels in.

    Examples:
        >>> row = Collective("all_gather", ("w",), 64, "forward", 32, dtype=torch.float32)
        >>> kind, leaves, nbytes, phase = row
        >>> kind, leaves, nbytes, phase, row.wire_bytes
        ('all_gather', ('w',), 64, 'forward', 32)
    """

    wire_bytes: int
    times: int
    group: str
    dtype: torch.dtype | None

    def __new__(
        cls,
        kind: str,
        leaves: tuple[str, ...],
        bytes: int,
        phase: str,
        wire_bytes: int,
        times: int = 1,
        group: str = "",
        dtype: torch.dtype | None = None,
    ) -> "Collective":
        # four items, which users unpack; what was added since are attributes
        row = super().__new__(cls, kind, leaves, bytes, phase)
        row.wire_bytes, row.times, row.group, row.dtype = wire_bytes, times, group, dtype
        return row

    def __getnewargs__(self) -> tuple[Any, ...]:  # what pickle and copy make it of
        return (*self, self.wire_bytes, self.times, self.group, self.dtype)

    def __repr__(self) -> str:
        rest = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{super().__repr__()[:-1]}, {rest})"


def collectives(parts: Iterable[Part]) -> list[Collective]:
    """Every collective of a step, in the order it is launched."""
    rows = []
    for part in parts:
        for node in part.graph.nodes:
            if bucket := node.meta.get("bucket"):
                names = tuple(leaf.name for leaf in bucket.leaves)
                rows.append(
                    Collective(
                        bucket.kind,
                        names,
                        bucket.nbytes,
                        node.meta["phase"],
                        bucket.wire_bytes,
                        part.times,
                        bucket.group,
                        bucket.dtype,
                    )
                )
    return rows


def listing(parts: Iterable[Part]) -> str:
    """The Program as a listing: one line a node, with its type and the bytes alive there."""
    return "\n\n".join("\n".join(_part(part)) for part in parts)


def _part(program: Part) -> Iterator[str]:
    times = f" x {program.times} micro-batches" if program.times > 1 else ""
    yield f"program {program.name}{times}: peak {_size(peak_bytes(program))}"
    yield from (f"  # {line}" for line in program.log)
    phase = None
    of = phases(program.graph)
    names = iter(program.inputs)
    for node, alive in zip(program.graph.nodes, timeline(program.graph), strict=True):
        if node.op == "placeholder":
            yield f"  {node.name}: {_type(node)} = input {next(names, '')}"
            continue
        if of[node] != phase:
            phase = of[node]
            yield f"  {phase}:"
        if node.op == "output":
            yield f"    return {', '.join(map(str, node.args[0]))}"  # pyright: ignore
        else:
            yield f"    {node.name}: {_type(node)} = {_call(node)}    # {_size(alive)}"


def _call(node: fx.Node) -> str:
    target = node.target
    name = str(target) if isinstance(target, torch._ops.OpOverload) else _name(target)
    if bucket := node.meta.get("bucket"):
        return f"{bucket!r}({', '.join(map(str, node.all_input_nodes))})"
    arguments = [_short(x) for x in node.args]
    arguments += [f"{k}={_short(x)}" for k, x in node.kwargs.items() if k not in _SEEN_ELSEWHERE]
    return f"{name}({', '.join(arguments)})"


_SEEN_ELSEWHERE = ("dtype", "device", "layout", "pin_memory")  # in the result's type, or the same


def _name(target: object) -> str:
    return getattr(target, "__name__", str(target))


def _short(value: object) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 4 and isinstance(value[0], fx.Node):
        return f"[{value[0]}, ... {len(value)} in all]"
    return str(value)


_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b"}


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"
    return f"({len(value)})" if isinstance(value, (list, tuple)) else "-"


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _DTYPES.get(letters, letters) + name[len(letters) :]


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024  # pyright: ignore
    return f"{nbytes:.4g} GiB"
