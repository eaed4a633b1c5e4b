"""What was recorded of each node, which passes must keep: [Note: promises].

[Note: promises] When a graph has been recorded, each node is given a promise: which values it
reads, told by the nodes that made them; how often each had been written over by then; which
operator it is, with its numbers. Copies of a node have its promise, so a value that is computed
again counts as the first. Views, casts, buckets and copies that only lay a value out anew are
looked through: passes move, merge and insert those. A value that was reduced over ranks says so,
hop by hop. One that was in the host's memory meanwhile is the same value. Fake tensors of what is
read are kept too, for shapes, dtypes and strides. `Program.verify` holds every node to its promise,
however many passes there were.
"""

import operator
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fzero.distributed.buckets import GATHER, KINDS, PACKS, UNPACKS, Bucket, buffer_of
from fzero.functional.memory import extent
from fzero.program.graph import (
    dense_of,
    is_op,
    operands,
    placeholders,
    tensors_of,
    written_operands,
)
from fzero.program.passes.rewrite import carried_by, is_cheap, is_gather, is_reduction
from fzero.program.placed import is_placed_cast, operator_of
from fzero.program.transfers import is_transfer

PROMISE = "promise"
STANDS_FOR = "stands_for"
"""The source of the value in whose place a user's pass has put a node."""
TURN = "turn"
"""Where a collective has its place among those of its graph."""


class Source(NamedTuple):
    """A value, told by who made it.

    Args:
        maker: number of the node; ("input", place) or ("leaf", name) of inputs and gathered leaves.
        part: of a node that makes several values, which.
        hops: reductions that the value went through since: (leaf, process group).
    """

    maker: Any
    part: Any = None
    hops: tuple[tuple[str, str], ...] = ()


class Promise(NamedTuple):
    """What was recorded of a node.

    Args:
        number: its own.
        what: operator and arguments that are no values.
        reads: fake tensors of each operand.
        sources: where each operand comes from.
        writes: how often the memory of each operand had been written over; of an input, how often
            that is done in all.
    """

    number: Any
    what: str
    reads: tuple[list[Tensor], ...]
    sources: tuple[Source, ...]
    writes: tuple[int, ...]


def note(graph: fx.Graph) -> None:
    """Give every node of a graph, as it was recorded, its promise. See [Note: promises]."""
    for place, (node, times) in enumerate(written(graph).items()):
        node.meta[PROMISE] = Promise(("input", place), "", (), (), (times,))
    for number, (node, writes) in enumerate(counted(graph)):
        if node.op == "placeholder":
            continue
        given = values_read(node)
        node.meta[PROMISE] = Promise(
            number,
            said(node),
            tuple(tensors_of(x) for x in given),
            tuple(source_of(x) for x in given),
            writes,
        )


def promise_of(node: fx.Node) -> Promise | None:
    """What was recorded of a node; None of one that a pass made."""
    return node.meta.get(PROMISE)


def inherit(pack: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Let what fills a bucket read what the collectives of single leaves read."""
    found = [promise for node in nodes if (promise := promise_of(node)) is not None]
    if len(found) == len(values_read(pack)):
        every = Promise(
            None,
            said(pack),
            tuple(x for promise in found for x in promise.reads),
            tuple(x for promise in found for x in promise.sources),
            tuple(x for promise in found for x in promise.writes),
        )
        pack.meta[PROMISE] = every


def keep(node: fx.Node, before: list[fx.Node]) -> None:
    """Let a node that lost operands promise what it promised of the others.

    Args:
        node: as it is now.
        before: its operands as they were.
    """
    promise = promise_of(node)
    if promise is None:
        return
    places = {operand: place for place, operand in enumerate(before)}
    left = [places[operand] for operand in values_read(node)]
    node.meta[PROMISE] = promise._replace(
        what=said(node),
        reads=tuple(promise.reads[place] for place in left),
        sources=tuple(promise.sources[place] for place in left),
        writes=tuple(promise.writes[place] for place in left),
    )


def stand_in(new: fx.Node, old: fx.Node) -> None:
    """Say that `new` has the place of the value that `old` makes."""
    new.meta[STANDS_FOR] = source_of(old)


def overwritten(given: fx.Node) -> None:
    """Let an input that was given away be written over once more."""
    promise = promise_of(given)
    if promise is not None:
        given.meta[PROMISE] = promise._replace(writes=(promise.writes[0] + 1,))


def settled(output: fx.Node) -> None:
    """Let results be in memory that was written over for them."""
    promise = promise_of(output)
    if promise is not None:
        writes = next(writes for node, writes in counted(output.graph) if node is output)
        output.meta[PROMISE] = promise._replace(writes=writes)


def values_read(node: fx.Node) -> list[fx.Node]:
    """The operands that are values; what draws has a generator besides, what is placed a buffer."""
    found = [x for x in operands(node) if "val" in x.meta and x.target is not buffer_of]
    return found[: len(node.args[0])] if is_packed_over(node) else found  # pyright: ignore


def came_over(launch: fx.Node) -> list[fx.Node]:
    """The leaves that are written over by what a collective brings."""
    pack = launch.all_input_nodes[0]
    return list(pack.args[2]) if launch.meta["bucket"].over else []  # pyright: ignore


def is_packed_over(node: fx.Node) -> bool:
    """Whether a node packs leaves into the memory of the leaves that are written over."""
    return node.target is KINDS[GATHER].pack and len(node.args) > 2


def said(node: fx.Node) -> str:
    """The operator and what it is given besides values."""
    target, args = operator_of(node)
    name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    # shapes tell views; passes join them
    if node.op == "output" or is_cheap(node) or is_placed_cast(node):
        return name if node.op == "output" else ""
    rest = [x for x in tree_leaves((args, node.kwargs)) if not isinstance(x, fx.Node)]
    return f"{name}{rest}" if rest else name


def counted(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    """Each node, with how often the memory of each of its operands was written over before it."""
    times = _Writes()
    for node in graph.nodes:
        yield node, tuple(map(times.over, values_read(node)))
        times.add(node)


def written(graph: fx.Graph) -> dict[fx.Node, int]:
    """How often the memory of each input is written over."""
    times = _Writes()
    for node in graph.nodes:
        times.add(node)
    return {x: times.over(x) for x in placeholders(graph)}


class _Writes:
    """What was written over so far: where, and how often.

    By bytes of a storage, since leaves of a bucket have one: each is written over by itself.
    """

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}  # by storage, sorted
        self._longest: dict[int, int] = {}

    def add(self, node: fx.Node) -> None:
        """What a node writes."""
        for x in (x for operand in written_operands(node) for x in dense_of(operand) if x.numel()):
            key, (start, stop) = x.untyped_storage()._cdata, extent(x)
            insort(self._spans.setdefault(key, []), (start, stop))
            self._longest[key] = max(self._longest.get(key, 0), stop - start)

    def over(self, node: fx.Node) -> int:
        """How often memory of a node's values was written over."""
        return sum(map(self._over, dense_of(node))) if self._spans else 0

    def _over(self, x: Tensor) -> int:
        key = x.untyped_storage()._cdata
        spans = self._spans.get(key)
        if spans is None or not x.numel():
            return 0
        start, stop = extent(x)
        # those that begin before it ends, and not so early that they must end before it begins
        near = spans[
            bisect_left(spans, (start - self._longest[key],)) : bisect_left(spans, (stop,))
        ]
        return sum(last > start for _, last in near)


def source_of(node: fx.Node) -> Source:
    """Where a value comes from, past all that only moves it."""
    hops: list[tuple[str, str]] = []
    while True:
        target: Any = node.target
        if STANDS_FOR in node.meta:
            source: Source = node.meta[STANDS_FOR]
            return source._replace(hops=(*hops, *source.hops))
        if target is operator.getitem:
            (maker, part) = node.args
            if maker.target not in UNPACKS:  # pyright: ignore
                promise = promise_of(maker)  # pyright: ignore
                return Source(promise and promise.number, part, tuple(hops))
            bucket: Bucket = maker.args[1]  # pyright: ignore
            leaf = bucket.leaves[part].name  # pyright: ignore
            if bucket.gathers:
                return Source(("leaf", leaf), None, tuple(hops))
            if bucket.world > 1:  # else it travels nowhere: see `passes.lay`
                hops.append((leaf, bucket.group))
            node = _packed(maker)[part]  # pyright: ignore
        elif is_gather(node) or is_reduction(node):
            _, layout, axis = carried_by(node)
            if is_gather(node):
                return Source(("leaf", layout.name), None, tuple(hops))
            hops.append((layout.name, axis.group))
            node = node.all_input_nodes[0]
        elif is_cheap(node) or is_op(node, "fzero::restored") or is_transfer(node):
            node = node.all_input_nodes[0]
        elif is_placed_cast(node):
            node = node.all_input_nodes[1]
        elif is_op(node, "aten::copy_") and promise_of(node) is None:  # over a donated input
            node = node.args[1]  # pyright: ignore
        elif node.op == "get_attr":
            return Source(("constant", str(node.target)), None, tuple(hops))
        else:
            promise = promise_of(node)
            return Source(promise and promise.number, None, tuple(hops))


def _packed(unpack: fx.Node) -> list[fx.Node]:
    """What was packed of what is unpacked: through wait and launch, if they are there."""
    node: Any = unpack.args[0]
    while node.target not in PACKS:
        node = node.args[0]
    return list(node.args[0])
