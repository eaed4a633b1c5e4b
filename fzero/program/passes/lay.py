"""Lay small gradients end to end, as what they update lies: see [Note: end to end]."""

import operator
from collections import Counter

from torch import fx

from fzero.distributed.buckets import ALL_REDUCE, Bucket, pack_flat, unpack_flat
from fzero.layout import LeafLayout
from fzero.layout.end_to_end import slabs
from fzero.program.categories import GRADIENTS
from fzero.program.graph import copy_graph, order_of, output_node, tensors_of
from fzero.program.memory import timeline
from fzero.program.passes.place import place
from fzero.program.passes.rewrite import call
from fzero.program.placed import LAID
from fzero.program.program import Program

# Bytes of a result that is computed in its place: below, one call copies many.
_LEAST = 2**12
# Share of the peak that it may cost: what is copied is there twice for a moment, and memory that
# holds many is there from the first on.
_SLACK = 0.02


def lay(program: Program) -> Program:
    """Compute small gradients into slabs that hold many; the smallest are copied there.

    Where it would cost memory, they stay as they are.

    Args:
        program: of gradients that no rank reduces.
    """
    most = _peak(program) + int(_SLACK * program.peak_bytes())
    laid = place(_laid(program), _LEAST, most)
    return laid if _peak(laid) <= most else program


def _peak(program: Program) -> int:
    return max(timeline(program.graph), default=0)


def _laid(program: Program) -> Program:
    graph = copy_graph(program.graph)
    output = output_node(graph)
    results: list[fx.Node] = list(output.args[0])  # pyright: ignore
    times, order = Counter(results), order_of(graph)
    rows = zip(results, program.outputs, program.output_categories, strict=False)
    # what is returned twice, or is an input, has a place already
    grads = {
        node: name
        for node, name, category in rows
        if category == GRADIENTS and times[node] == 1 and node.op == "call_function"
    }
    values = [tensors_of(node)[0] for node in grads]
    found = [[[*grads][i] for i in slab] for slab in slabs(values, [*grads.values()])]
    for nodes in found:
        shapes = [tuple(tensors_of(node)[0].shape) for node in nodes]
        dtype = tensors_of(nodes[0])[0].dtype
        leaves = [
            LeafLayout(grads[x], shape, dtype) for x, shape in zip(nodes, shapes, strict=True)
        ]
        bucket = Bucket(ALL_REDUCE, tuple(leaves), dtype, 1, "")
        with graph.inserting_after(max(nodes, key=order.__getitem__)):
            pack = call(graph, pack_flat, nodes, bucket, name="pack_gradients")
        pack.meta[LAID] = bucket
        with graph.inserting_before(pack.next):
            parts = call(graph, unpack_flat, pack, bucket, name="unpack_gradients")
            each = [call(graph, operator.getitem, parts, i) for i in range(len(nodes))]
        for node, part in zip(nodes, each, strict=True):
            output.replace_input_with(node, part)
    if not found:
        return program
    count = sum(map(len, found))
    return program.logged(graph, f"lay: {count} gradients in {len(found)} slabs")
