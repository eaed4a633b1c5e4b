"""How many bytes a Program holds at each node: a walk over the lifetimes of storages.

A storage lives from the node that makes it to the last node that reads any tensor on it, views
included; inputs, and what is returned, live throughout.
"""

from collections.abc import Iterator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fzero.program.ir import Program, output_node, placeholders, tensors_of


def peak_bytes(program: Program) -> int:
    """Most bytes alive at once, inputs and `program.resident` included; this part alone."""
    return program.resident + input_bytes(program) + max(timeline(program.graph), default=0)


def input_bytes(program: Program) -> int:
    """Bytes of the inputs' storages."""
    return sum(_storages(placeholders(program.graph)).values())


def timeline(graph: fx.Graph) -> Iterator[int]:
    """Bytes alive while each node runs, inputs and constants left out."""
    born, dies = lifetimes(graph)
    alive = 0
    for node in graph.nodes:
        alive += sum(born.get(node, {}).values())
        yield alive
        alive -= sum(dies.get(node, {}).values())


Bytes = dict[int, int]  # storage -> bytes


def lifetimes(graph: fx.Graph) -> tuple[dict[fx.Node, Bytes], dict[fx.Node, Bytes]]:
    """What each node allocates, and what can be freed after it."""
    held = set(_storages(n for n in graph.nodes if n.op in ("placeholder", "get_attr")))
    born: dict[fx.Node, Bytes] = {}
    size: Bytes = {}
    last: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            for key in _storages([operand]):
                last[key] = node
        new = {k: n for k, n in _storages([node]).items() if k not in size and k not in held}
        if new:
            born[node] = new
            size.update(new)
        for key in new:
            last[key] = node
    kept = set(_storages(output_node(graph).all_input_nodes))
    dies: dict[fx.Node, Bytes] = {}
    for key, node in last.items():
        if key in size and key not in kept:
            dies.setdefault(node, {})[key] = size[key]
    return born, dies


def _storages(nodes: "Iterator[fx.Node] | list[fx.Node]") -> Bytes:
    found: Bytes = {}
    for node in nodes:
        for x in tensors_of(node):
            if isinstance(x, FakeTensor) and x.layout is torch.strided:
                storage = x.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return found
