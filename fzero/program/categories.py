"""What a Program's memory is: each storage has a category, a name, and a place in the user's code.

| category | what it is |
|---|---|
| parameters | as they live between steps: shards at stage 3 |
| masters | copies of parameters in a higher precision, which the optimizer updates |
| optimizer | the optimizer's state |
| gathered | full parameters, and casts of them, that are there for their use |
| gradients | full ones until they are reduced, shards after, sums over micro-batches |
| activations | what forward computed, by module |
| recomputed | activations that backward computes again |
| temporaries | what backward and the update compute on the way |
| buckets | what collectives send and receive |
| batch, model state, loss scale | the other inputs |
| results | the loss, what a model function returns besides, metrics |
| inputs | inputs of a function of which nothing more is known |
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import fx

from fzero.distributed.buckets import PACKS, UNPACKS, Bucket, buffer_of
from fzero.program.graph import (
    BACKWARD,
    FORWARD,
    Part,
    is_again,
    output_node,
    phases,
    placeholders,
    tensors_of,
)
from fzero.program.memory import is_wait, storages
from fzero.program.origin import NOWHERE, Origin, origin_of
from fzero.program.passes.rewrite import carried_by, is_cheap, is_gather, is_reduction
from fzero.program.transfers import is_transfer

PARAMETERS, MASTERS, OPTIMIZER = "parameters", "masters", "optimizer"
GATHERED, GRADIENTS, BUCKETS = "gathered", "gradients", "buckets"
ACTIVATIONS, RECOMPUTED, TEMPORARIES = "activations", "recomputed", "temporaries"
BATCH, STATE, SCALE = "batch", "model state", "loss scale"
RESULTS, INPUTS = "results", "inputs"

ORDER = (
    *(PARAMETERS, MASTERS, OPTIMIZER, STATE, SCALE, BATCH, INPUTS),
    *(GRADIENTS, GATHERED, BUCKETS, ACTIVATIONS, RECOMPUTED, TEMPORARIES, RESULTS),
)
"""The order in which categories are drawn and listed: what stays comes first."""


class Owner(NamedTuple):
    """What a storage is.

    Args:
        category: one of the above.
        name: of the leaf, input or value.
        origin: where it is made; of what is gathered, where it is read first.
    """

    category: str
    name: str
    origin: Origin


def owners(part: Part) -> dict[int, Owner]:
    """What each storage of a Program's graph is, inputs included."""
    return _Owners(part).found


class _Owners:
    def __init__(self, part: Part) -> None:
        self.part = part
        self.phase = phases(part.graph)
        self.found: dict[int, Owner] = {}
        self.same: dict[int, int] = {}  # what waiting returns is the launch's
        self.leaves = {
            name
            for name, category in zip(part.inputs, part.input_categories, strict=False)
            if category in (PARAMETERS, GRADIENTS)
        }
        self._inputs()
        for node in part.graph.nodes:
            if node.op == "call_function":
                self._node(node)
        self._gradients()
        self._outputs()

    def _keys(self, node: fx.Node) -> list[int]:
        return [self.same.get(key, key) for key in storages([node])]

    def _inputs(self) -> None:
        categories = (*self.part.input_categories, *[INPUTS] * len(self.part.inputs))
        nodes = placeholders(self.part.graph)
        for node, name, category in zip(nodes, self.part.inputs, categories, strict=False):
            for key in self._keys(node):
                self.found.setdefault(key, Owner(category, name, NOWHERE))

    def _node(self, node: fx.Node) -> None:
        if is_wait(node):
            for launched in self._keys(node.all_input_nodes[0]):
                self.same |= dict.fromkeys(storages([node]), launched)
            return
        origin = origin_of(node)
        if origin.file:
            self._read_by(node, origin)
        if node.target in UNPACKS:
            self._unpacked(node)
            return
        for key in self._keys(node):
            if key not in self.found:
                self.found[key] = self._made_by(node, origin)

    def _read_by(self, node: fx.Node, origin: Origin) -> None:
        """What is gathered comes from where it is read first."""
        for operand in node.all_input_nodes:
            for key in self._keys(operand):
                owner = self.found.get(key)
                if owner is not None and owner.category == GATHERED and not owner.origin.file:
                    self.found[key] = owner._replace(origin=origin)

    def _unpacked(self, node: fx.Node) -> None:
        """The parts of a bucket; where they are views of its buffer, the buffer is theirs."""
        bucket: Bucket = node.args[1]  # pyright: ignore
        for x, leaf in zip(tensors_of(node), bucket.leaves, strict=True):
            key: Any = x.untyped_storage()._cdata
            key = self.same.get(key, key)
            first = self.found.get(key)
            shared = first is not None and first.category in (GATHERED, GRADIENTS, RESULTS)
            name = repr(bucket).partition("[")[2][:-1] if shared else leaf.name
            self.found[key] = Owner(self._of_leaf(bucket, leaf.name), name, NOWHERE)

    def _of_leaf(self, bucket: Bucket, name: str) -> str:
        if bucket.gathers:
            return GATHERED
        return GRADIENTS if name in self.leaves or f"grad.{name}" in self.leaves else RESULTS

    def _made_by(self, node: fx.Node, origin: Origin) -> Owner:
        if "bucket" in node.meta:
            return Owner(BUCKETS, repr(node.meta["bucket"]), origin)
        if node.target in PACKS:
            return Owner(BUCKETS, f"to send, {node.args[1]!r}", origin)
        if node.target is buffer_of:
            return Owner(BUCKETS, f"to send, {node.args[0]!r}", origin)
        if is_transfer(node):  # what comes back is what forward computed
            return Owner(ACTIVATIONS, node.name, origin)
        if is_gather(node):  # before buckets are made
            return Owner(GATHERED, carried_by(node)[1].name, origin)
        if is_reduction(node):
            return Owner(GRADIENTS, carried_by(node)[1].name, origin)
        if is_cheap(node):  # a cast or a copy
            sources = [self.found.get(key) for key in self._keys(node.all_input_nodes[0])]
            (source, *_) = [*sources, None]
            if source is not None and source.category in (PARAMETERS, GATHERED):
                return Owner(GATHERED, source.name, origin)
            if source is not None and source.category == GRADIENTS:
                return Owner(GRADIENTS, source.name, origin)
        if self.phase[node] == FORWARD:
            return Owner(ACTIVATIONS, node.name, origin)
        if self.phase[node] == BACKWARD and is_again(node):
            return Owner(RECOMPUTED, node.name, origin)
        return Owner(TEMPORARIES, node.name, origin)

    def _gradients(self) -> None:
        """What is reduced, and what is returned as a gradient, were gradients all along."""
        for node in self.part.graph.nodes:
            if node.target in PACKS and not node.args[1].gathers:  # pyright: ignore
                operands, bucket = node.args[:2]  # pyright: ignore
                for operand, leaf in zip(operands, bucket.leaves, strict=True):
                    if self._of_leaf(bucket, leaf.name) == GRADIENTS:
                        self._is_gradient(operand, leaf.name)
            elif is_reduction(node):
                self._is_gradient(node.all_input_nodes[0], carried_by(node)[1].name)
        for node, name, category in self._results():
            if category == GRADIENTS:
                self._is_gradient(node, name)

    def _is_gradient(self, node: fx.Node, name: str) -> None:
        while True:
            if len(tensors_of(node)) == 1:
                for key in self._keys(node):
                    owner = self.found[key]
                    if owner.category in (TEMPORARIES, ACTIVATIONS, RECOMPUTED):
                        self.found[key] = owner._replace(category=GRADIENTS, name=name)
            if not is_cheap(node):
                return
            node = node.all_input_nodes[0]

    def _outputs(self) -> None:
        for node, name, category in self._results():
            for key in self._keys(node):
                owner = self.found[key]
                if owner.category in (TEMPORARIES, ACTIVATIONS):
                    self.found[key] = owner._replace(category=category, name=name)

    def _results(self) -> list[tuple[fx.Node, str, str]]:
        given = self.part.output_categories
        nodes: Iterable[fx.Node] = output_node(self.part.graph).args[0]  # pyright: ignore
        return list(zip(nodes, self.part.outputs, given, strict=False))


def summed(rows: Iterable[tuple[int, str]]) -> Mapping[str, int]:
    """Bytes by category, in `ORDER`."""
    total: dict[str, int] = {}
    for nbytes, category in rows:
        total[category] = total.get(category, 0) + nbytes
    rank = {category: i for i, category in enumerate(ORDER)}
    return dict(sorted(total.items(), key=lambda item: rank.get(item[0], len(rank))))
