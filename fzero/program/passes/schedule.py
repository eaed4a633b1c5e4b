"""When each bucket's collective is launched and when it is waited for."""

import itertools
from collections.abc import Mapping

from torch import fx

from fzero.distributed.mesh import is_gloo
from fzero.program.graph import UPDATE, copy_graph, order_of
from fzero.program.memory import is_wait
from fzero.program.passes.rewrite import is_cheap, legalise
from fzero.program.program import Program
from fzero.program.promises import TURN, promise_of


def schedule(program: Program, *, prefetch: int | None = None) -> Program:
    """Overlap: launch gathers `prefetch` buckets early, await a reduction once the next is ready.

    See `bucket` for `prefetch`.
    """
    graph = copy_graph(program.graph)
    prefetch = arrange(graph, prefetch)
    line = f"schedule: gathers launched {prefetch} ahead, one reduction in flight"
    return program.logged(graph, line)


def arrange(graph: fx.Graph, prefetch: int | None) -> int:
    """Do it to a graph, or to a sketch of one; returns how many buckets early gathers are."""
    launches = [node for node in graph.nodes if "bucket" in node.meta]
    if prefetch is None:
        # gloo moves bytes on the cores that compute: a gather launched early gains nothing there,
        # and its buffer takes memory for longer
        prefetch = 0 if any(is_gloo(node.meta["bucket"].group) for node in launches) else 1
    gathers_of: dict[int, list[fx.Node]] = {}
    for node in launches if prefetch else ():
        if node.meta["bucket"].gathers and node.meta["phase"] != UPDATE:
            gathers_of.setdefault(node.meta["segment"], []).append(node)
    for gathers in gathers_of.values():
        # the first of a segment has no wait before it to overlap with
        for turn, node in enumerate(gathers[1:], 1):
            # before that wait, not after it: then both are in flight at once
            _move_before(launch_part(node), wait_of(gathers[max(turn - prefetch, 0)]))
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
    return prefetch


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
