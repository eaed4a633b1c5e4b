"""Results in memory of their own, or in that of an input that the caller has given away."""

from collections.abc import Sequence

import torch
from torch import fx

from fzero.functional.memory import extent
from fzero.program.graph import (
    copy_graph,
    memory_of,
    order_of,
    output_node,
    placeholders,
    tensors_of,
    written_operands,
)
from fzero.program.passes.rewrite import call
from fzero.program.program import Program
from fzero.program.promises import overwritten, settled


def own_outputs(program: Program, donated: Sequence[bool]) -> Program:
    """Write results over donated inputs as soon as nobody reads those any more.

    A donated input takes the first result of its shape, dtype and strides. A result that would be
    in the memory of an input that is not donated is copied, the caller's tensors stay its own; and
    so is one in the memory of another result (gradients of a sum): who writes to one, as who clips
    in place, means that one. Of a function that writes into donated inputs itself, results may lie
    in those, and nothing else is written there: what it has left is what its caller reads.

    Args:
        program: functional, but for writes into donated inputs.
        donated: one flag an input; those that come after are not.
    """
    graph = copy_graph(program.graph)
    inputs = placeholders(graph)
    output = output_node(graph)
    results: list[fx.Node] = list(output.args[0])  # pyright: ignore
    free = [node for node, given in zip(inputs, donated, strict=False) if given]
    writes = _writes(graph)
    in_place = any(_storage(node) in writes for node in free)
    memory = {_storage(node) for node in inputs if memory_of(node)}
    memory -= {_storage(node) for node in free} if in_place else set()
    taken: dict[int, fx.Node] = {}
    for i, result in enumerate(results):
        if result in free:  # as it came in
            taken[i] = result
            free.remove(result)
    # only now: a result that is an input must find that input free
    for i, result in enumerate(() if in_place else results):
        found = next((n for n in free if i not in taken and _same(n, result)), None)
        if found is not None:
            taken[i] = found
            free.remove(found)
    copies = 0
    first = next((n for n in graph.nodes if n.op != "placeholder"), output)
    for i, result in enumerate(results):
        if _storage(result) in memory and taken.get(i) is not result:
            # before anything is written over it
            place = first if result.op == "placeholder" else result.next
            with graph.inserting_before(place):
                results[i] = call(graph, torch.ops.aten.clone.default, result)
            copies += 1
    written = 0
    reads, order = _reads(graph), order_of(graph)
    apart: list[fx.Node] = []
    for i, result in enumerate(results):
        if i in taken:
            continue
        if any(_overlap(result, other) for other in apart):
            last = max((result, *writes.get(_storage(result), ())), key=order.__getitem__)
            with graph.inserting_after(last):
                results[i] = call(graph, torch.ops.aten.clone.default, result)
            copies += 1
        else:
            apart.append(result)
    for i, target in taken.items():
        if results[i] is target:
            continue
        # a result is there when the last operator in place has written it
        before = (*reads.get(_storage(target), ()), *writes.get(_storage(results[i]), ()))
        after = max((results[i], *before), key=order.__getitem__)
        # nothing goes between the placeholders
        if after.op == "placeholder":
            after = inputs[-1]
        with graph.inserting_after(after):
            results[i] = call(graph, torch.ops.aten.copy_.default, target, results[i])
        overwritten(target)
        written += 1
    output.args = (results,)
    settled(output)
    if not copies and not written:
        return program
    line = f"donate: {written} results written over inputs, {copies} copied out of them or others"
    return program.logged(graph, line)


def _storage(node: fx.Node) -> int:
    found = memory_of(node)
    return found[0] if found else -1


def _overlap(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values may have elements in common; leaves of one bucket have none."""
    if _storage(a) != _storage(b) or _storage(a) == -1:
        return False
    (x,), (y,) = tensors_of(a), tensors_of(b)
    if not x.numel() or not y.numel():
        return False
    (start, stop), (first, last) = extent(x), extent(y)
    return start < last and first < stop


def _same(a: fx.Node, b: fx.Node) -> bool:
    (x,), (y,) = tensors_of(a), tensors_of(b)
    # strides too: the result that comes back has those that were recorded
    return (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device)


def _reads(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """By storage, the nodes that read it."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes if node.op != "output" else ():
            for storage in memory_of(operand):
                found.setdefault(storage, []).append(node)
    return found


def _writes(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """By storage, the nodes that write into it after it is made."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for operand in written_operands(node):
            for storage in memory_of(operand):
                found.setdefault(storage, []).append(node)
    return found
