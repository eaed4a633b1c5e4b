"""Gather leaves into the memory that they live in, while nobody waits: [Note: gathered over].

[Note: gathered over] An update of stages 1 and 2 writes each rank's part of a parameter and gathers
the rest. A leaf whose rows are dealt out evenly along dim 0 lies as its bucket does, so a large
one, which travels alone, needs no buffer: what other ranks send is received into the parameter
itself, around this rank's part, which is there already. So are the leaves of a flat that lie in
memory as it does: see [Note: at home]. (An all-to-all can't: its parts to send would be a buffer of
their own.)

That changes a parameter from the moment at which the gather is launched, not when it is copied. So
it is done where nobody else reads or writes that memory between the two. As such gathers take no
memory, all are launched as soon as their leaves are written, and awaited at the end. So are small
sums that nothing else of an update waits for, and that are only told.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import fx

from fzero.distributed.buckets import GATHER, Bucket, goes_alone
from fzero.program.graph import (
    copy_graph,
    has_effect,
    is_mutable,
    is_op,
    memory_of,
    operands,
    order_of,
    output_node,
    tensors_of,
    written_operands,
)
from fzero.program.memory import is_wait
from fzero.program.passes.groups import COPIED, MEMBERS, OVER, STRAIGHT, Group, asked_of, bucket_for
from fzero.program.passes.rewrite import is_cheap, is_gather
from fzero.program.passes.schedule import launch_part, wait_of
from fzero.program.program import Program
from fzero.program.promises import TURN, came_over


def mark_copied(program: Program, at_home: Mapping[int, int] = MappingProxyType({})) -> Program:
    """Mark the gathers of leaves that are only copied somewhere, with what can be done of that.

    Args:
        program: in which collectives carry single leaves.
        at_home: of each flat whose leaves lie in memory as it does, how many they are.
    """
    graph = copy_graph(program.graph)
    gathers = filter(is_gather, graph.nodes)
    marks = {node: mark for node in gathers if (mark := _mark(node, at_home))}
    for node, mark in marks.items():
        node.meta[COPIED] = mark
        home = asked_of(node).leaf.home
        node.meta[MEMBERS] = 1 if home is None else at_home.get(home.flat, 0)
    count = list(marks.values()).count(OVER)
    if not count:
        return replace(program, graph=graph)
    return program.logged(graph, f"gather over: {count} leaves gathered where they live")


def _mark(gather: fx.Node, at_home: Mapping[int, int]) -> str:
    if len(gather.users) != 1:  # a leaf that something else reads has to be a tensor of its own
        return ""
    (copy,) = gather.users
    if not is_op(copy, "aten::_foreach_copy_"):
        return ""
    targets, sources = map(list, copy.args[:2])  # pyright: ignore
    if sources.count(gather) != 1:
        return ""
    target = targets[sources.index(gather)]
    if not _is_unread(target, gather, copy):
        return ""
    asked = asked_of(gather)
    exchanged = bucket_for(Group(GATHER, 0, "", False, nodes=[gather])).exchanged
    is_buffer = goes_alone(asked.leaf, asked.nbytes, asked.axis)
    if (home := asked.leaf.home) is not None:
        is_buffer = home.flat in at_home
    return OVER if is_buffer and not exchanged and _is_place(target, gather) else STRAIGHT


def _is_place(target: fx.Node, gather: fx.Node) -> bool:
    """Whether the memory of an input is all that a gathered leaf needs."""
    if target.op != "placeholder":
        return False
    (x,), (full,) = tensors_of(target), tensors_of(gather)
    return x.is_contiguous() and x.dtype == full.dtype and x.shape == full.shape


def _is_unread(target: fx.Node, gather: fx.Node, copy: fx.Node) -> bool:
    """Whether nothing else touches the memory of `target` between two nodes, the second included.

    A view reads nothing.
    """
    (key,) = memory_of(target)
    node = gather.next
    while node is not copy:
        if key in _touched(node):
            return False
        node = node.next
    return [x for x in operands(copy) if key in memory_of(x)] == [target]


def _touched(node: fx.Node) -> set[int]:
    """The storages of its operands that a node reads or writes."""
    found = {key for x in node.all_input_nodes for key in memory_of(x)}
    return found.difference(memory_of(node)) if is_cheap(node) else found


def await_late(program: Program) -> Program:
    """Launch what is gathered over as soon as can be, and await it, and what is only told, last.

    Args:
        program: with buckets, and written in place.
    """
    graph = copy_graph(program.graph)
    launches = [node for node in graph.nodes if "bucket" in node.meta]
    over = [node for node in launches if node.meta["bucket"].over]
    told = [(node, part) for node in launches if (part := _only_told(node))]
    if not over and not told:
        return program
    for node in over:
        _move_up(launch_part(node))
    for node, part in told:
        _move_down(part)
        if over:
            _move_behind(_made_for(node), over)
    for node in over:
        _move_down([wait_of(node), *wait_of(node).users])
    for turn, node in enumerate(node for node in graph.nodes if "bucket" in node.meta):
        node.meta[TURN] = turn
    return program.logged(graph, f"await late: {len(over)} gathers, {len(told)} sums")


def _move_up(part: list[fx.Node]) -> None:
    """Move what launches a gather up to where its operands are made, or its memory was used."""
    needs = {x for node in part for x in node.all_input_nodes if x not in part}
    memory = {key for node in needs for key in memory_of(node)}
    own = {key for leaf in came_over(part[-1]) for key in memory_of(leaf)}
    before = part[0]
    while True:
        above = before.prev
        if above.op in ("root", "placeholder", "get_attr") or above in needs:
            break
        bucket: Bucket | None = above.meta.get("bucket")
        # those that are early keep their order
        if bucket is not None and (bucket.over or not bucket.gathers):
            break
        written = {key for x in written_operands(above) for key in memory_of(x)}
        if not memory.isdisjoint(written) or not own.isdisjoint(_touched(above)):
            break
        before = above
    if before is not part[0]:
        _put_before(before, part)


def _only_told(launch: fx.Node) -> list[fx.Node]:
    """A sum's wait and all that follows from it, if nothing but results does: in their order."""
    if launch.meta["bucket"].gathers:
        return []
    found: dict[fx.Node, None] = {wait_of(launch): None}
    for node in _after(launch):
        if any(x in found for x in node.all_input_nodes):
            if node.op == "output":
                break
            stays = is_mutable(node) or has_effect(node.target)
            if stays or "bucket" in node.meta or is_wait(node):
                return []
            found[node] = None
    return list(found)


def _made_for(launch: fx.Node) -> list[fx.Node]:
    """What is computed for a sum and nothing else, and its launch, in order."""
    found = {launch}
    node = launch
    while (node := node.prev).op != "root":
        pure = node.op == "call_function" and not is_mutable(node) and "bucket" not in node.meta
        if pure and not is_wait(node) and node.users and found.issuperset(node.users):
            found.add(node)
    return [node for node in launch.graph.nodes if node in found]


def _move_behind(part: list[fx.Node], launches: list[fx.Node]) -> None:
    """Move nodes to behind those of these launches that come after them, if nothing between writes
    what they read.
    """
    order = order_of(part[0].graph)
    last = max(launches, key=order.__getitem__)
    if order[last] < order[part[-1]]:
        return
    read = {key for node in part for x in node.all_input_nodes for key in memory_of(x)}
    node = part[0]
    while node is not last:
        node = node.next
        overwritten = [*written_operands(node), *(came_over(node) if node in launches else ())]
        written = {key for x in overwritten for key in memory_of(x)}
        if node not in part and not read.isdisjoint(written):
            return
    for node in reversed(part):
        last.append(node)


def _move_down(part: list[fx.Node]) -> None:
    """Move nodes to before what has to do with their memory next, or to the end."""
    inside = set(part)
    memory = {key for node in part for x in (node, *node.all_input_nodes) for key in memory_of(x)}
    left = len(part) - 1
    for node in _after(part[0]):
        if node in inside:
            left -= 1
        elif node.op == "output" or not memory.isdisjoint(
            key for x in node.all_input_nodes for key in memory_of(x)
        ):
            if not left:  # else what lies between them holds them apart
                _put_before(node, part)
            return


def _put_before(place: fx.Node, part: list[fx.Node]) -> None:
    for node in part:
        place.prepend(node)


def _after(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes that follow one."""
    last = output_node(node.graph)
    while node is not last:
        node = node.next
        yield node
