"""What passes ask of a graph: its nodes, their values, the phase that each belongs to."""

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_iter

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph that can be edited without changing `graph`."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, mapping)
    new.output(output).meta = dict(output_node(graph).meta)
    return new


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's one output node."""
    return next(iter(reversed(graph.nodes)))


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The graph's inputs in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The (fake) tensors that a node holds."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):  # the passes ask often, and walking a tree is slow
        return [value]
    return [x for x in tree_iter(value) if isinstance(x, Tensor)]


def order_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Each node's place in the graph."""
    return {node: i for i, node in enumerate(graph.nodes)}


def is_op(node: fx.Node, *names: str) -> bool:
    """Whether a node calls an operator of one of these qualified names, such as "fzero::gather"."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in names


def boundary_of(graph: fx.Graph) -> fx.Node | None:
    """The node where forward ends, or None where there is no backward."""
    return next((node for node in graph.nodes if is_op(node, "fzero::boundary")), None)


def phases(graph: fx.Graph, default: str = UPDATE) -> dict[fx.Node, str]:
    """Which phase of the step each node belongs to."""
    boundary = boundary_of(graph)
    if boundary is None:
        return dict.fromkeys(graph.nodes, default)
    phase, result = FORWARD, {}
    for node in graph.nodes:
        result[node] = phase
        if node is boundary:
            phase = BACKWARD
    return result
