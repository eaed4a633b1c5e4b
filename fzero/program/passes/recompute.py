"""Recomputation: backward reads copies of the nodes that make a value, not the value itself.

[Note: recomputation] One mechanism serves a region of `fzero.remat` and a plan for a memory limit:
given the nodes that are not to live until backward, each reader there gets copies of what it lacks,
made from what is still there. A copy stands just before its first reader and serves all later ones,
so a value is computed twice at most. The copy of a random operator has its site, and so draws the
same numbers. What writes, communicates or has an effect is never copied here: a leaf is gathered
again by `regather`.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import fx
from torch._ops import OpOverload

from fzero.functional import islands
from fzero.program.graph import (
    AGAIN,
    BACKWARD,
    FORWARD,
    copy_graph,
    has_effect,
    is_op,
    is_wanted,
    order_of,
    phases,
)
from fzero.program.passes.rewrite import infer, refresh
from fzero.program.program import Program


def recompute(program: Program, values: Collection[str]) -> Program:
    """Let backward compute again what these nodes of forward make, instead of keeping it.

    Args:
        program: functional, its random operators numbered, and before `regather`.
        values: names of nodes. What may not be computed twice is left as it is.

    References: Griewank, Walther, Evaluating Derivatives, ch. 12; Jain et al., Checkmate,
    arXiv:1910.02653. Unlike there, a value is computed at most twice.
    """
    graph = copy_graph(program.graph)
    phase = phases(graph)
    # a result is no reader: it has the value that forward made
    gradients = [n for n in graph.nodes if phase[n] == BACKWARD and n.op != "output"]
    wanted = set(values)
    chosen = {
        n for n in graph.nodes if n.name in wanted and phase[n] == FORWARD and may_be_copied(n)
    }
    again = copied_for(graph, gradients, chosen)
    if not again:
        return program
    graph.eliminate_dead_code(is_impure_node=is_wanted)
    line = f"recompute: {len(again)} nodes computed again in backward"
    return program.logged(graph, line)


def copied_for(
    graph: fx.Graph,
    readers: Iterable[fx.Node],
    inside: Collection[fx.Node],
    made: Callable[[fx.Node, fx.Node], None] = lambda node, copy: None,
) -> Mapping[fx.Node, fx.Node]:
    """Let `readers` read copies of the nodes `inside`; returns the copies. Edits the graph.

    Args:
        readers: in the graph's order: a copy for an early one stands before the later ones too.
        inside: pure nodes.
        made: is told of every node and its copy.
    """
    order = order_of(graph)
    again: dict[fx.Node, fx.Node] = {}
    for reader in list(readers):
        for node in sorted(_missing(reader, inside, again), key=order.__getitem__):
            with graph.inserting_before(reader):
                # what is no copy yet is kept from forward: nothing but `inside` is computed again
                new = graph.node_copy(node, lambda x: again.get(x, x))
            new.meta[AGAIN] = True
            # a value of its own: the original's would share its memory in the walk over lifetimes
            again[node] = infer(new)
            made(node, new)
        for operand in reader.all_input_nodes:
            if operand in again:
                reader.replace_input_with(operand, again[operand])
    for new in again.values():
        refresh(new)
    return again


def _missing(
    reader: fx.Node, inside: Collection[fx.Node], again: Mapping[fx.Node, fx.Node]
) -> set[fx.Node]:
    """What must be computed before `reader` can run, and has not been yet."""
    missing: set[fx.Node] = set()
    todo = [x for x in reader.all_input_nodes if x in inside]
    # a loop, not a recursion: a deep model's chain is longer than Python's stack
    while todo:
        node = todo.pop()
        if node not in missing and node not in again:
            missing.add(node)
            todo += [x for x in node.all_input_nodes if x in inside]
    return missing


def is_pure(node: fx.Node) -> bool:
    """Whether a node may be computed twice, or not at all."""
    if node.target is operator.getitem or node.target is islands.RUN:
        return True
    return isinstance(node.target, OpOverload) and not node.target._schema.is_mutable


def may_be_copied(node: fx.Node) -> bool:
    """Whether a plan may copy a node: it only computes, and on this rank alone."""
    if node.target is operator.getitem:
        return all(may_be_copied(x) for x in node.all_input_nodes if x.op == "call_function")
    target = node.target
    if not isinstance(target, OpOverload) or not is_pure(node) or has_effect(target):
        return False  # what is not recorded may do anything
    # an operator of somebody else's may have effects that its schema does not say
    return target.namespace in ("aten", "prims") or is_op(node, "fzero::restored")
