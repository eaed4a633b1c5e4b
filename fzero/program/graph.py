"""What passes ask of a graph: its nodes, their values, the phase that each belongs to."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_iter

from fzero.distributed.buckets import unpack_into

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph that can be edited without changing `graph`."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, mapping)
    # graph_copy leaves the output to the caller, and with it what is noted there
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


def dense_of(node: fx.Node) -> list[Tensor]:
    """Those of a node's tensors that have a storage: a sparse one is made of others."""
    return [x for x in tensors_of(node) if x.layout is torch.strided]


def memory_of(node: fx.Node) -> list[int]:
    """The storages that the values of a node are on."""
    return [x.untyped_storage()._cdata for x in dense_of(node)]


def order_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Each node's number in the graph's order."""
    return {node: i for i, node in enumerate(graph.nodes)}


def is_op(node: fx.Node, *names: str) -> bool:
    """Whether a node calls an operator of one of these qualified names, such as "fzero::gather"."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in names


def phases(graph: fx.Graph) -> dict[fx.Node, str]:
    """Which phase of the step each node belongs to."""
    return {node: phase for node, (_, phase) in segments(graph).items()}


def segments(graph: fx.Graph) -> dict[fx.Node, tuple[int, str]]:
    """Which stretch of the graph each node belongs to, by number, and the phase that this is.

    A function may go forward and back many times: each forward, each backward, and what is between
    them, is a segment. Marks in the graph say where one begins.
    """
    marks = [node for node in graph.nodes if _begins(node)]
    # without a mark before it, what a boundary ends is forward
    forward = bool(marks) and is_op(marks[0], "fzero::boundary")
    number, phase = 0, FORWARD if forward else UPDATE
    result = {}
    for node in graph.nodes:
        begins = _begins(node)
        if begins == BACKWARD:  # the boundary is the last of forward
            result[node] = (number, phase)
            number, phase = number + 1, begins
            continue
        if begins is not None:
            number, phase = number + 1, begins
        result[node] = (number, phase)
    return result


def _begins(node: fx.Node) -> str | None:
    """The phase that begins at a node, if one does."""
    if is_op(node, "fzero::boundary"):
        return BACKWARD
    return str(node.args[0]) if is_op(node, "fzero::phase") else None


AGAIN = "computed_again"


def is_again(node: fx.Node) -> bool:
    """Whether a node computes again in backward what forward did."""
    return node.meta.get(AGAIN, False)


def operands(node: fx.Node) -> list[fx.Node]:
    """What a node reads, in the order of its arguments, each as often as it is passed."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def is_mutable(node: fx.Node) -> bool:
    """Whether a node writes into an operand."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return node.op == "call_function" and "val" not in node.meta  # a function that returns nothing


def has_effect(target: Any) -> bool:
    """Whether an operator returns nothing and writes nothing: it asserts, say, or marks a place."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    # foreach operators in place return nothing either
    return not target._schema.returns and not target._schema.is_mutable


def is_wanted(node: fx.Node) -> bool:
    """Whether a node has to stay though nobody reads it."""
    return node.op in ("placeholder", "output") or is_mutable(node) or has_effect(node.target)


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose values an operator changes; a change of sizes or strides alone is none."""
    # a plain function of ours has no schema that says so
    target = node.target
    if target is unpack_into:
        return list(node.args[2])  # pyright: ignore
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.inplace_view in target.tags:
        return []
    schema = target._schema
    # their schemas hide it: in training they write the running statistics
    if schema.name in ("aten::native_batch_norm", "aten::cudnn_batch_norm"):
        statistics: list[Any] = [a for a in node.args[3:5] if isinstance(a, fx.Node)]
        return statistics if any(node.args[5:6]) else []
    # by name, since an argument that is written may come by position or by keyword
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    found: list[fx.Node] = []
    # theirs say more than is so: gradients are written where they are unscaled on the way
    unscaled = schema.name.startswith("aten::_fused_") and given.get("grad_scale") is None
    for argument in schema.arguments:
        if unscaled and argument.name == "grads":
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(given.get(argument.name), found.append)
    return found


def inputs_written_in_place(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders that a graph may write into, directly or through views."""
    operands = {x for node in graph.nodes if is_mutable(node) for x in node.all_input_nodes}
    # by storage, for a view of an input is written as often as the input
    storages = {storage for node in operands for storage in memory_of(node)}
    return {node for node in placeholders(graph) if not storages.isdisjoint(memory_of(node))}


class Held(NamedTuple):
    """Bytes that a rank holds for a step, besides what is in its Programs' graphs.

    Args:
        bytes: on this rank.
        category: see `fzero.program.categories`.
        name: of the leaf or input.
    """

    bytes: int
    category: str
    name: str


class Part(Protocol):
    """A part of a step as listings, memory and checks read it: a `Program` is one."""

    @property
    def name(self) -> str: ...
    @property
    def graph(self) -> fx.Graph: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def constants(self) -> Mapping[str, Any]: ...
    @property
    def log(self) -> tuple[str, ...]: ...
    @property
    def times(self) -> int: ...
    @property
    def resident(self) -> tuple[Held, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def input_categories(self) -> tuple[str, ...]: ...
    @property
    def output_categories(self) -> tuple[str, ...]: ...
    @property
    def reduced_over(self) -> tuple[str, ...]: ...
