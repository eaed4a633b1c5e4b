"""A Program: one staged-out function as a graph, with what is known about it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fzero.program.graph import placeholders, tensors_of


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

    def verify(self) -> None:
        """Check that every value has the shape, dtype and strides that were recorded.

        Raises:
            TraceError: with the value, what was recorded, and what it is.
        """
        from fzero.program.verify import verify

        verify(self)

    def __str__(self) -> str:
        from fzero.program.listing import listing

        return listing(self)


Pass = Callable[[Program], Program]


READS = "reads"


def note_reads(graph: fx.Graph) -> None:
    """Note at each node what it reads while recording: fake tensors, a list an operand.

    `Program.verify` holds passes to it.
    """
    for node in graph.nodes:
        node.meta[READS] = [tensors_of(operand) for operand in operands(node)]


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
    """Whether an operator returns nothing: it is there for what it does, such as to assert."""
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns


def is_wanted(node: fx.Node) -> bool:
    """Whether a node has to stay though nobody reads it."""
    return node.op in ("placeholder", "output") or is_mutable(node) or has_effect(node.target)


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose values an operator changes; a change of sizes or strides alone is none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.inplace_view in target.tags:
        return []
    schema = target._schema
    if schema.name in ("aten::native_batch_norm", "aten::cudnn_batch_norm"):
        statistics: list[Any] = [a for a in node.args[3:5] if isinstance(a, fx.Node)]
        return statistics if any(node.args[5:6]) else []
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    found: list[fx.Node] = []
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(given.get(argument.name), found.append)
    return found


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders that a graph may write into, directly or through views."""
    operands = {x for node in graph.nodes if is_mutable(node) for x in node.all_input_nodes}
    storages = {x.untyped_storage()._cdata for node in operands for x in tensors_of(node)}
    return {
        node
        for node in placeholders(graph)
        if any(x.untyped_storage()._cdata in storages for x in tensors_of(node))
    }
