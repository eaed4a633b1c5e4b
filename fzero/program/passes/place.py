"""Compute gradients straight into the buffers that carry them away: see [Note: placed results]."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from fzero.distributed.buckets import Bucket, buffer_of
from fzero.functional.memory import extent
from fzero.program.dynamic import mark_of
from fzero.program.graph import copy_graph, memory_of, order_of, tensors_of
from fzero.program.memory import timeline
from fzero.program.passes.rewrite import fake_mode, is_cheap, refresh
from fzero.program.placed import INTO, LAID, placed
from fzero.program.program import Program
from fzero.program.promises import PROMISE, promise_of, said

# Bytes from which a copy takes longer than to tell an operator where to write.
LEAST = 2**16


class Sent(NamedTuple):
    """A gradient that can be computed where it is sent from.

    Args:
        maker: the node whose operator makes it.
        leaf: its leaf's place in the bucket.
    """

    maker: fx.Node
    leaf: int


def place(program: Program, least: int = LEAST, most: int | None = None) -> Program:
    """Let operators write their results into the buffers of the collectives that they end in.

    A buffer is made before the first result that is computed into it, and not after the last one.
    So it may be there where most else is alive; then fewer results are computed into it, the last
    ones, so that the peak is no higher than it was.

    Args:
        program: with buckets.
        least: bytes of a result that is worth it.
        most: bytes that may be alive; None: as many as are.
    """
    graph = copy_graph(program.graph)
    alive = np.array(list(timeline(graph)), dtype=np.int64)
    most = int(alive.max(initial=0)) if most is None else most
    order = order_of(graph)
    count = total = 0
    for node in [node for node in graph.nodes if "bucket" in node.meta or LAID in node.meta]:
        bucket: Bucket = node.meta.get(LAID) or node.meta["bucket"]
        pack = node if LAID in node.meta else node.all_input_nodes[0]
        if not bucket.holds_leaves:
            continue
        total += len(bucket.leaves)
        found = sorted(_computed_for(pack, least), key=lambda sent: order[sent.maker])
        while found:
            added = _added(found, pack, order, len(alive))
            if int((alive + added)[added > 0].max(initial=0)) <= most:
                alive += added
                _lower(pack, bucket, found)
                count += len(found)
                break
            found = found[1:]
    if not count:
        return program
    return program.logged(graph, f"place: {count} of {total} gradients computed into their buckets")


def _computed_for(pack: fx.Node, least: int) -> Iterator[Sent]:
    """The gradients that nothing but their bucket reads, by operators that write where told."""
    (buffer,) = tensors_of(pack)
    operands: list[fx.Node] = list(pack.args[0])  # pyright: ignore
    for index, operand in enumerate(operands):
        maker = operand
        # a cast is one of those operators; the rest are views
        while is_cheap(maker) and maker.target not in INTO:
            maker = maker.all_input_nodes[0]
        if maker.target not in INTO or mark_of(maker) is not None:
            continue
        (made,), (value,) = tensors_of(maker), tensors_of(operand)
        whole = extent(made) == (0, made.untyped_storage().nbytes()) and value.is_contiguous()
        same = memory_of(maker) == memory_of(operand) and made.nbytes == value.nbytes
        fits = made.nbytes >= least and value.dtype == buffer.dtype
        if fits and whole and same and _is_read_by(pack, maker, operand):
            yield Sent(maker, index)


def _is_read_by(pack: fx.Node, maker: fx.Node, operand: fx.Node) -> bool:
    """Whether a value is read as this operand alone, through a chain of views."""
    node = maker
    while node is not operand:
        if len(node.users) != 1:
            return False
        (node,) = node.users
        if not is_cheap(node):
            return False
    places: list[fx.Node] = list(pack.args[0])  # pyright: ignore
    return list(operand.users) == [pack] and places.count(operand) == 1


def _added(found: list[Sent], pack: fx.Node, order: dict[fx.Node, int], nodes: int) -> np.ndarray:
    """Bytes that are alive more at each node: those of a buffer that is made earlier, less those
    of results that are no longer beside it."""
    added = np.zeros(nodes, dtype=np.int64)
    end = order[pack]
    added[order[found[0].maker] : end] += tensors_of(pack)[0].nbytes
    for maker, _ in found:
        added[order[maker] : end + 1] -= tensors_of(maker)[0].nbytes
    return added


def _lower(pack: fx.Node, bucket: Bucket, found: list[Sent]) -> None:
    graph, (value,) = pack.graph, tensors_of(pack)
    with graph.inserting_before(found[0].maker):
        name = "slab" if LAID in pack.meta else f"send_{bucket.kind}"
        given: Any = (bucket, value.device)
        buffer = graph.create_node("call_function", buffer_of, given, name=name)
    buffer.meta["val"] = value
    starts = bucket.full.starts
    for maker, index in found:
        (made,) = tensors_of(maker)
        there = tuple(made.shape), tuple(made.stride()), starts[index]
        arguments: Any = (buffer, there, maker.target, *maker.args)
        with graph.inserting_before(maker):
            new = graph.create_node("call_function", placed, arguments, dict(maker.kwargs))
        new.meta = dict(maker.meta)
        with torch.no_grad(), fake_mode([value]):
            new.meta["val"] = value.as_strided(*there)
        maker.replace_all_uses_with(new)
        graph.erase_node(maker)
        refresh(new)
    there = {index for _, index in found}
    missing = tuple(i for i in range(len(bucket.leaves)) if i not in there)
    pack.args = (pack.args[0], bucket, buffer, missing)  # pyright: ignore
    promise = promise_of(pack)
    if promise is not None:
        pack.meta[PROMISE] = promise._replace(what=said(pack))
