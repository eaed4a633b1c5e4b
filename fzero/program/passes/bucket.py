"""Turn collectives of single leaves into buckets, and decide when each is launched and awaited."""

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fzero.distributed.buckets import (
    EXCHANGE,
    KINDS,
    asked_for,
    bucket_of,
    carrier,
    unpack_into,
)
from fzero.distributed.mesh import Axis
from fzero.layout import LeafLayout
from fzero.program.graph import (
    UPDATE,
    copy_graph,
    is_mutable,
    is_op,
    operands,
    segments,
    tensors_of,
)
from fzero.program.memory import peak_bytes
from fzero.program.passes.rewrite import (
    call,
    is_cheap,
    is_gather,
    is_reduction,
    legalise,
    substitute,
)
from fzero.program.passes.schedule import schedule
from fzero.program.program import Program
from fzero.program.promises import inherit, keep


def bucket(
    program: Program,
    *,
    limit: int,
    prefetch: int | None = None,
    slack: float = 0.1,
    budget: int = 0,
    within: int | None = None,
) -> Program:
    """Let consecutive collectives share one, as far as memory allows.

    The size of a bucket is found by simulation: the largest that is at most `limit` and whose
    Program stays, at its peak, within `slack` of what the smallest buckets need. Buckets of
    different sizes are tried, since peak memory is no simple function of the size.

    Args:
        limit: most bytes of full leaves in a bucket; a leaf larger than that travels alone.
        prefetch: how many buckets ahead a gather is launched. None: 1, but 0 over gloo, whose
            transfers take the cores that compute.
        slack: share of the lowest peak that fewer collectives may cost; less for large buckets.
        budget: bytes that the rest of the step needs in any case: up to there memory is free.
        within: bytes that the peak has to stay under. Then memory is free below, and the largest
            buckets are taken that stay there; if none do, those of the lowest peak.
    """
    sizes = bucket_sizes(program, limit)
    if within is not None:
        return _largest_within(program, sizes, within, prefetch)
    candidates = [bucket_at(program, size, prefetch=prefetch) for size in sizes]
    peaks = [peak_bytes(candidate) for candidate in candidates]
    lowest = min(peaks)

    def fits(candidate: Program, peak: int) -> bool:
        share = slack * min(1.0, _LARGE / max(candidate.bucket_bytes, 1))
        return peak <= max(lowest * (1 + share), budget)

    # Sizes fall, so this is the largest that fits; the one of the lowest peak always does.
    return next(c for c, peak in zip(candidates, peaks, strict=True) if fits(c, peak))


def bucket_sizes(program: Program, limit: int) -> list[int]:
    """The sizes of buckets that are tried, falling from `limit` bytes."""
    total = sum(
        tensors_of(n)[0].nbytes for n in program.graph.nodes if is_gather(n) or is_reduction(n)
    )
    sizes, size = [], float(min(limit, max(total, 1)))
    while size >= 2**16 and len(sizes) < _TRIES:
        sizes.append(int(size))
        # ten sizes of this ratio reach from 25 MB down to 0.4 MB
        size /= 1.6
    return sizes or [limit]


def _largest_within(
    program: Program, sizes: list[int], within: int, prefetch: int | None
) -> Program:
    """The first of falling sizes that stays under a peak, or else the one of the lowest."""
    lowest: tuple[int, Program] | None = None
    for size in sizes:
        candidate = bucket_at(program, size, prefetch=prefetch)
        peak = peak_bytes(candidate)
        if peak <= within:
            return candidate
        if lowest is None or peak < lowest[0]:
            lowest = (peak, candidate)
    assert lowest is not None
    return lowest[1]


_TRIES = 10
# Bytes from which on carrying a collective takes longer than launching it: the larger a bucket, the
# less a still larger one saves, and the less it may cost.
_LARGE = 2**20


def bucket_at(program: Program, size: int, *, prefetch: int | None = None) -> Program:
    """`bucket` with a size that is settled: at most `size` bytes of full leaves in each."""
    return replace(schedule(_with_buckets(program, size), prefetch=prefetch), bucket_bytes=size)


def _with_buckets(program: Program, size: int) -> Program:
    graph = copy_graph(program.graph)
    singles = made = 0
    for kind in KINDS:
        # an exchange is made for one matrix a rank at a time: together they would be held at once
        groups = _groups(graph, kind, -1 if kind == EXCHANGE else size)
        singles += sum(len(group.nodes) for group in groups)
        made += len(groups)
        for group in groups:
            _lower(graph, group)
        # now, not at the end: the next kind is grouped by the order of the graph
        legalise(graph)
    line = f"bucket: {singles} -> {made} collectives, at most {size / 2**20:.3g} MiB each"
    return program.logged(graph, line)


@dataclass
class _Group:
    """Nodes that will share a collective; kept in the order of the graph."""

    kind: str
    segment: int
    phase: str
    movable: bool
    nodes: list[fx.Node] = field(default_factory=list)
    nbytes: int = 0


def _groups(graph: fx.Graph, kind: str, size: int) -> list[_Group]:
    """Runs of collectives of a kind with the same dtype, axis and segment, up to `size` bytes.

    Those of a group come after equally many others: what waits for a collective is further down
    than what it waits for, so no group waits for itself, nor two for each other.
    """
    of, depth = segments(graph), _depths(graph)
    in_place = any(map(is_mutable, graph.nodes))
    open_groups: dict[tuple[Any, ...], _Group] = {}
    done: list[_Group] = []
    for node in graph.nodes:
        number, phase = of[node]
        if not is_op(node, *KINDS[kind].operators):
            if in_place and phase == UPDATE and not is_cheap(node):
                done += open_groups.values()  # an update works in place: nothing moves across it
                open_groups = {}
            continue
        (full,) = tensors_of(node if KINDS[kind].gathers else node.all_input_nodes[0])
        _, axis = _leaf_and_axis(node)
        # by segment too: a bucket over its border would keep leaves of forward for backward
        key = (full.dtype, axis.group, number, depth[node])
        group = open_groups.get(key)
        if group is None or group.nbytes + full.nbytes > size:
            if group is not None:
                done.append(group)
            movable = not (in_place and phase == UPDATE)
            group = open_groups[key] = _Group(kind, number, phase, movable)
        group.nodes.append(node)
        group.nbytes += full.nbytes
    return done + list(open_groups.values())


def _depths(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many collectives each node waits for, one after the other."""
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((depth[x] for x in node.all_input_nodes), default=0)
        # of the kinds before this one the buckets are made already
        counts = is_gather(node) or is_reduction(node) or "bucket" in node.meta
        depth[node] = before + counts
    return depth


def _leaf_and_axis(node: fx.Node) -> tuple[LeafLayout, Axis]:
    """What one collective alone carries, and over which ranks."""
    target: Any = node.target
    (value,) = tensors_of(node.all_input_nodes[0])
    _, leaf, axis = asked_for(target._schema.name, value, node.args[1:])
    return leaf, axis


def _lower(graph: fx.Graph, group: _Group) -> None:
    """Replace the group's nodes by pack, collective, wait and unpack."""
    leaves, axes = zip(*map(_leaf_and_axis, group.nodes), strict=True)
    parts: Any = ((), ())
    if group.kind == EXCHANGE:
        parts = tuple(tuple(sizes) for sizes in group.nodes[0].args[1:3])  # pyright: ignore
    whole = bucket_of(group.kind, leaves, leaves[0].dtype, axes[0], parts)
    pack, unpack = KINDS[group.kind][:2]
    # a gather is wanted at its first use, a reduction is ready with its last gradient; in an
    # update, which works in place, what is read must have been written
    before = group.nodes[0] if whole.gathers and group.movable else group.nodes[-1]
    operands = [node.all_input_nodes[0] for node in group.nodes]
    with graph.inserting_before(before):
        send = call(graph, pack, operands, whole, name=f"pack_{group.kind}")
        target, arguments = carrier(whole, tensors_of(send)[0].numel())
        inherit(send, group.nodes)
        launch = call(graph, target, send, *arguments, name=group.kind)
        # what the schedule, the listing and the walk over memory know a bucket by
        launch.meta["bucket"] = whole
        launch.meta["phase"], launch.meta["segment"] = group.phase, group.segment
        wait = call(graph, torch.ops._c10d_functional.wait_tensor.default, launch)
        # straight to where they live: unpacked first, they would be held twice
        if targets := _written_over(group.nodes):
            graph.call_function(unpack_into, (wait, whole, targets))  # pyright: ignore
            for node in group.nodes:
                graph.erase_node(node)
            return
        unpacked = call(graph, unpack, wait, whole, name=f"unpack_{group.kind}")
        parts = [call(graph, operator.getitem, unpacked, i) for i in range(len(group.nodes))]
    for node, part in zip(group.nodes, parts, strict=True):
        substitute(node, part)


def _written_over(gathers: list[fx.Node]) -> list[fx.Node]:
    """Where the gathered leaves go, if all that is done with them is to copy them there.

    Takes them out of the copies, which are left with what else they have.
    """
    copies = [list(node.users) for node in gathers]
    # a leaf that something else reads as well has to be a tensor of its own
    if not all(len(users) == 1 and is_op(users[0], "aten::_foreach_copy_") for users in copies):
        return []
    found = []
    for node, (copy,) in zip(gathers, copies, strict=True):
        before = operands(copy)
        targets, sources = map(list, copy.args[:2])  # pyright: ignore
        index = sources.index(node)
        found.append(targets.pop(index))
        sources.pop(index)
        copy.args = (targets, sources)
        keep(copy, before)
        if not sources:
            copy.graph.erase_node(copy)
    return found
