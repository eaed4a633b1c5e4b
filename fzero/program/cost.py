"""What a step costs: FLOPs, bytes moved in memory, bytes sent, and an estimate of its time.

FLOPs are counted by `torch.utils.flop_counter`: matrix products, convolutions and attention, two
for a multiplication and an addition; other operators count none, and their cost is the bytes they
move. A masked half of attention counts in full, as there; its time is that of the other half.

An operator takes the longer of its FLOPs at the hardware's rate and its bytes at the memory's
bandwidth, and an overhead; operators run one after another (the roofline model). A collective takes
a latency for each hop of its ring and its bytes at the link's bandwidth (the alpha-beta model); it
runs beside the operators from its launch, after those of its lane that were launched before, and
what waits for it stands still until it is done. Lanes share the links: see [Note: lanes share
links] in `fzero.program.links`. So do copies to the host and back, each way on a link of its own.
See `fzero.program.hardware`.

References: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from fzero.distributed.buckets import PACKS, Bucket, buffer_of
from fzero.program.foreign import sending
from fzero.program.graph import Part, dense_of, is_again, phases, tensors_of, written_operands
from fzero.program.hardware import Hardware
from fzero.program.links import Flight, Links, Load
from fzero.program.memory import is_wait, storages
from fzero.program.origin import origin_of
from fzero.program.placed import operator_of
from fzero.program.sections import pattern
from fzero.program.text import count, seconds, size, table
from fzero.program.transfers import way_of


class NodeCost(NamedTuple):
    """What one node costs.

    Args:
        flops: of matrix products, convolutions, attention.
        bytes_moved: that it reads and writes in this rank's memory.
        sent: bytes that this rank sends.
        seconds: estimated; of a collective, with its links for itself.
        crossed: bytes that it copies between this rank's device and its host's memory.
    """

    flops: int
    bytes_moved: int
    sent: int
    seconds: float
    crossed: int = 0


def node_cost(node: fx.Node, hardware: Hardware) -> NodeCost:
    """What a node costs; nothing if it makes a view, or waits."""
    sent = sending(node)
    if sent is not None:
        return NodeCost(0, 0, sent.wire_bytes, hardware.send_time(sent))
    if way_of(node) is not None:
        (x,) = tensors_of(node)
        return NodeCost(0, 0, 0, hardware.crossing_time(x.nbytes), x.nbytes)
    nbytes = _bytes_moved(node)
    if not nbytes:
        return NodeCost(0, 0, 0, 0.0)
    flops = _flops(node)
    dtype = next((x.dtype for x in tensors_of(node)), None)
    work, attention = _work(node, flops, hardware)
    time = hardware.compute_time(work, nbytes, dtype, attention=attention)
    return NodeCost(flops, nbytes, 0, time)


def _work(node: fx.Node, flops: int, hardware: Hardware) -> tuple[int, bool]:
    """FLOPs that a node has to do, which are not those that are counted, and whether it attends."""
    target: Any = operator_of(node)[0]
    if not flops:
        return 0, False
    if target.overloadpacket in _PRODUCTS:
        return int(flops * hardware.waste(tensors_of(node)[0].shape)), False
    if "attention" not in target._schema.name:
        return flops, False
    given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
    causal = (given | node.kwargs).get("is_causal", False)
    return flops // 2 if causal else flops, True  # a kernel leaves out what is masked


def _bytes_moved(node: fx.Node) -> int:
    # a buffer takes no time: what is put into it does
    if node.op != "call_function" or node.target in (operator.getitem, buffer_of) or is_wait(node):
        return 0
    if node.target in PACKS and len(node.args) > 2:
        missing = _packed(node)
        return 2 * sum(x.nbytes for operand in missing for x in dense_of(operand))
    inputs = [x for x in node.all_input_nodes if x.target is not buffer_of]
    read = storages(inputs)
    made = [x for x in dense_of(node) if x.untyped_storage()._cdata not in read]
    written = [x for operand in written_operands(node) for x in dense_of(operand)]
    if not made and not written and node.meta.get("val") is not None:  # a view
        return 0
    output = sum(x.nbytes for x in [*made, *written])
    operands = [x for operand in inputs for x in dense_of(operand)]
    if getattr(node.target, "overloadpacket", None) in _LOOKUPS:  # reads the rows that it returns
        operands = operands[1:]
        return 2 * output + sum(x.nbytes for x in operands)
    return output + sum(x.nbytes for x in operands)


def _packed(pack: fx.Node) -> list[fx.Node]:
    """What is copied, of what goes into a buffer that is there: the rest lies in it."""
    operands: list[fx.Node] = list(pack.args[0])  # pyright: ignore
    where, *rest = pack.args[2:]
    if rest:  # results, some of which were computed into it: see `place`
        missing: Any = rest[0]
        return [operands[i] for i in missing]
    there = storages(where)  # pyright: ignore
    return [x for x in operands if not storages([x]).keys() <= there.keys()]


_aten = torch.ops.aten
_LOOKUPS = (_aten.embedding, _aten.index_select, _aten.gather, _aten.index)
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)


def _flops(node: fx.Node) -> int:
    target, given = operator_of(node)
    packet: Any = getattr(target, "overloadpacket", None)
    formula: Callable[..., int] | None = flop_registry.get(_ALIKE.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = map_arg((given, node.kwargs), lambda x: x.meta.get("val"))
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))  # pyright: ignore


# operators that torch's counter doesn't know, and what has the same arguments and the same count
_FLASH = "_scaled_dot_product_flash_attention"
_ALIKE: Mapping[Any, Any] = MappingProxyType(
    {
        getattr(_aten, f"{_FLASH}_for_cpu{way}"): getattr(_aten, f"{_FLASH}{way}")
        for way in ("", "_backward")
    }
)


# ------------------------------------------------------------------------------- on a time line
class Span(NamedTuple):
    """What one node does, and when.

    Args:
        node: of the Program's graph.
        lane: "compute", the lane that it sends in (`Bucket.lane`), or "to host" or "from host".
        start: seconds from the start of the part.
        end: the same.
        cost: of the node.
        phase: "forward", "backward" or "update".
        waits: whether the node only waits for a collective or a copy.
    """

    node: fx.Node
    lane: str
    start: float
    end: float
    cost: NodeCost
    phase: str
    waits: bool = False


COMPUTE = "compute"


def spans(part: Part, hardware: Hardware) -> Iterator[Span]:
    """Each node of a part's graph on the estimated time line of one run; see the module's text."""
    now = 0.0
    links = Links()
    flights: dict[fx.Node, Flight] = {}
    rows: list[tuple[fx.Node, NodeCost, str, float, float]] = []
    for node in part.graph.nodes:
        if node.op != "call_function":
            continue
        cost, lane = node_cost(node, hardware), lane_of(node)
        start = now
        if lane is not None:
            flights[node] = links.launch(lane, _load(node, hardware), now)
        elif is_wait(node):
            awaited = [flights[x] for x in node.all_input_nodes if x in flights]
            now = max([now, *map(links.landing, awaited)])
        else:
            now += cost.seconds
        rows.append((node, cost, lane or COMPUTE, start, now))
    links.finish()
    phase = phases(part.graph)
    for node, cost, lane, start, end in rows:
        # when something in flight ends is known only after what is launched later
        if flight := flights.get(node):
            start, end = flight.start, flight.end
        yield Span(node, lane, start, end, cost, phase[node], is_wait(node))


def lane_of(node: fx.Node) -> str | None:
    """The lane that a node sends in; None if it does not."""
    sent = sending(node)
    return way_of(node) if sent is None else sent.lane


def _load(node: fx.Node, hardware: Hardware) -> Load:
    sent = sending(node)
    if sent is not None:
        return hardware.load(sent)
    (x,) = tensors_of(node)
    return hardware.crossing(x.nbytes, way_of(node) or "")


# ----------------------------------------------------------------------------------- as a report
class CostRow(NamedTuple):
    """What one module's part of a phase costs in a step.

    Args:
        phase: "forward", "backward" or "update".
        module: name; a collective counts for the module that has all its leaves.
        flops: of matrix products, convolutions, attention.
        bytes_moved: in this rank's memory.
        sent: bytes that this rank sends, by kind of collective.
        seconds: estimated, of the operators alone.
        crossed: bytes copied between the device and its host's memory.
    """

    phase: str
    module: str
    flops: int
    bytes_moved: int
    sent: Mapping[str, int]
    seconds: float
    crossed: int = 0

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0


@dataclass(frozen=True)
class Cost:
    """What a step costs on one rank, micro-batches and update together.

    Args:
        rows: by phase and module, in the order in which they run.
        hardware: that times are estimated for.
        seconds: estimated, of the step.
        exposed: of these, seconds in which a rank only waits for collectives, or for what comes
            from its host or goes there.
        recomputed: FLOPs of a step that are done a second time, to hold less.
    """

    rows: tuple[CostRow, ...]
    hardware: Hardware
    seconds: float
    exposed: float
    recomputed: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of a step."""
        return sum(row.flops for row in self.rows)

    @property
    def bytes_moved(self) -> int:
        """Bytes that a step reads and writes in this rank's memory."""
        return sum(row.bytes_moved for row in self.rows)

    @property
    def sent(self) -> Mapping[str, int]:
        """Bytes that this rank sends, by kind of collective."""
        return _added(row.sent for row in self.rows)

    @property
    def crossed(self) -> int:
        """Bytes that a step copies between this rank's device and its host's memory."""
        return sum(row.crossed for row in self.rows)

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    def by_module(self, depth: int | None = None) -> tuple[CostRow, ...]:
        """Rows of modules, all phases together.

        Args:
            depth: how many parts of a module's name to tell apart; None: all.
        """
        named = (
            row._replace(phase="", module=".".join(row.module.split(".")[:depth]))
            for row in self.rows
        )
        return _merged(named)

    def __str__(self) -> str:
        head = (
            f"{count(self.flops)} FLOP, {size(self.bytes_moved)} moved, "
            f"{size(sum(self.sent.values()))} sent, {self.intensity:.3g} FLOP/byte"
        )
        if self.recomputed:
            head += f", {count(self.recomputed)} FLOP of them a second time"
        if self.crossed:
            head += f", {size(self.crossed)} to the host and back"
        waiting = f"{seconds(self.exposed)} of them waiting for collectives"
        lines = [head, f"{seconds(self.seconds)} estimated, {waiting}; on {self.hardware.name}"]
        lines += table([[kind, size(n)] for kind, n in self.sent.items()], "lr")
        rows = [["phase", "module", "FLOP", "moved", "FLOP/byte", "sent", "time"]]
        rows += [
            [
                row.phase,
                row.module or "-",
                count(row.flops),
                size(row.bytes_moved),
                f"{row.intensity:.3g}",
                size(sum(row.sent.values())),
                seconds(row.seconds),
            ]
            for row in _folded(self.rows)
        ]
        return "\n".join([*lines, *table(rows, "llrrrrr")])


def cost(parts: Iterable[Part], hardware: Hardware) -> Cost:
    """What a step costs."""
    rows: list[CostRow] = []
    total = exposed = 0.0
    recomputed = 0
    for part in parts:
        end = 0.0
        for span in spans(part, hardware):
            of = sending(span.node)
            carried = of if isinstance(of, Bucket) else _handled(span.node)
            module = _module_of(carried) if carried else origin_of(span.node).module
            sent = {} if of is None else {of.kind: span.cost.sent * part.times}
            computes = span.lane == COMPUTE and not span.waits
            spent = span.cost.seconds * part.times if computes else 0.0
            crossed = span.cost.crossed * part.times
            flops, moved = span.cost.flops * part.times, span.cost.bytes_moved * part.times
            recomputed += flops if is_again(span.node) else 0
            rows.append(CostRow(span.phase, module, flops, moved, sent, spent, crossed))
            end = max(end, span.end)
            exposed += (span.end - span.start) * part.times if span.waits else 0.0
        total += end * part.times
    return Cost(_merged(rows), hardware, total, exposed, recomputed)


def _handled(node: fx.Node) -> Bucket | None:
    """The bucket that a node fills or takes apart."""
    return next((x for x in node.args if isinstance(x, Bucket)), None)


def _module_of(bucket: Bucket) -> str:
    """The innermost module that has all leaves of a bucket, as far as their names tell."""
    paths = [leaf.name.split(".")[:-1] for leaf in bucket.leaves]
    common = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common)


def _merged(rows: Iterable[CostRow]) -> tuple[CostRow, ...]:
    found: dict[tuple[str, str], CostRow] = {}
    for row in rows:
        key = (row.phase, row.module)
        old = found.get(key)
        if old is not None:
            row = CostRow(
                *key,
                old.flops + row.flops,
                old.bytes_moved + row.bytes_moved,
                _added([old.sent, row.sent]),
                old.seconds + row.seconds,
                old.crossed + row.crossed,
            )
        found[key] = row
    return tuple(row for row in found.values() if row.bytes_moved or row.sent or row.crossed)


def _added(tables: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total: dict[str, int] = {}
    for one in tables:
        for kind, n in one.items():
            total[kind] = total.get(kind, 0) + n
    return total


def _folded(rows: Iterable[CostRow]) -> tuple[CostRow, ...]:
    """Rows of modules that differ in numbers of their names alone, added up."""
    rows = list(rows)
    alike: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        alike.setdefault((row.phase, pattern(row.module)), set()).add(row.module)

    def named(row: CostRow) -> CostRow:
        key = (row.phase, pattern(row.module))
        many = len(alike[key])
        return row._replace(module=f"{key[1]} ({many})" if many > 1 else row.module)

    return _merged(map(named, rows))
