"""Drop what costs a call and computes nothing."""

import torch
from torch import fx

from fzero.program.graph import copy_graph, is_op, is_wanted, tensors_of
from fzero.program.program import Program

_IDENTITIES = ("aten::detach", "aten::detach_", "aten::alias", "aten::lift_fresh")
_RESHAPES = ("aten::view", "aten::_unsafe_view")
_PURE_VIEWS = ("aten::t", "aten::view", "aten::permute", "aten::transpose", "aten::unsqueeze")


def clean(program: Program) -> Program:
    """Remove dead nodes, identities, undone transpositions, views of views and repeated views.

    The graph must be functional: then a view and its operand are interchangeable.
    """
    graph = copy_graph(program.graph)
    before = len(graph.nodes)
    seen: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        same = _same_as(node) or _seen_before(node, seen)
        if same is not None:
            # without `substitute`: only what has the same strides is taken for the same
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=is_wanted)
    return program.logged(graph, f"clean: {before} -> {len(graph.nodes)} nodes")


def _same_as(node: fx.Node) -> fx.Node | None:
    """An earlier node with the same value, if there is one. May shorten the node's operand."""
    if is_op(node, *_IDENTITIES):
        return node.all_input_nodes[0]
    if is_op(node, "aten::t") and is_op(node.all_input_nodes[0], "aten::t"):
        return node.all_input_nodes[0].all_input_nodes[0]
    if _is_reshape(node):
        source = node.all_input_nodes[0]
        # Strides that allow two steps may not allow one; contiguous ones always do.
        if _is_reshape(source) and _contiguous(source.all_input_nodes[0]):
            node.replace_input_with(source, source.all_input_nodes[0])
            source = source.all_input_nodes[0]
        (old,), (new,) = tensors_of(source), tensors_of(node)
        if old.shape == new.shape and old.stride() == new.stride():
            return source
    return None


def _seen_before(node: fx.Node, seen: dict[object, fx.Node]) -> fx.Node | None:
    if not is_op(node, *_PURE_VIEWS):
        return None
    # As text: lists among the arguments can't be hashed, and a node's name is unique.
    key = (node.target, str(node.args))
    return None if seen.setdefault(key, node) is node else seen[key]


def _is_reshape(node: fx.Node) -> bool:
    # a view in another dtype has the name, too, and other values
    return is_op(node, *_RESHAPES) and node.target is not torch.ops.aten.view.dtype


def _contiguous(node: fx.Node) -> bool:
    return all(x.is_contiguous() for x in tensors_of(node))
