"""Turn collectives of single leaves into buckets, and decide when each is launched and awaited."""

import operator
from dataclasses import replace

import torch
from torch import fx

from fzero.distributed.buckets import KINDS, carrier, unpack_into
from fzero.program.graph import copy_graph, operands, order_of, tensors_of
from fzero.program.memory import constant_bytes
from fzero.program.passes.early import as_early_as_fits
from fzero.program.passes.groups import (
    ALIKE,
    Group,
    Growth,
    asked_of,
    bring_operands,
    bucket_for,
    buckets_of,
    first_place,
    groups_of,
)
from fzero.program.passes.grown import as_grown_as_fits
from fzero.program.passes.rewrite import call, is_gather, is_reduction, legalise, substitute
from fzero.program.passes.schedule import Early, schedule
from fzero.program.passes.sketch import Sketch
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
        prefetch: how many buckets ahead a gather is launched. None: see [Note: early gathers].
        slack: share of the peak that fewer collectives may cost; less for large buckets.
        budget: bytes that the rest of the step needs in any case: up to there memory is free.
        within: bytes that the peak has to stay under. Then memory is free below, and the largest
            buckets are taken that stay there; if none do, those of the lowest peak.
    """
    sizes = bucket_sizes(program, limit)
    sketch = Sketch(program.graph)
    peaks = _peaks(program, sketch, sizes, prefetch)

    def at(size: int, most: int) -> Program:
        bound = most - constant_bytes(program)
        early, growth = None, as_grown_as_fits(sketch, size, limit, bound, prefetch)
        if prefetch is None:
            early = as_early_as_fits(sketch, size, bound, growth)
        return bucket_at(program, size, prefetch=prefetch, early=early, growth=growth)

    if within is not None:
        fitting = (size for size, peak in zip(sizes, peaks, strict=True) if peak <= within)
        size = next(fitting, sizes[peaks.index(min(peaks))])
        return at(size, within)
    least = max(min(peaks), budget)

    def bound(size: int) -> int:
        share = slack * min(1.0, _LARGE / max(size, 1))
        return int(least * (1 + share))

    # Sizes fall, so this is the largest that fits; the one of the lowest peak always does.
    size = next(size for size, peak in zip(sizes, peaks, strict=True) if peak <= bound(size))
    return at(size, bound(size))


def _peaks(program: Program, sketch: Sketch, sizes: list[int], prefetch: int | None) -> list[int]:
    """`peak_bytes` of `bucket_at` each size, of which none is built."""
    there = constant_bytes(program)
    return [there + max(sketch.timeline_at(size, prefetch), default=0) for size in sizes]


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


_TRIES = 10
# Bytes from which on carrying a collective takes longer than launching it: the larger a bucket, the
# less a still larger one saves, and the less it may cost.
_LARGE = 2**20


def bucket_at(
    program: Program,
    size: int,
    *,
    prefetch: int | None = None,
    early: Early | None = None,
    growth: Growth = ALIKE,
) -> Program:
    """`bucket` with a size that is settled: at most `size` bytes of full leaves in each.

    Args:
        early: settled, too; None: as `prefetch` says.
        growth: how much larger buckets may be.
    """
    made = schedule(_with_buckets(program, size, growth), prefetch=prefetch, early=early)
    return replace(made, bucket_bytes=size, growth=tuple(growth))


def _with_buckets(program: Program, size: int, growth: Growth) -> Program:
    graph = copy_graph(program.graph)
    singles = made = largest = 0
    for kind in KINDS:
        groups = groups_of(graph, kind, *buckets_of(kind, size, growth))
        singles += sum(len(group.nodes) for group in groups)
        made += len(groups)
        largest = max(largest, *(len(group.nodes) > 1 and group.nbytes for group in groups), 0)
        order = order_of(graph)
        for group in groups:
            bring_operands(group, order)
            _lower(graph, group)
        # now, not at the end: the next kind is grouped by the order of the graph
        legalise(graph)
    most = max(size, largest)
    line = f"bucket: {singles} -> {made} collectives, at most {most / 2**20:.3g} MiB each"
    return program.logged(graph, line)


def _lower(graph: fx.Graph, group: Group) -> None:
    """Replace the group's nodes by pack, collective, wait and unpack."""
    whole = bucket_for(group)
    pack, unpack = KINDS[group.kind][:2]
    operands = [node.all_input_nodes[0] for node in group.nodes]
    # straight to where they live: unpacked first, they would be held twice
    targets = _written_over(group.nodes)
    over = [targets] if whole.over else []
    with graph.inserting_before(first_place(group)):
        send = call(graph, pack, operands, whole, *over, name=f"pack_{group.kind}")
        target, arguments = carrier(whole, tensors_of(send)[0].numel())
        inherit(send, group.nodes)
        launch = call(graph, target, send, *arguments, name=group.kind)
        # what the schedule, the listing and the walk over memory know a bucket by
        launch.meta["bucket"] = whole
        launch.meta["phase"], launch.meta["segment"] = group.phase, group.segment
        wait = call(graph, torch.ops._c10d_functional.wait_tensor.default, launch)
        if targets:
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
    if not all(asked_of(node).copied for node in gathers):
        return []
    copies = [list(node.users) for node in gathers]
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
