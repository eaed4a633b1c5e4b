"""A Program: one staged-out function as a graph, with what is known about it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_iter

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(frozen=True)
class Program:
    """One staged-out function: an FX graph of aten operators and collectives. A value: passes make
    new Programs.

    Args:
        name: of the part of the step that it is ("gradients", "update").
        graph: a placeholder per input, in order; one output node with a flat tuple. Every node that
            holds tensors has a fake copy of them in `meta["val"]`.
        inputs: a name for each placeholder.
        outputs: a name for each output.
        constants: tensors that the traced function closed over, by `get_attr` target.
        log: one line per front end and pass: what it did.
        times: how often a step runs it (micro-batches).
        resident: bytes of a step's state that live beside this graph and aren't among its inputs.
        bucket_bytes: most bytes of full leaves that share a collective; 0 if there are none.
        next: what the step runs after it.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    log: tuple[str, ...] = ()
    times: int = 1
    resident: int = 0
    bucket_bytes: int = 0
    next: "Program | None" = None

    def parts(self) -> Iterator["Program"]:
        """This Program and those that follow it in the step."""
        part: Program | None = self
        while part is not None:
            yield part
            part = part.next

    def then(self, following: "Program") -> "Program":
        """The Program that goes on with `following`."""
        return replace(self, next=following)

    def logged(self, graph: fx.Graph, line: str) -> "Program":
        """The same Program with another graph and one more line in its log."""
        return replace(self, graph=graph, log=(*self.log, line))

    def collectives(self) -> "list[Any]":
        """Rows of (kind, leaves, bytes, phase): see `fzero.program.listing.Collective`."""
        from fzero.program.listing import collectives

        return collectives(self)

    def peak_bytes(self) -> int:
        """Most bytes of tensors alive at once on this rank, inputs included."""
        from fzero.program.memory import peak_bytes

        return max(peak_bytes(part) for part in self.parts())

    def __str__(self) -> str:
        from fzero.program.listing import listing

        return listing(self)


Pass = Callable[[Program], Program]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph that can be edited without changing `graph`."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, mapping)
    new.output(output)
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
