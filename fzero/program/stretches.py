"""Stretches of a Program: consecutive pure operators that something else may compile.

[Note: stretches] A stretch lies between two nodes that stay as they are: a collective or what fills
and empties its bucket, a wait, what writes in place, what draws random numbers, an island, a mark
of a phase. So a stretch changes neither when collectives are launched and awaited nor what is
random, and never joins a value of forward with its recomputation in backward. It ends where a layer
of the model ends, too: layers of one kind then are one stretch, which is compiled once, and values
die near where they died.

Views belong to nobody: a stretch makes its own of what it is given, and gives whole values back, of
which the Program makes views again. So no compiler has to know which values share memory.
"""

import operator
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fzero.program.graph import has_effect, is_mutable, is_op, tensors_of, written_operands
from fzero.program.memory import storages
from fzero.program.origin import NOWHERE, origin_of
from fzero.program.sections import layer_of
from fzero.program.sites import SITE


@dataclass(frozen=True)
class Stretch:
    """Consecutive operators, and what they read and make.

    Args:
        nodes: of the Program's graph, each after what it reads: operators, parts of their results,
            and views.
        operators: the first of these, in the graph's order.
        inputs: nodes from outside that it reads.
        outputs: its own that others read, none of which is a view.
        layer: of the model that they are in.
    """

    nodes: tuple[fx.Node, ...]
    operators: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    layer: str

    @property
    def last(self) -> fx.Node:
        """The last of its operators."""
        return self.operators[-1]

    def graph(self) -> fx.Graph:
        """It alone, with names that depend on nothing else: those that do the same look alike."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.inputs):
            mapping[node] = graph.placeholder(f"x{i}")
            mapping[node].meta = {"val": node.meta["val"]}
        for i, node in enumerate(self.nodes):
            args, kwargs = map_arg((node.args, node.kwargs), mapping.__getitem__)
            new = graph.create_node("call_function", node.target, args, kwargs, name=f"v{i}")
            new.meta = {"val": node.meta.get("val")}
            mapping[node] = new
        graph.output(tuple(mapping[node] for node in self.outputs))
        return graph


def stretches_of(graph: fx.Graph, at_least: int = 2) -> list[Stretch]:
    """The stretches of a graph in order; see [Note: stretches].

    Args:
        at_least: operators that are worth a call.
    """
    return [_stretch(run) for run in _runs(graph) if len(run) >= at_least]


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Consecutive operators that may be compiled together."""
    run: list[fx.Node] = []
    layer = None
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or is_view(node) or _is_part(node):
            continue
        origin = origin_of(node)
        here = layer if origin == NOWHERE else layer_of(origin.module)
        computes = _computes(node)
        if run and not (computes and here == layer):
            yield run
            run = []
        layer = here
        if computes:
            run.append(node)
    if run:
        yield run


def _stretch(run: Sequence[fx.Node]) -> Stretch:
    """The operators of a run, with the views that they read, wherever those stand."""
    members: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}
    for node in run:
        todo = [node]
        while todo:  # views of views, the outermost last
            missing = [x for x in todo[-1].all_input_nodes if x not in members and x not in inputs]
            views = [x for x in missing if is_view(x)]
            inputs.update((x, None) for x in missing if not is_view(x))
            if views:
                todo.extend(views)
            else:
                members[todo.pop()] = None
        members.update((x, None) for x in node.users if x.target is operator.getitem)
    whole = [x for x in members if isinstance(x.meta.get("val"), Tensor) and not is_view(x)]
    outputs = [x for x in whole if _read_outside(x, members)]
    layer = next((layer_of(origin_of(x).module) for x in run if origin_of(x) != NOWHERE), "")
    return Stretch(tuple(members), tuple(run), tuple(inputs), tuple(outputs), layer)


def _read_outside(node: fx.Node, members: Container[fx.Node]) -> bool:
    """Whether a node, or a view of it, is read by what is not among `members`."""
    todo, seen = [node], set()
    while todo:
        for user in todo.pop().users:
            if is_view(user) and user not in seen:
                seen.add(user)
                todo.append(user)
            elif not is_view(user) and user not in members:
                return True
    return False


def with_stretches(
    graph: fx.Graph, stretches: Sequence[Stretch], run: Callable[[Stretch], Callable[..., Any]]
) -> fx.Graph:
    """The graph with one call in the place of each stretch, which takes a list and gives a list.

    Args:
        run: what is called for a stretch.
    """
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    last = {stretch.last: stretch for stretch in stretches}
    inside = {x for stretch in stretches for x in stretch.nodes if not is_view(x)}
    pending: list[fx.Node] = []  # views of what a stretch that is not there yet makes

    def copy(node: fx.Node) -> None:
        mapping[node] = new.node_copy(node, mapping.__getitem__)

    for node in graph.nodes:
        if node.op == "output":
            copy(node)
            mapping[node].meta = dict(node.meta)
        elif node in inside:
            pass
        elif is_view(node) and any(x not in mapping for x in node.all_input_nodes):
            pending.append(node)
        else:
            copy(node)
        if node in last:
            stretch = last[node]
            given = [mapping[x] for x in stretch.inputs]
            made = new.create_node("call_function", run(stretch), (given,), name="stretch")
            made.meta["val"] = [x.meta["val"] for x in stretch.outputs]
            for i, output in enumerate(stretch.outputs):
                mapping[output] = new.call_function(operator.getitem, (made, i))
                mapping[output].meta["val"] = output.meta["val"]
            for view in pending:
                if all(x in mapping for x in view.all_input_nodes):
                    copy(view)
            pending = [view for view in pending if view not in mapping]
    for node in reversed(list(new.nodes)):
        if not node.users and node.op == "call_function" and is_view(node):
            new.erase_node(node)
    return new


# ----------------------------------------------------------------------------- what a node is
def is_view(node: fx.Node) -> bool:
    """Whether a node makes no memory: a view of its operand, or one of several views of it."""
    if node.op != "call_function" or is_mutable(node) or not tensors_of(node):
        return False
    if node.target is operator.getitem:
        return not _is_part(node)
    there = storages(node.all_input_nodes)
    aten = isinstance(node.target, torch._ops.OpOverload)
    return aten and all(x.untyped_storage()._cdata in there for x in tensors_of(node))


def _is_part(node: fx.Node) -> bool:
    """Whether a node is one of the values that an operator made."""
    return node.target is operator.getitem and not is_view(node.all_input_nodes[0])


def makes_memory(node: fx.Node) -> bool:
    """Whether a node is an operator, of whatever kind, that is more than a view."""
    return node.op == "call_function" and not is_view(node) and not _is_part(node)


def _computes(node: fx.Node) -> bool:
    """Whether a node is an operator that makes dense tensors of dense tensors and does no more."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if is_mutable(node) or written_operands(node) or has_effect(target) or is_view(node):
        return False
    if SITE in node.meta or is_op(node, "aten::mkldnn_rnn_layer"):
        return False
    # a generator, for one, has no value: what draws from it stays
    if not all(isinstance(x.meta.get("val"), Tensor) for x in node.all_input_nodes):
        return False
    made = tensors_of(node)
    values = [*made, *(y for x in node.all_input_nodes for y in tensors_of(x))]
    return bool(made) and all(x.layout is torch.strided and not x.is_complex() for x in values)
