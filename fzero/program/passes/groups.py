"""Which collectives share one, and what each of them carries.

[Note: buckets that grow] Most is alive where forward turns into backward. There the peak is, and
there the size of buckets is settled. A leaf further away is gathered, or its gradient sent, while
fewer activations are alive: about as many fewer as there are leaves between. So a bucket may be
larger than `size` by a share of the bytes between it and that turn, at the same peak. That makes
fewer collectives, each of which costs the same beside its bytes: see `passes.grown`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fzero.distributed.buckets import EXCHANGE, KINDS, Bucket, bucket_of, goes_alone
from fzero.distributed.mesh import Axis
from fzero.layout import LeafLayout
from fzero.layout.flats import Claims
from fzero.program.graph import BACKWARD, FORWARD, UPDATE, is_mutable, is_op, segments, tensors_of
from fzero.program.passes.rewrite import carried_by, is_cheap, is_gather, is_reduction


class Asked(NamedTuple):
    """What a collective of one leaf carries, over which ranks.

    Args:
        leaf: the leaf.
        axis: the ranks.
        dtype, nbytes: of its full side.
        copied: what `passes.over` found of a gather whose leaf is only copied somewhere: STRAIGHT
            or OVER.
        members: how many leaves have to come together for the latter: all those of a flat.
    """

    leaf: LeafLayout
    axis: Axis
    dtype: torch.dtype
    nbytes: int
    copied: str = ""
    members: int = 1


ASKED = "asked"
"""Where a node of a sketch has it, which holds no values to tell it from."""
COPIED = "copied"
"""Where a gather has what can be done of a copy of its leaf: that is STRAIGHT, or OVER."""
MEMBERS = "members"
"""Where it has how many leaves have to be gathered together for that."""
STRAIGHT, OVER = "straight", "over"
"""It is unpacked to where it is copied; it is gathered there, and never unpacked."""


def asked_of(node: fx.Node) -> Asked:
    """What a collective of one leaf carries."""
    if ASKED in node.meta:
        return node.meta[ASKED]
    kind, leaf, axis = carried_by(node)
    (full,) = tensors_of(node if KINDS[kind].gathers else node.all_input_nodes[0])
    copied, members = node.meta.get(COPIED, ""), node.meta.get(MEMBERS, 1)
    return Asked(leaf, axis, full.dtype, full.nbytes, copied, members)


@dataclass
class Group:
    """Nodes that will share a collective; kept in the order of the graph."""

    kind: str
    segment: int
    phase: str
    movable: bool
    gathers: bool = False  # whether other leaves may be gathered meanwhile
    nodes: list[fx.Node] = field(default_factory=list)
    nbytes: int = 0
    claims: Claims = field(default_factory=Claims)


class Growth(NamedTuple):
    """How much larger buckets may be than their size; see [Note: buckets that grow].

    Args:
        most: bytes that none may be larger than; 0: than the size.
        forward, backward: of gathers in the two directions, sixteenths of the bytes of leaves that
            lie between.
        reductions: the same of reductions in backward.
    """

    most: int = 0
    forward: int = 0
    backward: int = 0
    reductions: int = 0

    def room(self, size: int, phase: str, between: int, *, gathers: bool) -> int:
        """Bytes that a bucket may have.

        Args:
            size: bytes next to the turn.
            phase: of the collective.
            between: bytes of leaves of its kind between it and the turn.
            gathers: whether it brings full leaves.

        >>> growth = Growth(most=100, forward=8)
        >>> [growth.room(20, FORWARD, between, gathers=True) for between in (0, 80, 400)]
        [20, 60, 100]
        """
        sixteenths = 0
        if phase == FORWARD and gathers:
            sixteenths = self.forward
        elif phase == BACKWARD:
            sixteenths = self.backward if gathers else self.reductions
        return max(size, min(self.most, size + sixteenths * between // 16))


ALIKE = Growth()
"""Of buckets that have one size everywhere."""


def buckets_of(kind: str, size: int, growth: Growth) -> tuple[int, Growth]:
    """The size and growth of the buckets of a kind."""
    # an exchange is made for one matrix a rank at a time: together they would be held at once
    return (-1, ALIKE) if kind == EXCHANGE else (size, growth)


def groups_of(graph: fx.Graph, kind: str, size: int, growth: Growth = ALIKE) -> list[Group]:
    """Runs of collectives of a kind with the same dtype, axis and segment, up to `size` bytes.

    Those of a group come after equally many others: what waits for a collective is further down
    than what it waits for, so no group waits for itself, nor two for each other.

    Args:
        graph: in which they carry single leaves.
        kind: of `KINDS`.
        size: most bytes of full leaves.
        growth: by how much that may be exceeded.
    """
    of, depth = segments(graph), depths_of(graph)
    asks = [node for node in graph.nodes if is_op(node, *KINDS[kind].operators)]
    total, before = Counter[int](), Counter[int]()
    for node in asks:
        total[of[node][0]] += asked_of(node).nbytes
    gathering = _gathering(graph, of)
    in_place = any(map(is_mutable, graph.nodes))
    open_groups: dict[tuple[Any, ...], Group] = {}
    done: list[Group] = []
    for node in graph.nodes:
        number, phase = of[node]
        if not is_op(node, *KINDS[kind].operators):
            if in_place and phase == UPDATE and not is_cheap(node):
                done += open_groups.values()  # an update works in place: nothing moves across it
                open_groups = {}
            continue
        asked = asked_of(node)
        # by segment too: a bucket over its border would keep leaves of forward for backward
        home = asked.leaf.home
        key = (asked.dtype, asked.axis.group, number, depth[node], home and home[:2])
        movable = not (in_place and phase == UPDATE)
        gathers = asked.axis.group in gathering
        group = open_groups.get(key)
        # what lies between the turn and that end of the bucket which is nearer to it: forward comes
        # to the turn, backward goes away from it
        between = before[number] - (group.nbytes if group else 0)
        before[number] += asked.nbytes
        if phase == FORWARD:
            between = total[number] - before[number]
        if goes_alone(asked.leaf, asked.nbytes, asked.axis):
            done.append(Group(kind, number, phase, movable, gathers, [node], asked.nbytes))
            continue
        most = growth.room(size, phase, between, gathers=KINDS[kind].gathers)
        # a flat travels as a whole, whatever of it is asked for
        full = group is not None and home is None and group.nbytes + asked.nbytes > most
        if group is None or full or not group.claims.claim(asked.leaf):
            if group is not None:
                done.append(group)
            group = open_groups[key] = Group(kind, number, phase, movable, gathers)
            group.claims.claim(asked.leaf)
        group.nodes.append(node)
        group.nbytes += asked.nbytes
    return done + list(open_groups.values())


def _gathering(graph: fx.Graph, of: Mapping[fx.Node, tuple[int, str]]) -> set[str]:
    """The process groups over which forward or backward gathers; an update's gathers come last."""
    found: set[str] = set()
    for node in graph.nodes:
        if of[node][1] == UPDATE:
            continue
        bucket: Bucket | None = node.meta.get("bucket")
        if bucket is not None and bucket.gathers:
            found.add(bucket.group)
        elif is_gather(node):
            found.add(asked_of(node).axis.group)
    return found


def depths_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many collectives each node waits for, one after the other."""
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((depth[x] for x in node.all_input_nodes), default=0)
        # of the kinds before this one the buckets are made already
        counts = is_gather(node) or is_reduction(node) or "bucket" in node.meta
        depth[node] = before + counts
    return depth


def bucket_for(group: Group) -> Bucket:
    """What a group travels as."""
    asked = [*map(asked_of, group.nodes)]
    parts: Any = ((), ())
    if group.kind == EXCHANGE:
        parts = tuple(tuple(sizes) for sizes in group.nodes[0].args[1:3])  # pyright: ignore
    leaves = [one.leaf for one in asked]
    dtype, axis = leaves[0].dtype, asked[0].axis
    bucket = bucket_of(group.kind, leaves, dtype, axis, parts, gathers=group.gathers)
    # of a flat with a leaf that is not asked for, that leaf would be written over, too
    over = all(one.copied == OVER for one in asked) and len(asked) == asked[0].members
    return replace(bucket, over=True) if over else bucket


def bring_operands(group: Group, order: dict[fx.Node, int]) -> None:
    """Move casts and views of inputs that a group sends to before the place where it is sent.

    Each stands before its own leaf's first use. Left there, what reads the group's first leaf would
    have to wait for the last one's cast, and all that need not wait, other gathers, would go first.

    Args:
        group: of the graph that `order` numbers.
        order: as the nodes stood before groups were lowered.
    """
    place = first_place(group)
    for node in group.nodes:
        chain, x = [], next(iter(node.all_input_nodes))
        while order.get(x, -1) > order[place] and is_cheap(x) and len(x.all_input_nodes) == 1:
            chain.append(x)
            x = next(iter(x.all_input_nodes))
        if chain and order.get(x, order[place]) < order[place]:
            for cast in reversed(chain):
                place.prepend(cast)
                order[cast] = order[place]


def first_place(group: Group) -> fx.Node:
    """What the shared collective is put before."""
    # a gather is wanted at its first use, a reduction is ready with its last gradient; in an
    # update, which works in place, what is read must have been written
    gathers = KINDS[group.kind].gathers
    return group.nodes[0] if gathers and group.movable else group.nodes[-1]
