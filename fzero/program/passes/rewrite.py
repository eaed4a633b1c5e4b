"""What the passes share: asking what a node is, making new nodes, keeping a graph in order."""

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_iter

from fzero.distributed.buckets import KINDS, asked_for
from fzero.distributed.mesh import Axis
from fzero.layout import LeafLayout
from fzero.program.graph import is_op, order_of, tensors_of
from fzero.program.strides import alike, shown

# Operators that compute nothing new: views of their first operand, or casts of it. What they make
# of a gathered leaf is thrown away and made again with it.
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "t",
        "transpose",
        "permute",
        "view",
        "_unsafe_view",
        "reshape",
        "expand",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "narrow",
        "alias",
        "detach",
        "unbind",
        "split",
        "split_with_sizes",
        "chunk",
        "as_strided",
        "movedim",
        "unflatten",
        "diagonal",
        "lift_fresh",
        "_to_copy",
        "clone",
    )
)


def is_gather(node: fx.Node) -> bool:
    """Whether a node gathers one leaf."""
    return is_op(node, *_GATHERS)


def is_reduction(node: fx.Node) -> bool:
    """Whether a node reduces one leaf's gradient over an axis."""
    return is_op(node, *_REDUCTIONS)


def carried_by(node: fx.Node) -> tuple[str, LeafLayout, Axis]:
    """The kind of bucket, the leaf and the axis of a collective of one leaf."""
    target: Any = node.target
    (value,) = tensors_of(node.all_input_nodes[0])
    return asked_for(target._schema.name, value, node.args[1:])


_GATHERS = [name for kind in KINDS.values() if kind.gathers for name in kind.operators]
_REDUCTIONS = [name for kind in KINDS.values() if not kind.gathers for name in kind.operators]


def is_cheap(node: fx.Node) -> bool:
    """Whether a node is a view, a cast, or one part of a multiple view, of a single operand."""
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name in _VIEWS
        and len(node.all_input_nodes) == 1
    )


def substitute(node: fx.Node, new: fx.Node) -> None:
    """Let all that reads `node` read `new`, laid out in memory as `node` was, and erase `node`.

    See [Note: strides are part of a value].
    """
    (old,), (value,) = tensors_of(node), tensors_of(new)
    if not alike(old, value):
        with node.graph.inserting_after(new):
            new = call(node.graph, torch.ops.fzero.restored.default, new, old.stride())
    assert alike(old, *tensors_of(new)), f"{new} is not what {node} was"
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    refresh(new)


def infer(node: fx.Node) -> fx.Node:
    """Give a new node, or a copy, its fake value by running it on those of its operands.

    A copy has the layout in memory that the recording has of it: whoever gives it other operands
    lays them out as those were.
    """
    recorded = tensors_of(node)
    _infer(node)
    if recorded:
        found = tensors_of(node)
        same = len(found) == len(recorded) and all(map(alike, found, recorded))
        assert same, (
            f"{node.format_node()} was {[*map(shown, recorded)]}, is {[*map(shown, found)]}"
        )
    return node


def _infer(node: fx.Node) -> fx.Node:
    assert callable(node.target)
    if node.target is operator.getitem:  # most calls of all; needs no fake mode
        source, index = node.args
        node.meta["val"] = source.meta["val"][index]  # pyright: ignore
        return node
    values = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    # a copy of a node without operands (zeros, empty, ...) still has the original's value
    mode = fake_mode([*(n.meta["val"] for n in node.all_input_nodes), node.meta.get("val")])
    with torch.no_grad(), mode:
        node.meta["val"] = node.target(*values[0], **values[1])  # pyright: ignore
    return node


def refresh(node: fx.Node) -> None:
    """Infer anew the views and casts of a node that took another's place.

    Their fake values would go on sharing memory with the old one, which the walk over lifetimes
    would then count twice.
    """
    for user in node.users:
        if is_cheap(user):
            refresh(infer(user))


def fake_mode(values: Iterable[Any]) -> FakeTensorMode:
    """The mode that the fake tensors among `values` belong to."""
    return next(x.fake_mode for x in tree_iter(list(values)) if isinstance(x, FakeTensor))


def call(
    graph: fx.Graph, target: Callable[..., Any], *args: Any, name: str | None = None
) -> fx.Node:
    """A new call at the graph's insert point, with its fake value."""
    node = graph.create_node("call_function", target, args, {}, name=name)
    return infer(node)


def legalise(graph: fx.Graph) -> None:
    """Move every node that stands before one of its operands to just after the last of them."""
    order = order_of(graph)
    # most orders are legal already, and every move of a node asks
    if all(order[x] < i for node, i in order.items() for x in node.all_input_nodes):
        return
    waiting: dict[fx.Node, int] = {}
    blocked: dict[fx.Node, list[fx.Node]] = {}
    placed: set[fx.Node] = set()
    result: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        todo = [node]
        while todo:
            ready = todo.pop()
            result.append(ready)
            placed.add(ready)
            freed = []
            for user in blocked.pop(ready, ()):
                waiting[user] -= 1
                if waiting[user] == 0:
                    freed.append(user)
            # a stack: the one that stood first is to come off first
            todo.extend(reversed(freed))

    for node in list(graph.nodes):
        missing = [x for x in node.all_input_nodes if x not in placed]
        if not missing:
            place(node)
            continue
        waiting[node] = len(missing)
        # until the last operand stands, which may be one that waits itself
        for operand in missing:
            blocked.setdefault(operand, []).append(node)
    assert len(result) == len(order)
    for before, after in itertools.pairwise(result):
        before.append(after)
