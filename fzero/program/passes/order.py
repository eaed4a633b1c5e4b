"""The collectives of single leaves, in an order that another Program has.

[Note: ranks under a limit] What decides which collectives run is the same on all ranks: which
leaves are gathered again, in which order single leaves are gathered and reduced, how large buckets
are and how early they go. What is computed again, and what waits on the host, is a rank's own. It
moves the places where leaves are read and gradients are ready, and so would move collectives past
each other. Hence they are put into the settled order: a gather may stand earlier than where it is
read, a reduction later than where its gradient is ready. A plan that needs a leaf only after a
reduction which the order has behind that leaf's gather can't be one's own: it is refused.
"""

from collections import Counter
from collections.abc import Sequence

from torch import fx

from fzero.program.graph import copy_graph, order_of, segments
from fzero.program.passes.groups import asked_of
from fzero.program.passes.rewrite import is_cheap, is_gather, is_reduction, legalise
from fzero.program.program import Program


class OutOfOrder(Exception):
    """A Program can't have its collectives in an order."""


def order_of_leaves(program: Program) -> tuple[str, ...]:
    """The collectives of single leaves, one text each."""
    return tuple(_labelled(program.graph))


def in_order(program: Program, order: Sequence[str]) -> Program:
    """Launch gathers earlier and reductions later, so that all stand in an order.

    Args:
        program: its collectives one node of one leaf each.
        order: `order_of_leaves` of another one.

    Raises:
        OutOfOrder: it has others, or computes what an earlier one sends from what a later one
            brings.
    """
    if list(_labelled(program.graph)) == list(order):
        return program
    graph = copy_graph(program.graph)
    mine = _labelled(graph)
    if mine.keys() != set(order) or len(mine) != len(order):
        raise OutOfOrder
    nodes = [mine[label] for label in order]
    place = order_of(graph)  # where a node stands; of a moved one, the node that it stands beside
    following: fx.Node | None = None
    for node in reversed(nodes):
        if is_gather(node):
            if following is not None and place[node] > place[following]:
                for one in (*_sent(node), node):
                    _first_of(following).prepend(one)
                place[node] = place[following]
            following = node
    before: fx.Node | None = None
    for node in nodes:
        if not is_gather(node) and before is not None and place[node] < place[before]:
            before.append(node)
            place[node] = place[before]
        if before is None or place[node] >= place[before]:
            before = node
    legalise(graph)  # what reads a reduction goes after it
    if list(_labelled(graph)) != list(order):
        raise OutOfOrder
    return program.logged(graph, f"order: {len(order)} collectives as ranks have settled them")


def _labelled(graph: fx.Graph) -> dict[str, fx.Node]:
    """Each collective by what it does to which leaf, in the graph's order."""
    of = segments(graph)
    seen: Counter[str] = Counter()
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if is_gather(node) or is_reduction(node):
            number, phase = of[node]
            text = f"{node.target} {asked_of(node).leaf.name} {phase} {number}"
            seen[text] += 1
            found[f"{text} {seen[text]}"] = node
    return found


def _sent(gather: fx.Node) -> list[fx.Node]:
    """The views and casts of a shard that only this gather reads, in order."""
    found: list[fx.Node] = []
    (x, *_) = gather.all_input_nodes
    while is_cheap(x) and len(x.users) == 1:
        found.append(x)
        (x,) = x.all_input_nodes
    return found[::-1]


def _first_of(gather: fx.Node) -> fx.Node:
    """The first of what is moved with a gather."""
    return next(iter((*_sent(gather), gather)))
