"""What buckets of a size would hold, by arithmetic on a sketch of the graph: nothing is built.

[Note: sketches] A sketch has a dot for each node of a graph: what it reads, who reads it, and the
numbers of the storages that it is on. It has of a graph what grouping, scheduling, putting in order
and the walk over lifetimes ask for, so these very functions run on it; only what makes nodes, whose
values cost the time, is done here once more, with numbers of bytes. What a bucket's buffers and
leaves hold follows from their layouts, as `pack` and `unpack` in `distributed.buckets` make them.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import fx

from fzero.distributed.buckets import (
    ALL_REDUCE,
    EXCHANGE,
    GATHER,
    KINDS,
    REDUCE_SCATTER,
    Bucket,
    unpack_into,
)
from fzero.program.graph import FORWARD, is_mutable, is_op, order_of, tensors_of
from fzero.program.memory import Bytes, storages, timeline
from fzero.program.passes.groups import (
    ALIKE,
    ASKED,
    Group,
    Growth,
    asked_of,
    bring_operands,
    bucket_for,
    buckets_of,
    first_place,
    groups_of,
)
from fzero.program.passes.rewrite import is_cheap, is_gather, is_reduction, legalise
from fzero.program.passes.schedule import Early, arrange, gathers_of, launch_part, wait_of


class Dot:
    """A node of a sketch; attributes of the same name as a node's have the same meaning.

    Args:
        on: the storages that it is on, and their bytes.
        spread: bytes of a copy of its one value, laid out as that, if that is not dense.
        copies: of an operator that copies leaf by leaf, what is written and what is read.
    """

    __slots__ = (
        *("args", "copies", "meta", "next", "on", "op", "prev", "spread", "target"),
        *("users", "uses"),
    )

    def __init__(
        self,
        op: str,
        target: Any,
        on: Bytes,
        spread: int | None = None,
        args: tuple[Any, ...] = (),
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.op, self.target, self.on, self.spread, self.args = op, target, on, spread, args
        self.meta = _NOTHING if meta is None else meta
        self.copies: list[list[Dot]] | None = None
        self.uses: dict[Dot, None] = {}
        self.users: dict[Dot, None] = {}
        self.prev = self.next = self

    @property
    def all_input_nodes(self) -> "list[Dot]":
        """What it reads, each once."""
        return list(self.uses)

    def read(self, dots: "Iterable[Dot]") -> "Dot":
        """Let it read these."""
        for dot in dots:
            self.uses[dot] = None
            dot.users[self] = None
        return self

    def leave(self) -> None:
        """Out of the order."""
        self.prev.next, self.next.prev = self.next, self.prev

    def prepend(self, dot: "Dot") -> None:
        """Move or put a dot before this one."""
        if dot is self:
            return
        dot.leave()
        dot.prev, dot.next = self.prev, self
        self.prev.next = self.prev = dot

    def append(self, dot: "Dot") -> None:
        """Move or put a dot after this one."""
        if dot is not self.next:
            self.next.prepend(dot)

    def erase(self) -> None:
        """Out of the order, and out of what it reads."""
        self.leave()
        for dot in self.uses:
            del dot.users[self]

    def give_way(self, new: "Dot") -> None:
        """Let all that reads it read another."""
        for user in self.users:
            # in the place of the old: operands keep their order
            user.uses = {new if x is self else x: None for x in user.uses}
            new.users[user] = None
            if user.copies is not None:
                user.copies = [[new if x is self else x for x in part] for part in user.copies]
        self.users = {}


class Launched(NamedTuple):
    """A gather in an order of nodes.

    Args:
        start, end: the places of what makes its buffer, and of its wait.
        nbytes: of all that is made to launch it.
        forward: whether it is one of forward's.
    """

    start: int
    end: int
    nbytes: int
    forward: bool


class Sketched(NamedTuple):
    """What becomes of a graph with buckets.

    Args:
        alive: what `timeline` would give.
        gathers: those that could be earlier, by segment.
        early: how early they are.
        collectives: how many there are.
        gloo: whether gloo carries any.
    """

    alive: list[int]
    gathers: list[list[Launched]]
    early: Early
    collectives: int
    gloo: bool


def _launched(dot: Any, place: Mapping[Any, int]) -> Launched:
    part: Any = launch_part(dot)
    made = {key: nbytes for x in part for key, nbytes in x.on.items()}
    for x in part:
        for read in x.uses:
            if read not in part:  # a buffer that is the shard's own memory is there anyhow
                made = {key: nbytes for key, nbytes in made.items() if key not in read.on}
    start = min(place[x] for x in part)
    nbytes = sum(made.values())
    return Launched(start, place[wait_of(dot)], nbytes, dot.meta["phase"] == FORWARD)


class Sketch:
    """A graph, of which buckets of any size are tried; see [Note: sketches].

    Args:
        graph: in which collectives carry single leaves.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.rows = list(map(_row, graph.nodes))
        place = {node: i for i, node in enumerate(graph.nodes)}
        self.uses = [[place[x] for x in node.all_input_nodes] for node in graph.nodes]
        self.copies = {
            i: [[place[x] for x in part] for part in node.args[:2]]  # pyright: ignore
            for node, i in place.items()
            if is_op(node, _COPY)
        }
        targets = {row[1]._schema.name for row in self.rows if ASKED in row[-1]}
        self.kinds = [kind for kind, of in KINDS.items() if targets & set(of.operators)]

    def timeline_at(
        self, size: int, early: Early | int | None, growth: Growth = ALIKE
    ) -> list[int]:
        """What `timeline` would give of the graph with such buckets."""
        return self.at(size, early, growth).alive

    def at(self, size: int, early: Early | int | None, growth: Growth = ALIKE) -> Sketched:
        """What becomes of the graph with such buckets.

        Args:
            size, growth: of buckets, see `groups_of`.
            early: how early gathers are launched, or as `Early.always` takes it.
        """
        trial = _Trial(self)
        graph: Any = trial
        for kind in self.kinds:
            groups = groups_of(graph, kind, *buckets_of(kind, size, growth))
            order = order_of(graph)
            for group in groups:
                bring_operands(group, order)
                trial.lower(group)
            legalise(graph)
        if not isinstance(early, Early):
            early = Early.always(early, graph)
        arrange(graph, early)
        alive = list(timeline(graph, _on))
        place = {dot: i for i, dot in enumerate(trial.nodes)}
        launches: Any = [dot for dot in place if "bucket" in dot.meta]
        found = [[_launched(dot, place) for dot in gathers] for gathers in gathers_of(launches)]
        trial.end()
        gloo = any(dot.meta["bucket"].gloo for dot in launches)
        return Sketched(alive, found, early, len(launches), gloo)


class _Trial:
    """The dots of a sketch, to be moved."""

    def __init__(self, sketch: Sketch) -> None:
        self.keys = count(-1, -1)  # storages of the graph have positive numbers
        self.root = Dot("root", None, {})
        dots = [Dot(*row) for row in sketch.rows]
        for dot, uses in zip(dots, sketch.uses, strict=True):
            self.root.prepend(dot.read(dots[i] for i in uses))
        for i, copies in sketch.copies.items():
            dots[i].copies = [[dots[x] for x in part] for part in copies]

    @property
    def nodes(self) -> list[Dot]:
        """The dots in order."""
        found, dot = [], self.root.next
        while dot is not self.root:
            found.append(dot)
            dot = dot.next
        return found

    def end(self) -> None:
        """Let go of the dots, which hold each other."""
        for dot in (*self.nodes, self.root):
            dot.uses, dot.users, dot.copies = {}, {}, None
            dot.prev = dot.next = None  # pyright: ignore

    def fresh(self, nbytes: int) -> Bytes:
        """A storage of its own."""
        return {next(self.keys): nbytes}

    def lower(self, group: Group) -> None:
        """What `bucket` does with a group."""
        nodes: Any = group.nodes
        whole, before = bucket_for(group), first_place(group)
        operands = [next(iter(dot.uses)) for dot in nodes]

        def new(reads: Sequence[Dot], on: Bytes, target: Any = None) -> Dot:
            dot = Dot("call_function", target, on).read(reads)
            before.prepend(dot)  # pyright: ignore
            return dot

        targets = _written_over(nodes)
        if whole.over:
            send = new([*operands, *targets], targets[0].on)
        else:
            send = new(operands, self._sent(whole, operands))
        launch = new([send], send.on if whole.is_around else self.fresh(_received(whole)))
        launch.meta = {
            "bucket": whole,
            "phase": group.phase,
            "segment": group.segment,
            "val": None,
        }
        wait = new([launch], launch.on, _WAIT)
        if targets:
            new([wait, *targets], {}, unpack_into).meta = {}
            for dot in nodes:
                dot.erase()
            return
        held = self._unpacked(whole, launch.on)
        unpack = new([wait], {key: nbytes for on in held for key, nbytes in on.items()})
        parts = [new([unpack], on, operator.getitem) for on in held]
        for dot, part in zip(nodes, parts, strict=True):
            if dot.spread is not None:  # the operator `restored`
                laid_out = Dot("call_function", None, self.fresh(dot.spread)).read([part])
                part.append(laid_out)
                part = laid_out
            dot.give_way(part)
            dot.erase()
            self._refresh(part, dot.on)

    def _refresh(self, dot: Dot, before: Bytes) -> None:
        """Views of what took another's place share its storage, copies have new ones."""
        for user in dot.users:
            if is_cheap(user):  # pyright: ignore
                old = user.on
                shared = bool(old.keys() & before.keys())
                user.on = dot.on if shared else {next(self.keys): x for x in old.values()}
                self._refresh(user, old)

    def _sent(self, bucket: Bucket, operands: Sequence[Dot]) -> Bytes:
        """The storage of what `pack` makes."""
        alone = {
            GATHER: bucket.is_plain and not bucket.exchanged,
            REDUCE_SCATTER: bucket.is_plain,
            ALL_REDUCE: len(operands) == 1,
            EXCHANGE: True,
        }[bucket.kind]
        if alone and operands[0].spread is None:
            return operands[0].on
        return self.fresh(_sends(bucket))

    def _unpacked(self, bucket: Bucket, buffer: Bytes) -> list[Bytes]:
        """The storages of what `unpack` makes."""
        if bucket.kind in (ALL_REDUCE, EXCHANGE):
            return [buffer] * len(bucket.leaves)
        itemsize, gathers = bucket.dtype.itemsize, bucket.kind == GATHER
        if not gathers and bucket.exchanged:
            buffer = self.fresh(_part(bucket))
        if bucket.is_flat:  # views of it
            return [buffer] * len(bucket.leaves)
        found = []
        for leaf in bucket.leaves:
            assert leaf.dim is not None
            padded = math.prod(leaf.padded_shape) * bucket.world * itemsize
            own = gathers and len(bucket.leaves) > 1
            on = self.fresh(padded) if own else buffer
            start, stop = (0, leaf.shape[leaf.dim]) if gathers else leaf.bounds(bucket.rank)
            front = (stop - start, *leaf.padded_shape[1:])
            if not _stays_dense(front, leaf.dim):
                on = self.fresh(math.prod(front) * itemsize)
            found.append(on)
        return found


def _row(node: fx.Node) -> tuple[Any, ...]:
    """What a dot has of a node."""
    meta, target = _NOTHING, None
    asks = is_gather(node) or is_reduction(node)
    if asks:
        meta = {ASKED: asked_of(node), "val": None}
    if asks or is_cheap(node) or is_mutable(node) or is_op(node, *_MARKS):
        target = node.target  # of the others nobody asks
    values = tensors_of(node)
    spread = None
    if len(values) == 1 and values[0].layout is torch.strided and not values[0].is_contiguous():
        (x,) = values
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        spread = (last + 1) * x.itemsize
    return node.op, target, storages([node]), spread, node.args, meta


def _on(dots: Iterable[Any]) -> Bytes:
    found: Bytes = {}
    for dot in dots:
        found.update(dot.on)
    return found


def _written_over(gathers: Sequence[Dot]) -> list[Dot]:
    """Where gathered leaves go that are only copied there; takes them out of the copies."""
    if not all(dot.meta[ASKED].copied for dot in gathers):
        return []
    found = []
    for dot in gathers:
        (copy,) = dot.users
        assert copy.copies is not None
        targets, sources = copy.copies
        index = sources.index(dot)
        found.append(targets.pop(index))
        sources.pop(index)
        for x in (found[-1], dot):
            if x not in targets and x not in sources:
                del copy.uses[x], x.users[copy]
        if not sources:
            copy.erase()
    return found


def _part(bucket: Bucket) -> int:
    """Bytes of a rank's part of a buffer."""
    return bucket.part * bucket.dtype.itemsize


def _sends(bucket: Bucket) -> int:
    """Bytes of the buffer that is sent."""
    if bucket.kind == ALL_REDUCE:
        return bucket.nbytes
    if bucket.kind == EXCHANGE:
        return sum(bucket.parts[1]) * bucket.dtype.itemsize
    whole = bucket.kind == REDUCE_SCATTER or bucket.exchanged or bucket.is_around
    return _part(bucket) * (bucket.world if whole else 1)


def _received(bucket: Bucket) -> int:
    """Bytes of the buffer that comes."""
    if bucket.kind == ALL_REDUCE:
        return bucket.nbytes
    if bucket.kind == EXCHANGE:
        return sum(bucket.parts[0]) * bucket.dtype.itemsize
    whole = bucket.kind == GATHER or bucket.exchanged
    return _part(bucket) * (bucket.world if whole else 1)


def _stays_dense(front: Sequence[int], dim: int) -> bool:
    """Whether a dense tensor of this shape is dense when its first dim has moved to `dim`."""
    return 0 in front or front[0] == 1 or all(size == 1 for size in front[1 : dim + 1])


_COPY = "aten::_foreach_copy_"
_MARKS = ("fzero::boundary", "fzero::phase", "fzero::landed", "_c10d_functional::wait_tensor")
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_NOTHING: Any = {"val": None}  # of a node that returns nothing there is no value
