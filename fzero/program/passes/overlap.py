"""Launch gathers, and await reductions, where an estimate of times says so: `overlap`.

[Note: overlap] Compute is a line of seconds, by the cost model, on which no operator waits. Seen
from its end, each gather has to start so early that it, and those after it on the link, are done
when they are read: that is the latest start which hides it. There it is launched, or later where
more would be on its way than the cap allows. One that the cap never has room for is launched where
it is read.

Reductions run behind. Each is awaited where the estimate says that it is done; earlier where its
result is read, or where the next one is filled that the cap has no room for beside it.

How long a collective takes depends on what else is on the link then, and so on the places: see
[Note: lanes share links]. They are found as if each had the link for itself, and once more with the
times that this comes to. The better of the two stays.

Gathers keep their order among themselves, and so do reductions. How the two mix follows from times,
and so from the shapes of a batch. Ranks whose batches have other shapes may come to another order;
that is refused by name before anything runs, as every difference of collectives is.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fzero.distributed.buckets import Bucket
from fzero.errors import ConfigError, shown
from fzero.program.cost import Cost, cost, node_cost, spans
from fzero.program.graph import UPDATE, copy_graph, order_of, segments
from fzero.program.hardware import CPU, Hardware
from fzero.program.machines import resolve_hardware
from fzero.program.passes.rewrite import legalise
from fzero.program.passes.schedule import launch_part, wait_of
from fzero.program.passes.users import Scheduled
from fzero.program.program import Pass, Program
from fzero.program.promises import TURN
from fzero.program.text import seconds, size


def overlap(cap_mb: float = 64, hardware: Hardware | str = CPU) -> Pass:
    """A pass for `Config(passes=...)`: collectives under compute, as an estimate of times has it.

    It takes the place of `Config.prefetch`, which launches a fixed number of buckets ahead.

    Args:
        cap_mb: MiB of full leaves that may be gathered before they are read, and as many of full
            gradients that may be on their way: what a step may hold more for it.
        hardware: that times are estimated for: a `fzero.program.hardware.Hardware`, or a name that
            `fzero.simulate` takes.

    Returns:
        A `scheduled` pass. Its line in the log says what is waited for before and after.

    Raises:
        ConfigError: the cap is no number of 0 or more, or no hardware has that name.

    Examples:
        >>> import fzero
        >>> fzero.Config(passes=[fzero.passes.overlap(cap_mb=32)]).passes[0].__name__
        'overlap'
    """
    if isinstance(cap_mb, Program):
        raise ConfigError(
            "overlap: it makes a pass, and was given a Program as one. Call it: passes.overlap()."
        )
    number = isinstance(cap_mb, int | float) and not isinstance(cap_mb, bool)
    if not number or not math.isfinite(cap_mb) or cap_mb < 0:
        raise ConfigError(f"overlap: cap_mb={shown(cap_mb)}: must be a finite number >= 0 (MiB).")
    return Scheduled(Overlap(cap_mb, resolve_hardware(hardware)))


@dataclass(frozen=True)
class Overlap:
    """See `overlap`."""

    cap_mb: float
    hardware: Hardware

    __name__ = "overlap"

    def __call__(self, program: Program) -> Program:
        """The Program with its collectives where the estimate has them."""
        first, early = self._placed(program, {})
        flights = (span for span in spans(first, self.hardware) if "bucket" in span.node.meta)
        second = self._placed(program, {span.node.name: span.end - span.start for span in flights})
        best, early = min((first, early), second, key=lambda one: self._cost(one[0]).seconds)
        waits = [self._cost(one).exposed for one in (program, best)]
        text = (
            f"overlap: {early} gathers launched early, {size(int(self.cap_mb * 2**20))} at most; "
            f"waiting {' -> '.join(map(seconds, waits))} by estimate"
        )
        return program.logged(best.graph, text)

    def _cost(self, program: Program) -> Cost:
        return cost([program], self.hardware)

    def _placed(self, program: Program, takes: Mapping[str, float]) -> tuple[Program, int]:
        """The Program with its collectives moved, and how many gathers are early.

        Args:
            program: that is left as it is.
            takes: seconds of collectives, by name of the launch; of others, what they take alone.
        """
        graph = copy_graph(program.graph)
        cap = int(self.cap_mb * 2**20)
        line = _Line(graph, self.hardware, takes)
        launches = [n for n in line.nodes if "bucket" in n.meta and n.meta["phase"] != UPDATE]
        moves: dict[int, list[fx.Node]] = {}  # what goes before which node
        segment_of = segments(graph)
        first = {number: i for i, number in reversed(list(enumerate(_numbers(line, segment_of))))}
        by_segment: dict[int, list[fx.Node]] = {}
        for node in launches:
            if _bucket(node).gathers:
                by_segment.setdefault(segment_of[node][0], []).append(node)
        early = 0
        for number, gathers in by_segment.items():
            places = gather_places(line, gathers, first[number], cap)
            for node, place in zip(gathers, places, strict=True):
                early += place < line.place[wait_of(node)]
                moves.setdefault(place, []).extend(launch_part(node))
        reductions = [node for node in launches if not _bucket(node).gathers]
        places = wait_places(line, reductions, cap)
        for node, place in zip(reductions, places, strict=True):
            moves.setdefault(place, []).extend(_awaiting(node))
        moved = {node for nodes in moves.values() for node in nodes}
        for place in sorted(moves):
            # what moves itself marks no place any more
            before = next(x for x in line.nodes[place:] if x not in moved)
            for node in moves[place]:
                before.prepend(node)
        legalise(graph)
        for turn, node in enumerate(node for node in graph.nodes if "bucket" in node.meta):
            node.meta[TURN] = turn
        return program.logged(graph, ""), early


class _Line:
    """A graph's nodes with the estimated second at which each starts if none waits."""

    def __init__(self, graph: fx.Graph, hardware: Hardware, takes: Mapping[str, float]) -> None:
        self.nodes = list(graph.nodes)
        self.place = order_of(graph)
        self.takes: dict[fx.Node, float] = {}
        self.starts: list[float] = []
        now = 0.0
        for node in self.nodes:
            self.starts.append(now)
            seconds = node_cost(node, hardware).seconds
            if "bucket" in node.meta:
                self.takes[node] = takes.get(node.name, seconds)
            else:
                now += seconds


def gather_places(line: _Line, gathers: Sequence[fx.Node], first: int, cap: int) -> list[int]:
    """Before which node each gather of a segment is launched.

    Args:
        line: of the graph.
        gathers: launches, in their order.
        first: where the segment begins.
        cap: bytes that may be on their way and not read yet.
    """
    reads = [line.place[wait_of(node)] for node in gathers]
    latest = [0] * len(gathers)
    start = math.inf
    for i in reversed(range(len(gathers))):
        start = min(line.starts[reads[i]], start) - line.takes[gathers[i]]
        latest[i] = min(max(bisect_right(line.starts, start) - 1, first), reads[i])
    places: list[int] = []
    for i, node in enumerate(gathers):
        place = max(latest[i], places[-1] if places else first)
        room = cap - _bucket(node).nbytes
        while place < reads[i]:
            flying = [j for j in range(i) if reads[j] >= place]
            if sum(_bucket(gathers[j]).nbytes for j in flying) <= room:
                break
            # nothing of it is there until one of them is read, or there is no room at all
            place = min((reads[j] + 1 for j in flying), default=reads[i])
        places.append(min(place, reads[i]))
    return places


def wait_places(line: _Line, reductions: Sequence[fx.Node], cap: int) -> list[int]:
    """Before which node each reduction is awaited.

    Args:
        line: of the graph.
        reductions: launches, in their order.
        cap: bytes that may be on their way.
    """
    places: list[int] = []
    flying: list[int] = []
    free = 0.0  # from when on the link is
    for i, node in enumerate(reductions):
        launched, filled = line.place[node], line.place[launch_part(node)[0]]
        flying = [j for j in flying if places[j] > filled]
        room = cap - _bucket(node).nbytes
        while flying and sum(_bucket(reductions[j]).nbytes for j in flying) > room:
            oldest = flying.pop(0)
            places[oldest] = max(filled, line.place[reductions[oldest]] + 1)
        free = max(line.starts[launched], free) + line.takes[node]
        done = bisect_left(line.starts, free) if room >= 0 else launched + 1
        moved = _awaiting(node)
        read = min(line.place[user] for x in moved for user in x.users if user not in moved)
        places.append(max(min(done, read, len(line.nodes) - 1), launched + 1))
        flying.append(i)
    return places


def _awaiting(launch: fx.Node) -> list[fx.Node]:
    """A reduction's wait, and what takes its result apart."""
    wait = wait_of(launch)
    (unpack,) = wait.users
    return [wait, unpack, *unpack.users]


def _bucket(launch: fx.Node) -> Bucket:
    return launch.meta["bucket"]


def _numbers(line: _Line, segment_of: dict[fx.Node, tuple[int, str]]) -> list[int]:
    """Each node's segment; -1 of inputs, before which nothing is launched."""
    inputs = ("placeholder", "get_attr")
    return [-1 if x.op in inputs else segment_of[x][0] for x in line.nodes]
