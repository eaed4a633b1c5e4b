"""What a plan of recomputation would hold, by arithmetic on the graph: nothing is copied.

[Note: the model] A graph is read once into arrays: which storage each node makes, and who reads
it. A *value* is a storage that forward makes, or a gathered leaf with its views and casts. A plan
is the set of values that backward may read as forward made them; any other is made again before its
first reader there, from what is there, as `recompute` and `regather` do it. `Liveness.under(saved)`
replays backward for one plan: what is alive at each step, and what the copies cost, in a time that
grows with the graph and not with its tensors. Sizes of shards are those of the largest, so that all
ranks find the same.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from fzero.distributed.buckets import bucket_of
from fzero.program.cost import node_cost
from fzero.program.graph import BACKWARD, FORWARD, phases, tensors_of
from fzero.program.hardware import Hardware
from fzero.program.memory import is_wait, storages
from fzero.program.passes.gathers import leaf_of, prepares_gather
from fzero.program.passes.offload import Stay, may_travel, places_of
from fzero.program.passes.recompute import may_be_copied
from fzero.program.passes.rewrite import carried_by, is_cheap, is_gather, is_reduction
from fzero.program.program import Program


@dataclass
class Value:
    """What a plan saves or makes again.

    Args:
        name: of the first node that makes it; of a leaf, its own.
        nbytes: that it holds.
        nodes: that make it, and views of it.
        leaf: whether it is a gathered leaf.
    """

    name: str
    nbytes: int
    nodes: list[int]
    leaf: bool = False


@dataclass
class Alive:
    """A step under a plan.

    Args:
        bytes: alive at each step, forward's nodes and then backward's and its copies.
        first: of each value, the first step of backward that reads it as forward made it.
        last: the last such step.
        copied: the nodes that run again.
        price: of running them, in FLOPs; see `Liveness.price`.
        flops: of matrix products among them.
        stalled: FLOPs that could be done while nothing is done but wait for the host.
    """

    bytes: Any
    first: dict[int, int]
    last: dict[int, int]
    copied: dict[int, int]
    price: float
    flops: int
    stalled: float = 0.0

    @property
    def peak(self) -> int:
        """Most bytes alive."""
        return int(self.bytes.max(initial=0))


class Liveness:
    """The model of a graph.

    Args:
        program: as `recompute` takes it, its gathers at their first use.
        hardware: what prices of gathers are relative to.
        away: whether values may wait in the host's memory.

    Attributes:
        values: all that a plan may name.
        read: those that backward reads in any case: saving them is saving all.
        leaves: the gathered ones.
        sendable: those that may wait on the host, see `passes.offload`.
    """

    def __init__(self, program: Program, hardware: Hardware, *, away: bool = False) -> None:
        graph = program.graph
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        phase = phases(graph)
        self.operands = [[self.place[x] for x in n.all_input_nodes] for n in self.nodes]
        self.backward = next(
            (i for i, n in enumerate(self.nodes) if phase[n] == BACKWARD), len(self.nodes)
        )
        self.hardware = hardware
        self._read_storages(phase)
        self._read_prices()
        self._read_intervals()
        self.sendable: set[int] = set()
        if away:
            self._read_journeys()

    # ------------------------------------------------------------------------- read once
    def _read_storages(self, phase: dict[fx.Node, str]) -> None:
        inputs = set(storages(n for n in self.nodes if n.op in ("placeholder", "get_attr")))
        same: dict[int, int] = {}
        self.keys: list[list[int]] = []  # of each node, the storages it is on, by number
        number: dict[int, int] = {}
        self.sizes: list[int] = []
        self.makers: list[int] = []
        for i, node in enumerate(self.nodes):
            mine = []
            if is_wait(node):
                for launched in storages(node.all_input_nodes):
                    same |= dict.fromkeys(storages([node]), launched)
            for key, nbytes in storages([node]).items():
                key = same.get(key, key)
                if key in inputs:
                    continue
                if key not in number:
                    number[key] = len(self.sizes)
                    self.sizes.append(_padded(node, nbytes))
                    self.makers.append(i)
                mine.append(number[key])
            self.keys.append(mine)
        of_leaf: dict[int, int] = {}  # node -> value, of gathers and what is made of them alone
        self.values: list[Value] = []
        self.of: list[int | None] = [None] * len(self.nodes)  # the value that a node belongs to
        by_key: dict[int, int] = {}
        for i, node in enumerate(self.nodes[: self.backward]):
            if phase[node] != FORWARD or node.op != "call_function":
                continue
            if is_gather(node):
                value = self._new(node, self.keys[i], leaf=True)
                of_leaf[i] = value
            elif is_cheap(node) and self.operands[i] and self.operands[i][0] in of_leaf:
                value = of_leaf[i] = of_leaf[self.operands[i][0]]
                self.values[value].nbytes += sum(
                    self.sizes[k] for k in self.keys[i] if self.makers[k] == i
                )
            elif prepares_gather(node):  # made again with the gather
                self.of[i] = -1
                continue
            elif not may_be_copied(node) or not self.keys[i]:
                continue
            elif len(self.keys[i]) > 1:  # a tuple: its parts are the values
                self.of[i] = -1
                continue
            else:
                (key,) = self.keys[i]
                maker = self.nodes[self.makers[key]]
                if self.makers[key] >= self.backward or not may_be_copied(maker):
                    continue
                if key not in by_key:
                    by_key[key] = self._new(node, [key])
                value = by_key[key]
            self.of[i] = value
            self.values[value].nodes.append(i)
        self.leaves = {i for i, value in enumerate(self.values) if value.leaf}

    def _new(self, node: fx.Node, keys: list[int], *, leaf: bool = False) -> int:
        nbytes = sum(self.sizes[k] for k in keys)
        self.values.append(Value(leaf_of(node) if leaf else node.name, nbytes, [], leaf))
        return len(self.values) - 1

    def _read_prices(self) -> None:
        self.prices: dict[int, float] = {}
        self.flops: dict[int, int] = {}
        for i, node in enumerate(self.nodes[: self.backward]):
            if self.of[i] is None:
                continue
            if is_gather(node):
                kind, leaf, axis = carried_by(node)
                sent = bucket_of(kind, [leaf], leaf.dtype, axis)
                alone = self.hardware.send_time(sent) if axis.size > 1 else 0.0
                self.prices[i], self.flops[i] = alone * self.hardware.flops, 0
                continue
            cost = node_cost(node, self.hardware)
            self.prices[i], self.flops[i] = float(cost.flops + cost.bytes_moved), cost.flops

    def _read_intervals(self) -> None:
        """Lifetimes that no plan changes, and what plans change, apart."""
        returned = {k for i in self.operands[-1] for k in self.keys[i]}
        self.fixed_last = list(self.makers)
        forward_last = list(self.makers)
        readers: dict[int, list[int]] = {}
        views: dict[int, int] = {}  # of backward, on what forward made: a copy's view in its place
        for i, operands in enumerate(self.operands):
            viewed = [x for x in operands if set(self.keys[x]) & set(self.keys[i])]
            if i >= self.backward and viewed:
                x = views.get(viewed[0], viewed[0])
                if self.of[x] is not None:
                    views[i] = x
            for x in (views.get(x, x) for x in operands):
                if i >= self.backward and self.of[x] is not None and i != len(self.nodes) - 1:
                    readers.setdefault(i, []).append(x)
                    continue
                for k in self.keys[x]:
                    self.fixed_last[k] = max(self.fixed_last[k], i)
                    if i < self.backward:
                        forward_last[k] = max(forward_last[k], i)
        for k in returned:
            self.fixed_last[k] = len(self.nodes)
        self.readers = [(i, readers.get(i, [])) for i in range(self.backward, len(self.nodes))]
        self.read = {
            v for _, xs in self.readers for x in xs if (v := self.of[x]) is not None and v >= 0
        }
        self.returned = {v for k in returned for v in self._values_on(k)}
        self._forward_end = {
            v: max((forward_last[k] for x in value.nodes for k in self.keys[x]), default=0)
            for v, value in enumerate(self.values)
        }
        self._births = np.array(self.makers, dtype=np.int64)
        self._sizes = np.array(self.sizes, dtype=np.int64)

    def _read_journeys(self) -> None:
        """Which values may wait on the host, and the seconds that every node takes."""
        self.seconds = [node_cost(node, self.hardware).seconds for node in self.nodes]
        on: dict[int, list[int]] = {}
        for i, mine in enumerate(self.keys[: self.backward]):
            for k in mine:
                on.setdefault(k, []).append(i)
        for v in self.read - self.leaves - self.returned:
            value = self.values[v]
            (key,) = self.keys[value.nodes[0]]
            first, *views = value.nodes
            known = {self.makers[key], *value.nodes}
            if (
                may_travel(self.nodes[first])
                and self.fixed_last[key] < self.backward
                and known.issuperset(on[key])
                and all(is_cheap(self.nodes[x]) for x in views)
            ):
                self.sendable.add(v)

    def crossing(self, value: int) -> float:
        """FLOPs that could be done while a value goes to the host, or comes from there."""
        hardware = self.hardware
        seconds = hardware.crossing_time(self.values[value].nbytes)
        return seconds * (hardware.low_flops or hardware.flops)

    def forward_end(self, value: int) -> int:
        """The last node of forward that reads a value."""
        return self._forward_end[value]

    def _values_on(self, key: int) -> Iterator[int]:
        value = self.of[self.makers[key]]
        if value is not None and value >= 0:
            yield value

    # -------------------------------------------------------------------------- for each plan
    def under(self, saved: Collection[int], away: Collection[int] = ()) -> Alive:
        """The step when backward may read these values, and has to make others again.

        Args:
            saved: values.
            away: those of them that wait on the host.
        """
        of, operands, keys = self.of, self.operands, self.keys
        made: dict[int, int] = {}  # node -> the step that it runs again at
        born: list[tuple[int, int]] = []  # of copies: step, bytes
        dies: dict[int, int] = {}  # a copied storage's last step
        born_at: dict[int, int] = {}
        step_of = np.arange(len(self.nodes) + 1, dtype=np.int64)
        last: dict[int, int] = {}  # of storages of forward that backward reads
        first: dict[int, int] = {}
        step = self.backward

        def gone(x: int) -> bool:
            value = of[x]
            if value is None:
                return False
            return value not in saved if value >= 0 else True  # a tuple goes with its parts

        def use(x: int, at: int) -> None:
            if x in made:
                for k in keys[x]:
                    dies[k] = at
                return
            for k in keys[x]:
                last[k] = at
            value = of[x]
            if value is not None and value not in first:
                first[value] = at

        for i, forward in self.readers:
            todo = [x for x in forward if gone(x) and x not in made]
            if todo:
                missing: set[int] = set()
                while todo:
                    x = todo.pop()
                    if x not in missing:
                        missing.add(x)
                        todo += [y for y in operands[x] if gone(y) and y not in made]
                for x in sorted(missing):
                    for k in keys[x]:
                        if k not in born_at:
                            born_at[k] = step
                            born.append((k, self.sizes[k]))
                        dies[k] = step
                    made[x] = step
                    for y in operands[x]:
                        use(y, step)
                    step += 1
            for x in forward:
                use(x, step)
            step_of[i] = step
            step += 1
        step_of[-1] = step

        # what backward reads of forward lives until then; all the rest as it always does
        ends = np.array(self.fixed_last, dtype=np.int64)
        ends = step_of[ends]
        for k, at in last.items():
            ends[k] = max(ends[k], at)
        price, stalled = 0.0, 0.0
        if gone_away := [v for v in away if v in first]:
            stays = [Stay(self.values[v].nbytes, self._forward_end[v], first[v]) for v in gone_away]
            # copies stand between the nodes of backward
            node_at = {at: x for x, at in made.items()}
            node_at |= {int(step_of[i]): i for i, _ in self.readers}
            steps = [self.seconds[node_at.get(s, s)] for s in range(step)]
            starts = np.concatenate([[0.0], np.cumsum(steps)])
            places, seconds = places_of(stays, starts.tolist(), self.backward - 1, self.hardware)
            stalled = seconds * (self.hardware.low_flops or self.hardware.flops)
            price = stalled + 2 * sum(stay.nbytes for stay in stays)  # read down, written up
            for v, place in zip(gone_away, places, strict=True):
                (k,) = self.keys[self.values[v].nodes[0]]
                born.append((k, self.sizes[k]))
                born_at[k], dies[k] = place.back, last[k]
                ends[k] = place.awaited
        delta = np.zeros(step + 2, dtype=np.int64)
        np.add.at(delta, step_of[self._births], self._sizes)
        np.add.at(delta, ends + 1, -self._sizes)
        for k, nbytes in born:
            delta[born_at[k]] += nbytes
            delta[dies[k] + 1] -= nbytes
        value_last = {value: at for k, at in last.items() for value in self._values_on(k)}
        price += sum(self.prices.get(x, 0.0) for x in made)
        flops = sum(self.flops.get(x, 0) for x in made)
        return Alive(np.cumsum(delta)[:step], first, value_last, made, price, flops, stalled)

    def closure(self, value: int, saved: Collection[int], copied: Collection[int]) -> set[int]:
        """The nodes that would run again, and do not yet, if a value were no longer saved."""
        found: set[int] = set()
        todo = list(self.values[value].nodes[:1])
        while todo:
            x = todo.pop()
            if x in found or x in copied:
                continue
            found.add(x)
            for y in self.operands[x]:
                at = self.of[y]
                if at is not None and (at < 0 or at not in saved or at == value):
                    todo.append(y)
        return found


def _padded(node: fx.Node, nbytes: int) -> int:
    """Bytes of a storage; of a part of a reduced leaf, those of the largest rank's."""
    if not is_reduction(node):
        return nbytes
    kind, leaf, _ = carried_by(node)
    if kind == "all_reduce":  # of replicas: what it was given
        return nbytes
    (made,) = tensors_of(node)
    row = made.nbytes // max(made.shape[leaf.dim], 1) if leaf.dim is not None else made.nbytes
    if leaf.dim is None or not row:
        return nbytes
    return row * leaf.padded_rows
