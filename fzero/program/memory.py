"""How many bytes a Program holds at each node: a walk over the lifetimes of storages.

A storage lives from the node that makes it to the last node that reads any tensor on it, views
included; inputs, and what is returned, live throughout. What a collective sends lives until it has
been awaited: a backend holds on to it, and the runner does too, so that every backend holds the
same. What waits for backward in the host's memory takes nothing on the device, and is counted by
`host_bytes`.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fzero.program.foreign import sending
from fzero.program.graph import Part, is_op, output_node, placeholders, tensors_of
from fzero.program.transfers import on_host, storages_on_host


def peak_bytes(part: Part) -> int:
    """Most bytes alive at once, inputs and what is resident included; this part alone."""
    return constant_bytes(part) + max(timeline(part.graph), default=0)


def constant_bytes(part: Part) -> int:
    """Bytes that are there all the time: inputs, and what lives beside the graph."""
    return resident_bytes(part) + input_bytes(part)


def host_bytes(part: Part) -> int:
    """Most bytes that a part's values take at once in host memory; see [Note: transfers]."""
    return max(timeline(part.graph, storages_on_host), default=0)


def resident_bytes(part: Part) -> int:
    """Bytes of a step's state that live beside the graph."""
    return sum(row.bytes for row in part.resident)


def input_bytes(part: Part) -> int:
    """Bytes of the inputs' storages."""
    return sum(storages(placeholders(part.graph)).values())


Bytes = dict[int, int]  # storage -> bytes
Held = Callable[[Iterable[fx.Node]], Bytes]


def storages(nodes: Iterable[fx.Node]) -> Bytes:
    """The storages on the device that the values of nodes are on, and their bytes."""
    found: Bytes = {}
    for node in nodes:
        for x in () if on_host(node) else tensors_of(node):
            # constants are real tensors, which are there whether the Program runs or not
            if isinstance(x, FakeTensor) and x.layout is torch.strided:
                storage = x.untyped_storage()
                # by storage: a view costs nothing, and keeps all of its base alive
                found[storage._cdata] = storage.nbytes()
    return found


def timeline(graph: fx.Graph, held: Held = storages) -> Iterator[int]:
    """Bytes alive while each node runs, inputs and constants left out.

    Args:
        held: see `lifetimes`.
    """
    born, dies = lifetimes(graph, held)
    alive = 0
    for node in graph.nodes:
        alive += sum(born.get(node, {}).values())
        yield alive
        alive -= sum(dies.get(node, {}).values())


def lifetimes(
    graph: fx.Graph, held: Held = storages
) -> tuple[dict[fx.Node, Bytes], dict[fx.Node, Bytes]]:
    """What each node allocates, and what can be freed after it.

    Args:
        held: the storages of nodes; a sketch's have numbers instead of values.
    """
    inputs = set(held(n for n in graph.nodes if n.op in ("placeholder", "get_attr")))
    same: dict[int, int] = {}  # waiting returns what it was given, and its fake value does not
    born: dict[fx.Node, Bytes] = {}
    size: Bytes = {}
    last: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for key in held([*reads(node), *_lingering(node)]):
            last[same.get(key, key)] = node
        if is_wait(node):
            for launched in held(node.all_input_nodes):
                same |= dict.fromkeys(held([node]), same.get(launched, launched))
            continue
        new = {
            key: nbytes
            for key, nbytes in held([node]).items()
            if key not in size and key not in inputs and key not in same
        }
        if new:
            born[node] = new
            size.update(new)
        # what nobody reads dies where it is made
        for key in new:
            last[key] = node
    outputs = {same.get(key, key) for key in held(output_node(graph).all_input_nodes)}
    dies: dict[fx.Node, Bytes] = {}
    for key, node in last.items():
        if key in size and key not in outputs:
            dies.setdefault(node, {})[key] = size[key]
    return born, dies


def reads(node: fx.Node) -> list[fx.Node]:
    """What has to be alive while a node runs: its operands, and what it waits for sends."""
    operands = node.all_input_nodes
    return [*operands, *_sent(operands)] if is_wait(node) else operands


def _lingering(node: fx.Node) -> list[fx.Node]:
    """What may still be alive because the backend was slow to let go of it.

    Gloo's threads say that they are done, and let go of what they sent a moment later: by then the
    main thread has often allocated what the buffer that came is taken apart into.
    """
    launches = [x for wait in node.all_input_nodes if is_wait(wait) for x in wait.all_input_nodes]
    return _sent(x for x in launches if (sent := sending(x)) is not None and sent.gloo)


def _sent(launches: Iterable[fx.Node]) -> list[fx.Node]:
    return [buffer for launch in launches for buffer in launch.all_input_nodes]


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective, or for a copy from or to the host."""
    return is_op(node, "_c10d_functional::wait_tensor", "fzero::landed")
