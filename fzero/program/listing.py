"""A Program as text, and its collectives as rows."""

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.distributed.buckets import EXCHANGE, PACKS, UNPACKS, Bucket, buffer_of, unpack_into
from fzero.program.categories import INPUTS, summed
from fzero.program.foreign import Sending, sending
from fzero.program.graph import Part, output_node, phases, placeholders, tensors_of
from fzero.program.memory import constant_bytes, is_wait, lifetimes, peak_bytes, timeline
from fzero.program.origin import origin_of
from fzero.program.passes.rewrite import is_cheap
from fzero.program.placed import operator_of
from fzero.program.sections import Section, layer_of, pattern, runs, sections
from fzero.program.text import size


class _Row(NamedTuple):
    kind: str
    leaves: tuple[str, ...]
    bytes: int
    phase: str


class Collective(_Row):
    """One collective of a step: a row of (kind, leaves, bytes, phase), the rest as attributes.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"; or "broadcast", of a
            model function's own.
        leaves: names of the leaves that share it; () of a model function's own.
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
    return [
        Collective(
            sent.kind,
            _leaves(sent),
            sent.nbytes,
            node.meta.get("phase", phase),
            sent.wire_bytes,
            part.times,
            sent.group,
            sent.dtype,
        )
        for part in parts
        for node, phase in phases(part.graph).items()
        if (sent := sending(node)) is not None
    ]


def _leaves(sent: Sending) -> tuple[str, ...]:
    if not isinstance(sent, Bucket):
        return ()
    names = tuple(leaf.name for leaf in sent.leaves)
    return tuple(names[0].split(", ")) if sent.kind == EXCHANGE else names


def listing(parts: Iterable[Part], *, verbose: bool = False) -> str:
    """The Program as text: a line for each value, with the bytes it makes and the bytes alive.

    Args:
        parts: of the step.
        verbose: see `Program.listing`.
    """
    texts = [
        _verbose(part) if verbose else _Folded(part).lines(leaves=place == 0)
        for place, part in enumerate(parts)
    ]
    return "\n\n".join("\n".join(text) for text in texts)


def _head(program: Part) -> Iterator[str]:
    times = f" x {program.times} micro-batches" if program.times > 1 else ""
    yield f"program {program.name}{times}: peak {size(peak_bytes(program))}"
    yield from (f"  # {line}" for line in program.log)
    beside = summed((row.bytes, row.category) for row in program.resident if row.bytes)
    for category, nbytes in beside.items():
        yield f"  beside: {category}, {size(nbytes)}"


def _verbose(program: Part) -> Iterator[str]:
    yield from _head(program)
    phase = None
    of = phases(program.graph)
    names = iter(program.inputs)
    constant = constant_bytes(program)
    born = lifetimes(program.graph)[0]
    for node, alive in zip(program.graph.nodes, timeline(program.graph), strict=True):
        if node.op == "placeholder":
            yield f"  {node.name}: {_type(node)} = input {next(names, '')}"
            continue
        if of[node] != phase:
            phase = of[node]
            yield f"  {phase}:"
        made = _columns(sum(born.get(node, {}).values()), alive + constant)
        if node.op == "output":
            yield f"  {_BLANK}return {', '.join(map(str, node.args[0]))}"  # pyright: ignore
        else:
            yield f"  {made}{node.name}: {_type(node)} = {_call(node, str)}{_comment(node)}"


def _comment(node: fx.Node) -> str:
    origin = origin_of(node)
    where = f"{origin.file.replace(chr(92), '/').rpartition('/')[2]}:{origin.line}"
    said = [x for x in (origin.module, where if origin.file else "") if x]
    return f"    # {', '.join(said)}" if said else ""


def _columns(made: int, alive: int) -> str:
    return f"{size(made) if made else '':>11}{size(alive):>11}  "


_BLANK = " " * len(_columns(0, 0))
_TITLES = f"{'made':>11}{'alive':>11}"


class _Folded:
    """A listing that leaves out what repeats: layers that are alike, views, parts of buckets."""

    def __init__(self, program: Part) -> None:
        self.program = program
        self.of = phases(program.graph)
        self.constant = constant_bytes(program)
        self.alive = dict(zip(program.graph.nodes, timeline(program.graph), strict=True))
        self.peak = max(self.alive.values(), default=0)
        self.born = {node: sum(made.values()) for node, made in lifetimes(program.graph)[0].items()}
        self.names = dict(zip(placeholders(program.graph), program.inputs, strict=False))

    def lines(self, *, leaves: bool) -> Iterator[str]:
        """The listing; with `leaves` the parameters are told apart by name."""
        yield from _head(self.program)
        yield from self._inputs(leaves)
        body = [x for x in self.program.graph.nodes if x.op in ("call_function", "get_attr")]
        for phase, nodes in groupby(body, key=self.of.__getitem__):
            yield f"  {phase}:"
            yield f"  {_TITLES}"
            for run in runs(sections(nodes), self._key):
                for section in run.first:
                    yield from self._section(section)
                if run.more:
                    yield self._more(run.first, run.more)
        yield from self._results()

    def _inputs(self, leaves: bool) -> Iterator[str]:
        """Inputs of a category share a line; parameters those that differ only in numbers."""
        program = self.program
        categories = (*program.input_categories, *[INPUTS] * len(program.inputs))
        groups: dict[tuple[str, tuple[str, str]], list[tuple[str, int]]] = {}
        for (node, name), category in zip(self.names.items(), categories, strict=False):
            nbytes = sum(x.nbytes for x in tensors_of(node))
            apart = leaves or category == INPUTS
            alike = (pattern(name), _type(node)) if apart else ("", "tensor")
            groups.setdefault((category, alike), []).append((name, nbytes))
        yield "  inputs:"
        for (category, (alike, kind)), members in groups.items():
            nbytes = sum(n for _, n in members)
            first, many = members[0][0], len(members) > 1
            text = f"{alike}: {len(members)} x {kind}" if many else f"{first}: {kind}"
            if many and not alike:
                text = f"{first}, ... {len(members)} in all"
            yield f"  {size(nbytes):>11}{'':>13}{text}    # {category}"

    def _section(self, section: Section) -> Iterator[str]:
        if section.layer:
            yield f"  {_BLANK}{section.layer}:"
        for node in section.nodes:
            if text := self._statement(node):
                made, alive = self._bytes(node)
                peak = "    <- peak" if alive == self.peak else ""
                at = "  " if section.layer else ""
                yield f"  {_columns(made, alive + self.constant)}{at}{text}{peak}"

    def _bytes(self, node: fx.Node) -> tuple[int, int]:
        """Bytes made and alive, with those of the nodes that its line stands for."""
        together = [node, *_hidden_with(node)]
        made = sum(self.born.get(x, 0) for x in together)
        return made, max(self.alive[x] for x in together)

    def _statement(self, node: fx.Node) -> str:
        """The text of a node, or "" if another line says it."""
        if "bucket" in node.meta:
            bucket: Bucket = node.meta["bucket"]
            there = ", in place" if bucket.over else ""
            return f"{node.name} = launch {bucket!r}, {size(bucket.nbytes)}{there}"
        if is_wait(node) and _launched(node):
            return f"wait {self._shown(node)}"
        if _is_packed(node) or _is_there(node) or self._is_inlined(node):
            return ""
        inner = origin_of(node).module
        inner = inner.removeprefix(layer_of(inner)).removeprefix(".")
        call = _call(node, self._shown)
        call = call if len(call) <= _WIDTH else f"{call[:_WIDTH]} ..."
        return f"{node.name}: {_type(node)} = {call}" + (f"    # {inner}" if inner else "")

    def _is_inlined(self, node: fx.Node) -> bool:
        """Whether a node makes no memory and is seen where it is read."""
        return is_cheap(node) and not self.born.get(node) and bool(node.users)

    def _shown(self, node: fx.Node) -> str:
        """A value as an operand."""
        if node in self.names:
            return self.names[node]
        if node.target is operator.getitem:
            source: Any = node.args[0]
            if source.target in UNPACKS:
                bucket = source.args[1]
                leaf = bucket.leaves[node.args[1]].name
                return leaf if bucket.gathers else f"{leaf}.sum"
            return f"{self._shown(source)}[{node.args[1]}]"
        if _is_packed(node) and node.users:
            return self._shown(node.all_input_nodes[0])
        if is_wait(node) and _launched(node):
            return node.all_input_nodes[0].name
        if self._is_inlined(node):
            return f"{_operator(node)}({self._shown(node.all_input_nodes[0])})"
        return node.name

    def _key(self, section: Section) -> Hashable:
        """What is the same of sections that are alike: all but names and collectives."""
        nodes = [
            x
            for x in section.nodes
            if not (_is_packed(x) or x.target is buffer_of or "bucket" in x.meta or is_wait(x))
        ]
        return (
            pattern(section.layer),
            *((str(operator_of(x)[0]), _type(x), pattern(origin_of(x).module)) for x in nodes),
        )

    def _more(self, first: Sequence[Section], more: Sequence[Section]) -> str:
        nodes = [x for section in more for x in section.nodes]
        alive = max(self.alive[x] for x in nodes)
        what = "this" if len(first) == 1 else f"these {len(first)}"
        text = f"... {len(more) // len(first)} more like {what}"
        text += (
            f" ({more[0].layer} to {more[-1].layer})" if len(more) > 1 else f" ({more[0].layer})"
        )
        launched = Counter(x.meta["bucket"].kind for x in nodes if "bucket" in x.meta)
        if launched:
            text += ", with " + ", ".join(f"{n} {kind}" for kind, n in launched.items())
        made = sum(self.born.get(x, 0) for x in nodes)
        peak = "    <- peak" if alive == self.peak else ""
        return f"  {_columns(made, alive + self.constant)}{text}{peak}"

    def _results(self) -> Iterator[str]:
        program = self.program
        categories = (*program.output_categories, *[""] * len(program.outputs))
        results: Any = output_node(program.graph).args[0]
        named = zip(program.outputs, categories, results, strict=False)
        rows = [(category, name if category else self._shown(x)) for name, category, x in named]
        said = []
        for category, members in groupby(rows, key=lambda row: row[0]):
            names = [name for _, name in members]
            many = category and len(names) > 1
            said += [f"{len(names)} {category}"] if many else names
        yield f"  return {', '.join(said)}"


_WIDTH = 90  # letters of a call that are shown


def _is_packed(node: fx.Node) -> bool:
    """Whether a node fills a bucket's buffer, or takes it apart."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target in UNPACKS
    return node.target in PACKS or node.target in UNPACKS


def _launched(node: fx.Node) -> bool:
    return "bucket" in node.all_input_nodes[0].meta


def _hidden_with(node: fx.Node) -> list[fx.Node]:
    """The nodes that have no line of their own, but this one's."""
    if "bucket" in node.meta:
        return node.all_input_nodes
    if is_wait(node) and _launched(node):
        return [x for x in node.users if x.target in UNPACKS or _is_there(x)]
    return []


def _is_there(node: fx.Node) -> bool:
    """Whether a node would write gathered leaves where they are already."""
    return node.target is unpack_into and node.args[1].over  # pyright: ignore


def _call(node: fx.Node, show: Any) -> str:
    if bucket := node.meta.get("bucket"):
        return f"{bucket!r}({', '.join(map(show, node.all_input_nodes))})"
    target, given = operator_of(node)
    arguments = [_short(x, show) for x in given]
    arguments += [
        f"{k}={_short(x, show)}" for k, x in node.kwargs.items() if k not in _SEEN_ELSEWHERE
    ]
    overload = isinstance(target, torch._ops.OpOverload)
    name = str(target).removesuffix(".default") if overload else _operator(node)
    there = f" in {show(node.args[0])}" if target is not node.target else ""
    return f"{name}({', '.join(arguments)}){there}"


# in the result's type, or the same; a generator is a function of the site
_SEEN_ELSEWHERE = ("dtype", "device", "layout", "pin_memory")


def _operator(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return getattr(target, "__name__", str(target))


def _short(value: object, show: Any) -> str:
    if isinstance(value, fx.Node):
        return show(value)
    if isinstance(value, (list, tuple)):
        if len(value) > 4 and isinstance(value[0], fx.Node):
            return f"[{show(value[0])}, ... {len(value)} in all]"
        return f"[{', '.join(_short(x, show) for x in value)}]"
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
