"""What makes a staged-out step ZeRO-3: full leaves and full gradients live only around their use.

Autograd, left alone, gathers every leaf at the start, keeps what backward needs of it, and reduces
every gradient at the end. Three passes move the collectives to where they belong.
"""

from collections.abc import Collection

from torch import fx

from fzero.program.graph import (
    BACKWARD,
    copy_graph,
    is_op,
    is_wanted,
    order_of,
    phases,
    segments,
)
from fzero.program.passes.rewrite import (
    carried_by,
    infer,
    is_cheap,
    is_gather,
    is_reduction,
    refresh,
)
from fzero.program.program import Program


def regather(program: Program, leaves: Collection[str] | None = None) -> Program:
    """Gather a leaf again in backward instead of keeping it from forward.

    The gather is copied, with the views and casts on it, to just before its first use there; and so
    to every other segment that uses the leaf. What casts the shard to the dtype that travels is
    copied, too: shared, it would be there from forward to backward, and hold forward's gather to
    its place.

    Args:
        leaves: names of those that are gathered again; None: all.
    """
    graph = copy_graph(program.graph)
    segment = {node: number for node, (number, _) in segments(graph).items()}
    again: dict[tuple[fx.Node, int], fx.Node] = {}

    def chosen(node: fx.Node) -> bool:
        return _gathered(node) and (leaves is None or leaf_of(node) in leaves)

    def copy_of(node: fx.Node, place: fx.Node) -> fx.Node:
        # one copy a segment, however many nodes of it read the leaf
        key = (node, segment[place])
        if key not in again:
            # with what lies between: a view of the first gather would keep the first full leaf
            # alive
            given = [x for x in node.all_input_nodes if _gathered(x) or prepares_gather(x)]
            operands = {x: copy_of(x, place) for x in given}
            with graph.inserting_before(place):
                new = graph.node_copy(node, lambda x: operands.get(x, x))
            segment[new] = segment[place]
            again[key] = infer(new)
        return again[key]

    for node in list(graph.nodes):
        for operand in node.all_input_nodes:
            if segment[operand] != segment[node] and chosen(operand):
                node.replace_input_with(operand, copy_of(operand, node))
    for new in again.values():
        refresh(new)
    # a gather whose readers were all in other segments has none left
    graph.eliminate_dead_code(is_impure_node=is_wanted)
    count = sum(is_gather(node) for node in again.values())
    return program.logged(graph, f"regather: {count} leaves gathered again in backward")


def sink_gathers(program: Program) -> Program:
    """Move each gather, and the views and casts around it, to just before its first use."""
    graph = copy_graph(program.graph)
    anchor = order_of(graph)  # where a node stands; for a moved one, the node it stands before
    before: dict[int, list[fx.Node]] = {}
    nodes = list(graph.nodes)
    # Users first: a cast goes to where the gather that reads it has gone.
    for node in reversed(nodes):
        if (node.users and _gathered(node)) or prepares_gather(node):
            anchor[node] = min(anchor[user] for user in node.users)
            before.setdefault(anchor[node], []).append(node)
    for index, moved in before.items():
        # collected from the end, so this is the order of the graph
        for node in reversed(moved):
            nodes[index].prepend(node)
    count = sum(is_gather(node) for moved in before.values() for node in moved)
    return program.logged(graph, f"sink gathers: {count} moved to their first use")


def hoist_reductions(program: Program) -> Program:
    """Move each reduction to where its gradient is ready.

    Autograd's transposes stand last, so without this every full gradient lives to the end of
    backward. Whether the peak shows it depends on where the peak is. A GPT with many tokens has it
    at the start of backward, when activations are all there and gradients are not: backward frees
    more of the ones than it makes of the others, and the peak is the same to the byte. Where
    parameters outweigh activations, gradients make the peak. 24 layers of 64 x 64 on 8 rows take,
    in buckets of 50 KB, 26 % more without this on 2 ranks and 55 % on 8 at stages 1 and 2, 17 % and
    64 % at stage 3. It does nothing where one bucket waits for all gradients, where leaves are kept
    from forward (`reshard_after_forward=False`), and at stage 0, where a sum is as large as what
    was summed.
    """
    graph = copy_graph(program.graph)
    phase = phases(graph)
    nodes = list(graph.nodes)
    only_reduced: set[fx.Node] = set()
    for node in reversed(nodes):
        tail = bool(node.users) and all(u in only_reduced or u.op == "output" for u in node.users)
        reduces = is_reduction(node) and not is_op(node, "fzero::exchange")
        if reduces or (tail and is_cheap(node) and phase[node] == BACKWARD):
            only_reduced.add(node)
    anchor = order_of(graph)  # where a node stands; for a moved one, the node it stands after
    after: dict[int, list[fx.Node]] = {}
    for node in nodes:
        ready = max((anchor[x] for x in node.all_input_nodes), default=-1)
        # what reads inputs alone stays: nothing goes between the placeholders
        if node in only_reduced and ready >= 0 and nodes[ready].op != "placeholder":
            anchor[node] = ready
            after.setdefault(ready, []).append(node)
    for index, moved in after.items():
        # each goes directly after that node, so the last one first
        for node in reversed(moved):
            nodes[index].append(node)
    count = sum(is_reduction(node) for moved in after.values() for node in moved)
    return program.logged(graph, f"hoist reductions: {count} moved to where they are ready")


def leaf_of(node: fx.Node) -> str:
    """The name of the leaf that a gather, or a view or cast of one, has."""
    while not is_gather(node):
        node = node.all_input_nodes[0]
    return carried_by(node)[1].name


def _gathered(node: fx.Node) -> bool:
    """Whether a node is a gathered leaf, or a view or cast of one."""
    while not is_gather(node):
        if not is_cheap(node) or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return True


def prepares_gather(node: fx.Node) -> bool:
    """Whether a node is a view or cast of an input that only gathers read."""
    return (
        bool(node.users)
        and is_cheap(node)
        and node.all_input_nodes[0].op == "placeholder"
        and all(is_gather(user) for user in node.users)
    )
