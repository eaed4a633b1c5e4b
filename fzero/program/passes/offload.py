"""Offload: what backward reads of forward waits for it in the host's memory.

The copies hide behind what computes, so a plan says when each starts and when it is awaited, by an
estimate of times: a value goes down when forward has read it for the last time, and is awaited when
the link should be done with it; it comes up as late as it can be there for its first reader. Copies
of one way go one after another. What is not down at the end of forward is waited for there, and
what is not up when it is read is waited for then: that is what `stalled` counts.

References: Rhu et al., vDNN, arXiv:1602.08124 (activations to the host, by layers); Ren et al.,
ZeRO-Offload, arXiv:2101.06840.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import fx

from fzero.program.cost import node_cost
from fzero.program.graph import (
    BACKWARD,
    FORWARD,
    copy_graph,
    is_op,
    memory_of,
    order_of,
    phases,
    tensors_of,
    written_operands,
)
from fzero.program.hardware import Hardware
from fzero.program.origin import origin_of, set_origin
from fzero.program.passes.recompute import copied_for
from fzero.program.passes.rewrite import call, is_cheap, refresh
from fzero.program.program import Program
from fzero.program.text import size
from fzero.program.transfers import FROM_HOST, LANDED, TO_HOST


class Stay(NamedTuple):
    """What a value's stay on the host depends on; places are numbers of steps.

    Args:
        nbytes: of the value.
        last: the last step of forward that reads it.
        first: the first step of backward that does.
    """

    nbytes: int
    last: int
    first: int


class Places(NamedTuple):
    """Before which steps the copies of a value start and are awaited.

    Args:
        awaited: on the way down, which starts after the value's last reader.
        back: where the way up starts; it is awaited before the first reader.
    """

    awaited: int
    back: int


def places_of(
    stays: Sequence[Stay], starts: Sequence[float], boundary: int, hardware: Hardware
) -> tuple[list[Places], float]:
    """When the copies of values start and are awaited, and the seconds that a step stands still.

    Args:
        stays: of the values.
        starts: the estimated second at which each step starts, the end as one more.
        boundary: the step that ends forward.
        hardware: whose link it is.

    Examples:
        >>> link = Hardware("link", 1e9, 1e9, overhead=0.0, host_bandwidth=1.0)
        >>> seconds = [float(i) for i in range(11)]  # ten steps of a second, half of them forward
        >>> places_of([Stay(2, 0, 9)], seconds, 5, link)
        ([Places(awaited=3, back=7)], 0.0)
        >>> places_of([Stay(3, 3, 6)], seconds, 5, link)  # two seconds short down, and two up
        ([Places(awaited=5, back=6)], 5.0)
    """
    times = [hardware.crossing_time(stay.nbytes) for stay in stays]
    awaited, back = [0] * len(stays), [0] * len(stays)
    free = 0.0
    for i in sorted(range(len(stays)), key=lambda i: (stays[i].last, i)):
        free = max(starts[stays[i].last + 1], free) + times[i]
        awaited[i] = max(min(bisect_left(starts, free), boundary), stays[i].last + 1)
    stalled = max(free - starts[boundary], 0.0) if stays else 0.0
    order = sorted(range(len(stays)), key=lambda i: (stays[i].first, i))
    start = float("inf")
    for i in reversed(order):
        start = min(starts[stays[i].first], start) - times[i]
        place = bisect_right(starts, start) - 1
        back[i] = min(max(place, boundary + 1), stays[i].first)
    free = late = 0.0
    for i in order:
        free = max(starts[back[i]] + late, free) + times[i]
        late = max(late, free - starts[stays[i].first])
    return [Places(*x) for x in zip(awaited, back, strict=True)], stalled + late


def may_travel(node: fx.Node) -> bool:
    """Whether a node's value could wait on the host as far as the value itself goes: it is one
    tensor that has its storage for itself, and no part of it is there twice."""
    values = tensors_of(node)
    if len(values) != 1 or node.op != "call_function":
        return False
    (x,) = values
    return bool(x.nbytes) and x.untyped_storage().nbytes() == x.nbytes


def offload(program: Program, values: Collection[str], hardware: Hardware) -> Program:
    """Let these values of forward wait in the host's memory until backward reads them.

    Args:
        program: functional; before collectives share buckets.
        values: names of nodes of forward. What can't travel stays: what is returned, written to, or
            read in forward after backward has begun.
        hardware: by whose times the copies are placed.

    Examples:
        >>> import torch, fzero
        >>> def model_fn(params, x):
        ...     return (torch.tanh(x @ params["w"]) @ params["v"]).square().mean()
        >>> step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1))
        >>> params = {"w": torch.ones(8, 64), "v": torch.ones(64, 1)}
        >>> program = step_fn.lower(*step_fn.init(params), torch.ones(512, 8))
        >>> from fzero.program.hardware import GPU
        >>> away = offload(program, ["tanh"], GPU)
        >>> away.host_bytes(), away.log[-1]
        (131072, 'offload: 1 value, 128 KiB, waits for backward on the host')
    """
    graph = copy_graph(program.graph)
    stays = _Stays(graph, frozenset(values))
    stays.views_again()
    rows = stays.rows()
    if not rows:
        return program
    nodes = list(graph.nodes)
    starts = [0.0]
    for node in nodes:
        starts.append(starts[-1] + node_cost(node, hardware).seconds)
    boundary = next(i for i, node in enumerate(nodes) if is_op(node, "fzero::boundary"))
    places, _ = places_of([stay for _, stay in rows], starts, boundary, hardware)
    _send(graph, nodes, rows, places)
    total = sum(stay.nbytes for _, stay in rows)
    what = "1 value" if len(rows) == 1 else f"{len(rows)} values"
    wait = "waits" if len(rows) == 1 else "wait"
    return program.logged(graph, f"offload: {what}, {size(total)}, {wait} for backward on the host")


class _Stays:
    """The chosen values of a graph, and who reads them."""

    def __init__(self, graph: fx.Graph, names: frozenset[str]) -> None:
        self.graph = graph
        phase = phases(graph)
        self.late = [n for n in graph.nodes if phase[n] == BACKWARD and n.op != "output"]
        self.nodes = [
            n for n in graph.nodes if n.name in names and phase[n] == FORWARD and may_travel(n)
        ]
        written = {
            key
            for node in graph.nodes
            for operand in written_operands(node)
            for key in memory_of(operand)
        }
        on: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for key in memory_of(node):
                on.setdefault(key, []).append(node)
        # of each, its views in forward; nothing but views may share its memory
        self.views: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            (key,) = memory_of(node)
            source = node.all_input_nodes[:1]
            others = [n for n in on[key] if n is not node and n not in source]
            views = [n for n in others if phase[n] == FORWARD]
            if key not in written and all(map(is_cheap, views)):
                self.views[node] = views

    def views_again(self) -> None:
        """Let backward make views of its own: one of forward's would keep the value here."""
        inside = {view for views in self.views.values() for view in views}
        copied_for(self.graph, self.late, inside)

    def rows(self) -> list[tuple[fx.Node, Stay]]:
        """What travels."""
        order, phase = order_of(self.graph), phases(self.graph)
        found = []
        for node, views in self.views.items():
            readers = [x for y in (node, *views) for x in y.users]
            late = [order[x] for x in node.users if phase[x] != FORWARD]
            early = [order[x] for x in (node, *readers) if phase[x] == FORWARD]
            stays = any(x.op == "output" for x in readers)
            stays |= any(phase[x] != FORWARD for view in views for x in view.users)
            if late and not stays and max(early) < min(late):
                (x,) = tensors_of(node)
                found.append((node, Stay(x.nbytes, max(early), min(late))))
        return found


def _send(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    rows: Sequence[tuple[fx.Node, Stay]],
    places: Sequence[Places],
) -> None:
    """Insert the copies; all places are of the graph as it was, `nodes`."""
    order = {node: i for i, node in enumerate(nodes)}
    travels = list(zip(rows, places, strict=True))

    def put(node: fx.Node, before: int, target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(nodes[before]):
            new = call(graph, target, *args)
        set_origin(new, origin_of(node))
        return new

    there: dict[fx.Node, fx.Node] = {}
    # in the order of the link: what is inserted first at a place stands first there
    for (node, stay), place in sorted(travels, key=lambda travel: travel[0][1].last):
        device = tensors_of(node)[0].device
        sent = put(node, stay.last + 1, TO_HOST, node, True)
        there[node] = put(node, place.awaited, LANDED, sent, device)
    for (node, stay), place in sorted(travels, key=lambda travel: travel[0][1].first):
        device = tensors_of(node)[0].device
        brought = put(node, place.back, FROM_HOST, there[node], device)
        here = put(node, stay.first, LANDED, brought, device)
        for user in [user for user in node.users if order.get(user, -1) >= stay.first]:
            user.replace_input_with(node, here)
        refresh(here)
