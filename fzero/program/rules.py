"""What must be true of every Program, rule by rule: each yields what is wrong, and at which node.

[Note: rules] They are checked on the graph that will run, after any passes, and rest on what was
recorded ([Note: promises] in `fzero.program.promises`) and on what is known of the step: its
trained leaves and the process groups over which gradients are summed.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from fzero.distributed.buckets import KINDS, PACKS, UNPACKS, Bucket, carrier
from fzero.numerics.rng import is_random
from fzero.program.categories import GRADIENTS
from fzero.program.graph import (
    BACKWARD,
    FORWARD,
    Part,
    is_op,
    memory_of,
    output_node,
    phases,
    placeholders,
    tensors_of,
    written_operands,
)
from fzero.program.listing import collectives
from fzero.program.memory import is_wait
from fzero.program.passes.rewrite import is_cheap, is_reduction
from fzero.program.placed import placed
from fzero.program.promises import (
    TURN,
    came_over,
    counted,
    is_packed_over,
    promise_of,
    said,
    source_of,
    values_read,
    written,
)
from fzero.program.sites import KEY, SITE, WRITTEN_OUT, generator, seed
from fzero.program.transfers import is_brought, is_landing, is_sent


def awaited(part: Part) -> Iterator[str]:
    """Collectives: each is awaited once, read by nothing before, and carries what its bucket says;
    its buffers stay as they are meanwhile."""
    launches = [node for node in part.graph.nodes if "bucket" in node.meta]
    for node in launches:
        bucket: Bucket = node.meta["bucket"]
        pack, *_ = node.all_input_nodes
        if KINDS[bucket.kind].pack is not pack.target or pack.args[1] != bucket:
            yield f"{node.name} sends {pack.name}, which is not the buffer of {bucket!r}"
            continue
        yield from _in_place(pack, bucket)
        target, arguments = carrier(bucket, tensors_of(pack)[0].numel())
        if (node.target, tuple(node.args[1:])) != (target, arguments):
            given = f"{node.target}{tuple(node.args[1:])}"
            yield f"{node.name} is {given}, and {bucket!r} travels by {target}{arguments}"
        waits = [user for user in node.users if is_wait(user)]
        for user in node.users:
            if not is_wait(user):
                yield f"{user.name} reads what {node.name} brings before it is awaited"
        if len(waits) != 1:
            yield f"{node.name} is awaited {len(waits)} times; a collective is awaited once"
        for wait in waits:
            yield from _untouched(node, wait, bucket)


def _in_place(pack: fx.Node, bucket: Bucket) -> Iterator[str]:
    """What is not copied into a buffer was computed where it belongs."""
    operands, _, buffer, missing = (*pack.args, None, ())[:4]
    if buffer is None or is_packed_over(pack):
        return
    for i, (operand, leaf) in enumerate(zip(operands, bucket.leaves, strict=True)):  # pyright: ignore
        made = operand
        while is_cheap(made):
            made = made.all_input_nodes[0]
        there = made.target is placed and made.args[0] is buffer
        if i not in missing and not (there and made.args[1][2] == bucket.full.starts[i]):  # pyright: ignore
            yield (
                f"{operand.name} is not in the place of {leaf.name!r} in the buffer of {bucket!r}, "
                f"and {pack.name} does not copy it there"
            )


def _untouched(launch: fx.Node, wait: fx.Node, bucket: Bucket) -> Iterator[str]:
    if not wait.users:
        yield f"nobody reads what {wait.name} brings of {bucket!r}"
    for user in wait.users:
        if user.target is not KINDS[bucket.kind].unpack and "unpack_into" not in str(user.target):
            yield f"{user.name} reads the buffer of {bucket!r}, which has to be taken apart first"
        elif user.args[1] != bucket:
            yield f"{user.name} takes {user.args[1]!r} out of the buffer of {bucket!r}"
        elif bucket.over and list(user.args[2]) != came_over(launch):  # pyright: ignore
            yield f"{user.name} writes {user.args[2]}, and {bucket!r} comes over other leaves"
    yield from _unwritten(launch, wait)
    if bucket.over:
        yield from _unread(launch, wait)


def _unwritten(launch: fx.Node, wait: fx.Node) -> Iterator[str]:
    """What is on its way stays as it is until it has come."""
    flying = {storage for node in _carried(launch) for storage in memory_of(node)}
    node = launch.next
    while node is not wait:
        for operand in written_operands(node):
            if not flying.isdisjoint(memory_of(operand)):
                yield f"{node.name} writes {operand.name}, which {launch.name} is carrying"
        node = node.next


def _carried(launch: fx.Node) -> Iterator[fx.Node]:
    yield from (launch, *launch.all_input_nodes)
    if "bucket" in launch.meta:
        yield from came_over(launch)


def _unread(launch: fx.Node, wait: fx.Node) -> Iterator[str]:
    """What is written over by what comes is read by nobody until it has come."""
    flying = {storage for leaf in came_over(launch) for storage in memory_of(leaf)}
    node = launch.next
    while node is not wait:
        for operand in node.all_input_nodes:
            view = is_cheap(node) and flying.issuperset(memory_of(node))
            if not flying.isdisjoint(memory_of(operand)) and not view:
                yield f"{node.name} reads {operand.name}, which {launch.name} is writing over"
        node = node.next


def brought_back(part: Part) -> Iterator[str]:
    """Copies to the host: each is awaited once before anything reads it; only copies back read what
    is there, and they bring it to where it was. See [Note: transfers]."""
    for node in part.graph.nodes:
        if is_sent(node) or is_brought(node):
            yield from _landed_once(node)
        if is_landing(node) and not _carries(node.all_input_nodes[0]):
            yield f"{node.name} awaits {node.all_input_nodes[0].name}, which is no copy"
        if is_landing(node) and is_sent(node.all_input_nodes[0]):
            for user in node.users:
                if not is_brought(user):
                    yield f"{user.name} reads {node.name}, which is in the host's memory"
            if not node.users:
                yield f"{node.name} waits in the host's memory, and is never brought back"
        if is_brought(node):
            there = node.all_input_nodes[0]
            sent = there.all_input_nodes[0] if is_landing(there) else there
            if there is sent or not is_sent(sent):
                yield f"{node.name} brings back {there.name}, which was not sent to the host"
            elif (device := tensors_of(sent.all_input_nodes[0])[0].device) != node.args[1]:
                yield f"{node.name} is brought to {node.args[1]}, and was on {device}"


def _landed_once(node: fx.Node) -> Iterator[str]:
    for user in node.users:
        if not is_landing(user):
            yield f"{user.name} reads {node.name} before it has landed"
    landings = [user for user in node.users if is_landing(user)]
    if len(landings) != 1:
        yield f"{node.name} lands {len(landings)} times; a copy is awaited once"
    for landing in landings:
        yield from _unwritten(node, landing)
        value = tensors_of(node.all_input_nodes[0] if is_sent(node) else node)[0]
        if landing.args[1] != value.device:
            yield f"{landing.name} waits on {landing.args[1]} for a copy of {value.device}"


def _carries(node: fx.Node) -> bool:
    return is_sent(node) or is_brought(node)


def reduced_once(part: Part) -> Iterator[str]:
    """Gradients: each of a trained leaf is summed over each of its process groups exactly once."""
    expected = sorted(part.reduced_over)
    results: Any = output_node(part.graph).args[0]
    told = zip(part.outputs, part.output_categories, results, strict=False)
    for name, category, node in told:
        # nothing has reached a leaf that nobody uses: the sum of zeros is zero
        if category == GRADIENTS and not is_op(node, *_ZEROS):
            yield from _hops(name, node, source_of(node).hops, expected)
    inputs = zip(part.inputs, part.input_categories, placeholders(part.graph), strict=False)
    of_gradient = {node: name for name, category, node in inputs if category == GRADIENTS}
    if not of_gradient or not expected:
        return
    numbered = [(promise_of(node), name) for node, name in of_gradient.items()]
    by_number = {promise.number: name for promise, name in numbered if promise is not None}
    for node in part.graph.nodes:
        # what only moves a gradient is looked through: what reads it is asked
        if node.op != "call_function" or _moves(node):
            continue
        for operand in values_read(node):
            source = source_of(operand)
            if source.maker in by_number:
                leaf = by_number[source.maker].removeprefix("grad.")
                yield from _hops(leaf, node, source.hops, expected)


def _moves(node: fx.Node) -> bool:
    return (
        "bucket" in node.meta
        or node.target in PACKS | UNPACKS
        or is_wait(node)
        or is_cheap(node)
        or is_reduction(node)
    )


def _hops(
    leaf: str, node: fx.Node, hops: tuple[tuple[str, str], ...], expected: list[str]
) -> Iterator[str]:
    groups = sorted(group for _, group in hops)
    if others := [name for name, _ in hops if name != leaf]:
        yield f"{node.name} has the gradient of {others[0]!r} in the place of that of {leaf!r}"
    if groups != expected:
        over = sorted({*groups, *expected})
        times = ", ".join(f"{groups.count(group)} times over group {group}" for group in over)
        yield (
            f"the gradient of {leaf!r}, which {node.name} has, is reduced {times}; it must be once "
            f"over each of {expected}"
        )


_ZEROS = ("aten::zeros_like", "aten::new_zeros", "aten::zeros")


def as_recorded(part: Part) -> Iterator[str]:
    """Values: each node reads those that it read while recording, written over as often."""
    for node, writes in counted(part.graph):
        promise = promise_of(node)
        if promise is None or node.op in ("placeholder", "get_attr"):
            continue
        given = values_read(node)
        if len(given) != len(promise.sources):
            yield f"{node.name} reads {given}: too few, or too many"
            continue
        if SITE not in node.meta and said(node) != promise.what:
            yield f"{node.name} is {said(node)}, and was recorded as {promise.what}"
        for operand, before, source, now in zip(
            given, promise.sources, promise.writes, writes, strict=True
        ):
            found = source_of(operand)
            if (found.maker, found.part) != (before.maker, before.part):
                yield f"{node.name} reads {operand.name}, and was recorded reading another value"
            elif found.hops != before.hops:
                yield (
                    f"{node.name} reads {operand.name}, a value that is reduced {_over(found.hops)}"
                    f", and was recorded {_over(before.hops)}"
                )
            if now != source:
                yield (
                    f"{node.name} reads {operand.name} after it was written over {now} times, and "
                    f"was recorded reading it after {source}"
                )

    for node, times in written(part.graph).items():
        promise = promise_of(node)
        if promise is not None and promise.writes != (times,):
            (before,) = promise.writes
            yield f"{node.name} is written over {times} times, and was recorded {before} times"


def _over(hops: tuple[tuple[str, str], ...]) -> str:
    return " and ".join(f"over group {group} as {leaf!r}" for leaf, group in hops) or "not at all"


def replayed(part: Part) -> Iterator[str]:
    """Randomness: each operator draws from the generator of its site; only what is computed again
    shares one."""
    numbered = any(line.startswith("seed:") for line in part.log)
    first: dict[int, fx.Node] = {}
    phase = phases(part.graph)
    seeded = KEY in part.inputs
    for node in part.graph.nodes:
        site = node.meta.get(SITE)
        if site is None:
            drawing = is_random(node.target, node.args, node.kwargs) or node.target in _DRAWS
            # what was recorded gets its site later, and what nobody recorded never
            if drawing and (numbered or promise_of(node) is None):
                yield f"{node.name} draws random numbers, and has no site: they can't be replayed"
            continue
        if seeded and not _draws_from(node, site):
            yield f"{node.name} of site {site} does not draw from the generator of (key, {site})"
        original = first.setdefault(site, node)
        if original is node:
            if phase[node] == BACKWARD:
                yield f"{node.name} draws in backward, and nothing drew from site {site} in forward"
            continue
        if phase[node] == FORWARD or phase[node] != BACKWARD:
            yield f"{node.name} draws the numbers of {original.name}: both have site {site}"
        one, other = promise_of(node), promise_of(original)
        same = one is None or other is None or one.number == other.number
        if not same or node.target != original.target:
            yield f"{node.name} is no replay of {original.name}, and has its site {site}"


def _draws_from(node: fx.Node, site: int) -> bool:
    made: Any = node.kwargs.get("generator", node.prev)
    if not isinstance(made, fx.Node) or made.target not in (generator, seed):
        return False
    key: Any = made.args[0]
    return bool(made.args[1] == site) and isinstance(key, fx.Node) and key.op == "placeholder"


_DRAWS = set(WRITTEN_OUT.values())


def in_turn(part: Part) -> Iterator[str]:
    """Order: collectives are launched in the order that every rank's schedule gave them."""
    launches = [node for node in part.graph.nodes if TURN in node.meta]
    for place, node in enumerate(launches):
        turn = node.meta[TURN]
        if turn != place:
            yield (
                f"{node.name} is launched at place {place}, and its turn is {turn}: other ranks "
                "would wait in another collective"
            )
            return


def alike(parts: Iterable[Part], others: Iterable[Part]) -> Iterator[str]:
    """Ranks: the same collectives in the same order."""
    sides = [collectives(side) for side in (parts, others)]
    groups = {row.group for row in sides[0]} & {row.group for row in sides[1]}
    # a model's own may be over a group that has not all ranks
    one, other = ([_row(x) for x in rows if x.leaves or x.group in groups] for rows in sides)
    if len(one) != len(other):
        yield f"this rank launches {len(one)} collectives, and another {len(other)}"
    for place, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if mine != yours:
            yield f"collective {place} is {mine} on this rank, and {yours} on another"
            return


def _row(row: Any) -> str:
    # shards may be uneven, and all-reduces over replicas carry those; so may be what a model sends
    size = "" if row.kind == "all_reduce" or not row.leaves else f", {row.bytes} bytes"
    return f"{row.kind} of {', '.join(row.leaves)} in {row.phase}{size}, {row.dtype}"


RULES = (awaited, brought_back, as_recorded, reduced_once, replayed, in_turn)
