"""Plans of recomputation from the most memory to the least, with the least work that was found.

[Note: how plans are found] What backward may read of forward is a set of values. From the set that
saves all, and from sets that save only where forward is narrow (Chen's segments), values are given
up one by one: next the one whose bytes, over the steps at which too much is alive, are cheapest to
make again. `Liveness` judges each. A plan for a peak is then polished: what it can take back under
that peak it takes back, the dearest first; and products of matrices are exchanged for smaller ones.
Beside these greedy plans stands one in which a knapsack chose how many products of each size are
made again: many small ones may free what is missing more closely than a few large ones, and no
single exchange leads from the one to the other. All of it follows from the graph alone, and no rank
asks another.

Where the host's memory is another than the device's, a saved value may wait there. That costs what
the copies move, and the FLOPs that could be done while a step stands still for them: so it takes
the place of recomputation as long as the link has nothing else to do, and beyond that only where
making a value again costs more.

References: Chen, Xu, Zhang, Guestrin, arXiv:1604.06174 (segments); Kirisame et al., Dynamic Tensor
Rematerialization, arXiv:2006.09616 (cost per byte and time); Jain et al., Checkmate,
arXiv:1910.02653 (the optimum that these come near).
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fzero.program.hardware import Hardware
from fzero.program.liveness import Alive, Liveness
from fzero.program.program import Program

RUNGS = 1024
"""How many peaks the range between the most and the least is cut into."""


@dataclass(frozen=True)
class Plan:
    """What a step does to hold less.

    Args:
        recomputed: nodes of forward that backward makes again, where it needs them.
        regathered: leaves that backward gathers again.
        offloaded: nodes of forward whose values wait for backward on the host.
        peak: most bytes alive, by `Liveness`: without inputs, state and buckets.
        flops: of matrix products that run again.
        price: of all that runs again, FLOPs, bytes moved and gathers together, in FLOPs.
    """

    recomputed: frozenset[str] = frozenset()
    regathered: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    peak: int = 0
    flops: int = 0
    price: float = 0.0


@dataclass
class _State:
    """A plan that is being made."""

    saved: frozenset[int]
    alive: Alive = field(repr=False)
    away: frozenset[int] = frozenset()

    @property
    def key(self) -> tuple[float, int]:
        return self.alive.price, self.alive.peak


class Ladder:
    """The plans of a Program, by the peak that they reach.

    Args:
        program: before `regather`; its gathers at their first use and its reductions where they are
            ready.
        regather: whether all gathered leaves are gathered again in backward to begin with; a
            plan may keep some, and with False may gather some again.
        hardware: what time means beside FLOPs.
        away: whether saved values may wait on the host.

    Attributes:
        most, least: peaks between which the rungs lie.
    """

    def __init__(
        self, program: Program, *, regather: bool, hardware: Hardware, away: bool = False
    ) -> None:
        self.model = Liveness(program, hardware, away=away)
        everything = frozenset(self.model.read)
        start = everything - self.model.leaves if regather else everything
        self.start = self._state(start)
        self.found: list[_State] = []
        # a leaf that backward need not gather again is as good as a value to give up
        self._descend(self.start)
        for saved in self._segments():
            state = self._state(saved)
            if state.alive.peak < self.start.alive.peak:
                self._descend(state)
        if self.model.sendable:
            self._descend(self._state(self.start.saved, self.model.sendable))
        self.most = self.start.alive.peak
        self.least = min(state.alive.peak for state in self.found)

    def target(self, rung: int) -> int:
        """The peak of a rung: the first is the most, the last the least."""
        return self.most - (self.most - self.least) * rung // RUNGS

    def rung_of(self, peak: int) -> int:
        """The first rung whose peak is no higher."""
        span = max(self.most - self.least, 1)
        return min(max(-(-(self.most - peak) * RUNGS // span), 0), RUNGS)

    def plan(self, rung: int) -> Plan:
        """The cheapest plan that was found for the peak of a rung."""
        target = self.target(rung)
        fits = sorted(
            (s for s in self.found if s.alive.peak <= target), key=lambda s: (*s.key, len(s.saved))
        )
        best = min((self._polished(state, target) for state in fits[:_POLISHED]), key=_work)
        starts = [best]
        if (mixed := self._mixed(target)) is not None:
            mixed = self._polished(mixed, target)
            if _work(mixed) < _work(best):
                starts.append(mixed)
        # both: of two plans the one that has more to exchange may end with less work
        return self._as_plan(min((self._exchanged(x, target) for x in starts), key=_work))

    # --------------------------------------------------------------------------- searching
    def _state(self, saved: Iterable[int], away: Iterable[int] = ()) -> _State:
        saved = frozenset(saved)
        away = saved.intersection(away)
        return _State(saved, self.model.under(saved, away), away)

    def _with(self, state: _State, value: int, *, away: bool = False) -> _State:
        """The plan that saves a value too, here or on the host."""
        there = state.away | {value} if away else state.away - {value}
        return self._state(state.saved | {value}, there)

    def _without(self, state: _State, value: int) -> _State:
        """The plan that makes a value again."""
        return self._state(state.saved - {value}, state.away)

    def _descend(self, state: _State) -> None:
        """Give up values until nothing helps, and note each peak on the way."""
        self.found.append(state)
        while True:
            target = state.alive.peak - max(state.alive.peak // _STEPS, 1)
            after = self._lowered(state, target)
            if after is None:
                return
            state = after
            self.found.append(state)

    def _lowered(self, state: _State, target: int, *, products: bool = True) -> _State | None:
        """A plan of a lower peak; None if giving up no value leads there.

        Args:
            products: whether values may be given up that take products of matrices to make again.
        """
        before = state
        while state.alive.peak > target:
            over = _over(state.alive, target)
            moves = self._moves(state, target, products=products)
            for value, away in itertools.islice(moves, _TRIED):
                after = self._with(state, value, away=True) if away else self._without(state, value)
                if _over(after.alive, target) < over:
                    state = after
                    break
            else:
                return state if state.alive.peak < before.alive.peak else None
        return state

    def _ranked(self, state: _State, target: int) -> Iterator[int]:
        """Values to give up, the best by price for bytes and steps first."""
        return (value for value, away in self._moves(state, target, products=True) if not away)

    def _moves(self, state: _State, target: int, *, products: bool) -> Iterator[tuple[int, bool]]:
        """Values to give up or to send away, and which, the best by price for bytes and steps
        first."""
        alive, model = state.alive, self.model
        over = np.concatenate([[0], np.cumsum(alive.bytes > target)])
        ranked: list[tuple[float, int, bool]] = []
        for value in state.saved:
            if value in model.returned or value not in alive.first or value in state.away:
                continue
            start = max(model.forward_end(value) + 1, 0)
            steps = int(over[alive.first[value]] - over[min(start, alive.first[value])])
            gain = steps * model.values[value].nbytes
            if gain <= 0:
                continue
            if value in model.sendable:
                # once the link has no time left, a step waits for each copy, down and up
                waits = 2.0 * model.crossing(value) if alive.stalled else 0.0
                price = waits + 2 * model.values[value].nbytes
                ranked.append(((price + 1.0) / gain, value, True))
            again = model.closure(value, state.saved, alive.copied)
            if not products and any(model.flops.get(x) for x in again):
                continue
            price = sum(model.prices.get(x, 0.0) for x in again)
            # what the copies read has to live until then
            for x in {y for node in again for y in model.operands[node]}:
                source = model.of[x]
                if source is None or source < 0 or source == value or source not in state.saved:
                    continue
                until, now = alive.first[value], alive.last.get(source, model.forward_end(source))
                if until > now:
                    gain -= int(over[until] - over[now]) * model.values[source].nbytes
            if gain > 0:
                ranked.append(((price + 1.0) / gain, value, False))
        return ((value, away) for _, value, away in sorted(ranked))

    def _polished(self, state: _State, target: int) -> _State:
        """The plan with all taken back that fits under a peak, the dearest for its bytes first."""
        refused: set[int] = set()
        while True:
            before = state
            for value in [v for v in self._dearest(state) if v not in refused]:
                for after in self._taken_back(state, value):
                    if after.alive.peak <= target and after.alive.price < state.alive.price:
                        state = after
                        break
                else:
                    refused.add(value)
            if state is before:
                return state

    def _taken_back(self, state: _State, value: int) -> Iterator[_State]:
        """Plans that have a value which this one makes again, or brings back from the host."""
        yield self._with(state, value)
        if value in self.model.sendable and value not in state.away:
            yield self._with(state, value, away=True)

    def _exchanged(self, state: _State, target: int) -> _State:
        """The plan after exchanges that pay.

        A product is saved again; given up for it are values that take no product to make, and if
        need be one smaller product.
        """
        while True:
            before = state
            for value in self._of_each_size(self._dearest(state)):
                for after in self._instead(state, value, target):
                    after = self._polished(after, target)
                    if _work(after) < _work(state):
                        state = after
                        break
                if state is not before:
                    break
            if state is before:
                return state

    def _instead(self, state: _State, value: int, target: int) -> Iterator[_State]:
        """Plans under a peak that save a value which this one makes again."""
        after = self._with(state, value)
        after = self._lowered(after, target, products=False) or after
        if after.alive.peak <= target:
            yield after
            return
        for other in self._of_each_size(self._ranked(after, target)):
            if self._product(other) < self._product(value):
                less = self._without(after, other)
                less = self._lowered(less, target, products=False) or less
                if less.alive.peak <= target:
                    yield less

    def _mixed(self, target: int) -> _State | None:
        """A plan under a peak whose products are chosen together; None: it needs none, or fails.

        All that takes no product to make is given up first. What is missing then is a knapsack:
        products of one size are alike, each frees what the first of them frees by itself.
        """
        base = self._lowered(self.start, target, products=False) or self.start
        missing = base.alive.peak - target
        sizes: dict[tuple[int, int], list[int]] = {}
        for value in self._ranked(base, target):
            again = self.model.closure(value, base.saved, base.alive.copied)
            if flops := sum(self.model.flops.get(x, 0) for x in again):
                size = (flops, self.model.values[value].nbytes)
                sizes.setdefault(size, []).append(value)
        if missing <= 0 or not sizes:
            return None
        alike: list[list[int]] = []
        offers: list[tuple[int, int, int]] = []
        for values in sizes.values():
            one = self._without(base, values[0])
            # what is made on the way is there too, as attention's statistics: nobody has to keep it
            one = self._lowered(one, target, products=False) or one
            freed, flops = base.alive.peak - one.alive.peak, one.alive.flops - base.alive.flops
            if freed > 0:
                alike.append(values)
                offers.append((freed, flops, len(values)))
        counts = knapsack(offers, missing)
        if counts is None:
            return None
        state = base
        for values, count in zip(alike, counts, strict=True):
            for value in values[:count]:
                state = self._without(state, value)
        # estimates: where giving up several frees less than each does alone, some more has to go
        state = self._lowered(state, target) or state
        return state if state.alive.peak <= target else None

    def _product(self, value: int) -> int:
        """FLOPs of the products that make a value."""
        return sum(self.model.flops.get(x, 0) for x in self.model.values[value].nodes)

    def _of_each_size(self, values: Iterable[int]) -> list[int]:
        """Of products of one size the first; the largest first."""
        alike: dict[tuple[int, int], int] = {}
        for value in values:
            if flops := self._product(value):
                alike.setdefault((flops, self.model.values[value].nbytes), value)
        return [value for _, value in sorted(alike.items(), reverse=True)]

    def _dearest(self, state: _State) -> list[int]:
        """The values that are made again, those of the most work for their bytes first."""
        model = self.model
        again = {v for x in state.alive.copied if (v := model.of[x]) is not None and v >= 0}
        ranked = []
        for value in again - state.saved:
            nodes = (x for x in model.values[value].nodes if x in state.alive.copied)
            price = sum(model.prices.get(x, 0.0) for x in nodes)
            ranked.append((-price / max(model.values[value].nbytes, 1), value))
        ranked += [(0.0, value) for value in state.away]
        return [value for _, value in sorted(ranked)]

    def _segments(self) -> Iterator[frozenset[int]]:
        """Sets that save what crosses a few narrow places of forward, evenly spread."""
        model = self.model
        width = np.zeros(model.backward + 1, dtype=np.int64)
        weight = np.zeros(model.backward + 1, dtype=np.int64)
        crosses = [
            (v, value.nodes[0], model.forward_end(v))
            for v, value in enumerate(model.values)
            if not value.leaf and model.forward_end(v) > value.nodes[0]
        ]
        for v, start, end in crosses:
            nbytes = model.values[v].nbytes
            width[start + 1 : end + 1] += nbytes
            if v in model.read:
                weight[start] += nbytes
        progress = np.cumsum(weight)
        total = max(int(progress[-1]), 1)
        seen: set[tuple[int, ...]] = set()
        for count in _SEGMENTS:
            places = []
            for k in range(1, count):
                low, high = ((k - 0.5) / count * total, (k + 0.5) / count * total)
                within = np.flatnonzero((progress >= low) & (progress <= high))
                within = within[within > 0]
                if within.size:
                    places.append(int(within[np.argmin(width[within])]))
            key = tuple(dict.fromkeys(places))
            if key in seen:
                continue
            seen.add(key)
            saved = {v for v, start, end in crosses if any(start < p <= end for p in key)}
            leaves = self.start.saved & model.leaves
            yield frozenset(saved | leaves)

    def _as_plan(self, state: _State) -> Plan:
        model = self.model
        gone: set[str] = set()
        for i, value in enumerate(model.of):
            copied = value is not None and i in state.alive.copied
            if copied and value not in model.leaves:
                gone.add(model.nodes[i].name)
        leaves = {model.values[v].name for v in model.leaves - state.saved}
        away = {model.nodes[model.values[v].nodes[0]].name for v in state.away}
        alive = state.alive
        return Plan(
            frozenset(gone),
            frozenset(leaves),
            frozenset(away),
            alive.peak,
            alive.flops,
            alive.price,
        )


def _work(state: _State) -> tuple[float, float, int]:
    """What of two plans under one peak the better one has less of."""
    return (state.alive.flops + state.alive.stalled, *state.key)


def knapsack(offers: Sequence[tuple[int, int, int]], missing: int) -> list[int] | None:
    """How many of each offer to take, to free `missing` bytes for the least FLOPs.

    Args:
        offers: bytes that one frees, its FLOPs, and how many of it there are.
        missing: > 0.

    Returns:
        None if all of them together free less.

    >>> knapsack([(10, 30, 9), (4, 11, 9)], 12)  # three small ones instead of two large ones
    [0, 3]
    """
    if sum(freed * count for freed, _, count in offers) < missing:
        return None
    # bytes in whole grains: of an offer rounded down, so that what is taken frees enough
    grain = max(missing // _GRAINS, 1)
    wanted = -(-missing // grain)
    least = np.full(wanted + 1, np.inf)  # FLOPs that free so many grains, or more
    least[0] = 0
    taken: list[tuple[int, int, Any]] = []
    for offer, (freed, flops, count) in enumerate(offers):
        grains = min(freed // grain, wanted)
        for _ in range(min(count, wanted // max(grains, 1) + 1)):
            before = np.concatenate([np.full(grains, least[0]), least[: wanted + 1 - grains]])
            taken.append((offer, grains, better := before + flops < least))
            least = np.where(better, before + flops, least)
    if least[wanted] == np.inf:
        return None
    counts, left = [0] * len(offers), wanted
    for offer, grains, better in reversed(taken):
        if better[left]:
            counts[offer] += 1
            left = max(left - grains, 0)
    return counts


def _over(alive: Alive, target: int) -> int:
    """Bytes above a peak, summed over the steps."""
    return int(np.maximum(alive.bytes - target, 0).sum())


_STEPS = 40  # a descent lowers the peak by this share at a time
_TRIED = 8  # values that are tried before a descent gives up
_POLISHED = 3
_GRAINS = 2048  # what is missing is counted in so many parts
_SEGMENTS: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
