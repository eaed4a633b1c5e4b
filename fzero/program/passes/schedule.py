"""When each bucket's collective is launched and when it is waited for."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from fzero.distributed.mesh import is_gloo
from fzero.program.graph import FORWARD, UPDATE, copy_graph, order_of
from fzero.program.memory import is_wait
from fzero.program.passes.rewrite import is_cheap, legalise
from fzero.program.program import Program
from fzero.program.promises import TURN, promise_of


class Early(NamedTuple):
    """How many buckets early gathers are launched.

    Args:
        forward, backward: so many, in the two directions.
        last: of forward's gathers, how many at its end are launched where they are read.
        first: the same of backward's, at its beginning. Between the two is where most is alive.
    """

    forward: int = 0
    backward: int = 0
    last: int = 0
    first: int = 0

    @classmethod
    def always(cls, prefetch: int | None, graph: fx.Graph) -> "Early":
        """As `Config.prefetch` says; None: 1, but 0 over gloo.

        Gloo moves bytes on the cores that compute, and a buffer that is there early takes memory.
        """
        if prefetch is None:
            groups = {node.meta["bucket"].group for node in graph.nodes if "bucket" in node.meta}
            prefetch = 0 if any(map(is_gloo, groups)) else 1
        return cls(prefetch, prefetch)

    def depths(self, count: int, *, forward: bool) -> list[int]:
        """Buckets ahead for each gather of a segment.

        >>> Early(forward=2, last=1).depths(4, forward=True)
        [2, 2, 2, 0]
        >>> Early(backward=1, first=1).depths(3, forward=False)
        [0, 1, 1]
        """
        if forward:
            late = min(self.last, count)
            return [self.forward] * (count - late) + [0] * late
        late = min(self.first, count)
        return [0] * late + [self.backward] * (count - late)


def schedule(
    program: Program, *, prefetch: int | None = None, early: Early | None = None
) -> Program:
    """Overlap: launch gathers early, await a reduction once the next is ready.

    Args:
        program: with buckets.
        prefetch: see `bucket`.
        early: takes its place.
    """
    graph = copy_graph(program.graph)
    early = early or Early.always(prefetch, graph)
    arrange(graph, early)
    line = f"schedule: gathers launched {_told(early)} ahead, one reduction in flight"
    return replace(program.logged(graph, line), early=tuple(early))


def _told(early: Early) -> str:
    if early.forward == early.backward and not early.last and not early.first:
        return str(early.forward)
    return (
        f"{early.forward} (but forward's last {early.last}) and {early.backward} (but backward's "
        f"first {early.first})"
    )


def arrange(graph: fx.Graph, early: Early) -> None:
    """Do it to a graph, or to a sketch of one."""
    launches = [node for node in graph.nodes if "bucket" in node.meta]
    for gathers in gathers_of(launches):
        depths = early.depths(len(gathers), forward=gathers[0].meta["phase"] == FORWARD)
        for turn, (node, depth) in enumerate(zip(gathers, depths, strict=True)):
            # the first of a segment has no wait before it to overlap with
            if turn and depth:
                # before that wait, not after it: then both are in flight at once
                _move_before(launch_part(node), wait_of(gathers[max(turn - depth, 0)]))
    reductions = [n for n in launches if not n.meta["bucket"].gathers]
    order = order_of(graph)
    for node, following in itertools.zip_longest(reductions, reductions[1:]):
        # an update works in place: nothing moves across it
        if node.meta["phase"] != UPDATE:
            _delay(node, following, order)
    # a launch may stand before what makes its shards now
    legalise(graph)
    for turn, node in enumerate(node for node in graph.nodes if "bucket" in node.meta):
        # verify holds whoever comes later to this order: it is the one that other ranks have
        node.meta[TURN] = turn


def gathers_of(launches: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The launches of gathers that can be early, by segment."""
    found: dict[int, list[fx.Node]] = {}
    for node in launches:
        if node.meta["bucket"].gathers and node.meta["phase"] != UPDATE:
            found.setdefault(node.meta["segment"], []).append(node)
    return list(found.values())


def wait_of(launch: fx.Node) -> fx.Node:
    """What awaits a collective."""
    return next(iter(launch.users))


def launch_part(launch: fx.Node) -> list[fx.Node]:
    """The launch and what is made for it alone: its buffer, casts of shards, and what a user's pass
    computes to send."""
    (pack,) = launch.all_input_nodes
    part = {pack: None, launch: None}
    own = [x for x in pack.all_input_nodes if is_cheap(x) and len(x.users) == 1]
    todo = [pack]
    while todo:
        for x in todo.pop().all_input_nodes:
            # what was recorded has a promise; only what a pass has put there has none
            made = x.op == "call_function" and promise_of(x) is None and not is_wait(x)
            if x not in part and (x in own or (made and all(user in part for user in x.users))):
                part[x] = None
                todo.append(x)
    if len(part) == 2:
        return [pack, launch]
    found = [launch]
    while len(found) < len(part):  # back through the graph: the order that they stand in
        before = found[-1].prev
        while before not in part:
            before = before.prev
        found.append(before)
    return found[::-1]


def _move_before(nodes: list[fx.Node], before: fx.Node) -> None:
    for node in nodes:
        before.prepend(node)


def _delay(launch: fx.Node, following: fx.Node | None, order: Mapping[fx.Node, int]) -> None:
    """Move the wait, and what takes its result apart, to before the next reduction's buffer.

    Or to before what reads it, if that is earlier.
    """
    wait = wait_of(launch)
    (unpack,) = wait.users
    # the parts go along: left behind they would read what is not there yet
    nodes = [wait, unpack, *unpack.users]
    places = [user for part in unpack.users for user in part.users]
    if following is not None:
        places += following.all_input_nodes
    before = min(places, key=order.__getitem__)
    if order[before] > order[launch]:
        for node in nodes:
            before.prepend(node)
