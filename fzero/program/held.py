"""What a step holds in memory, and when: by category, by value, with the user's lines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, overload

from torch import fx

from fzero.program.categories import Owner, owners, summed
from fzero.program.graph import Part, phases, placeholders
from fzero.program.memory import constant_bytes, lifetimes, storages, timeline
from fzero.program.origin import Origin, origin_of
from fzero.program.sections import layer_of, pattern
from fzero.program.text import size, table


class Row(NamedTuple):
    """Bytes that are alive at a moment.

    Args:
        bytes: on this rank.
        category: see `fzero.program.categories`.
        name: of the leaf, the input, or the value in the listing.
        module: whose call made it, or whose gradient's computation.
        where: `file:line` of the user's that made it; of what is gathered, that reads it first.
    """

    bytes: int
    category: str
    name: str
    module: str
    where: str


@dataclass(frozen=True)
class Peak(Sequence[Row]):
    """What is alive when most is: rows, the largest first.

    Args:
        rows: they add up to `bytes`.
        program: name of the part of the step.
        phase: "forward", "backward" or "update".
        node: the value that is made at this moment.
        origin: where that was recorded.
    """

    rows: tuple[Row, ...]
    program: str
    phase: str
    node: str
    origin: Origin

    @property
    def bytes(self) -> int:
        """Bytes alive."""
        return sum(row.bytes for row in self.rows)

    def by_category(self) -> Mapping[str, int]:
        """Bytes of each category."""
        return summed((row.bytes, row.category) for row in self.rows)

    def by_module(self, category: str = "activations") -> Mapping[str, int]:
        """Bytes of a category by module, the largest first."""
        total: dict[str, int] = {}
        for row in self.rows:
            if row.category == category:
                total[row.module] = total.get(row.module, 0) + row.bytes
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        at = f" ({_place(self.origin)})" if _place(self.origin) else ""
        lines = [f"peak {size(self.bytes)} in {self.program}, {self.phase}, at {self.node}{at}"]
        shares = [
            [size(nbytes), f"{nbytes / max(self.bytes, 1):.1%}", category]
            for category, nbytes in self.by_category().items()
        ]
        lines += table(shares, "rrl")
        lines.append("the largest, layers together:")
        alike: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            # a leaf or a bucket goes by its name, a value by where it is made
            by = pattern(row.module) if row.where else pattern(row.name)
            alike.setdefault((row.category, by, row.where), []).append(row)
        groups = sorted(alike.values(), key=lambda rows: -sum(row.bytes for row in rows))
        lines += table(map(_together, groups[:_SHOWN]), "rrlll")
        if rest := [row for rows in groups[_SHOWN:] for row in rows]:
            lines.append(f"  ... {len(rest)} more, {size(sum(r.bytes for r in rest))}")
        return "\n".join(lines)


_SHOWN = 20


def _together(rows: Sequence[Row]) -> list[str]:
    """Cells for rows that differ in numbers of their names alone."""
    total, first, many = sum(row.bytes for row in rows), rows[0], len(rows) > 1
    name = pattern(first.name) if many and not first.where else first.name
    place = _place(first._replace(module=pattern(first.module)) if many else first)
    return [size(total), f"{len(rows)} x" if many else "", first.category, name, place]


def _place(at: Row | Origin) -> str:
    """Module, file and line, as short as they say it."""
    where = at.where.replace("\\", "/").rpartition("/")[2]
    return ", ".join(x for x in (at.module, where) if x)


class Moment(NamedTuple):
    """What is alive while one node runs.

    Args:
        bytes: alive on this rank, inputs and all the rest of the step's state included.
        categories: the same by category.
        program: name of the part of the step.
        phase: "forward", "backward" or "update".
        node: its name in the listing.
        module: see `Row`.
        where: see `Row`.
    """

    bytes: int
    categories: Mapping[str, int]
    program: str
    phase: str
    node: str
    module: str
    where: str


@dataclass(frozen=True)
class Memory(Sequence[Moment]):
    """The bytes alive at each node of a step, in order."""

    moments: tuple[Moment, ...]

    @overload
    def __getitem__(self, index: int) -> Moment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Moment]: ...
    def __getitem__(self, index: int | slice) -> Moment | Sequence[Moment]:
        return self.moments[index]

    def __len__(self) -> int:
        return len(self.moments)

    def __str__(self) -> str:
        """The most that is alive in each layer's part of the step, in the order of time."""
        runs: list[list[Moment]] = []
        for moment in self.moments:
            before = runs[-1][-1] if runs else None
            # what is in no module goes with what is around
            same = before is not None and before[2:4] == moment[2:4]
            if same and layer_of(moment.module) in ("", layer_of(runs[-1][0].module)):
                runs[-1].append(moment)
            else:
                runs.append([moment])
        step = -(-len(runs) // _LINES)  # several layers a line, where there are many
        lines = [[*chain(*runs[i : i + step])] for i in range(0, len(runs), step)]
        peak = max((m.bytes for m in self.moments), default=1)
        return "\n".join(table([_line(moments, peak) for moments in lines], "llrll"))


_LINES = 40


def _line(moments: Sequence[Moment], peak: int) -> list[str]:
    most = max(moments, key=lambda moment: moment.bytes)
    bar = "#" * round(30 * most.bytes / max(peak, 1))
    layers = list(dict.fromkeys(layer for m in moments if (layer := layer_of(m.module))))
    name = f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else (layers or ["-"])[0]
    (first, *_) = sorted(most.categories.items(), key=lambda item: -item[1])
    return [most.phase, name, size(most.bytes), bar, f"{first[0]} {size(first[1])}"]


def peak(parts: Iterable[Part]) -> Peak:
    """What is alive when a step holds most."""
    totals = [(constant_bytes(part), list(timeline(part.graph)), part) for part in parts]
    most = [constant + max(over, default=0) for constant, over, _ in totals]
    _, over, part = totals[most.index(max(most))]
    place = over.index(max(over))
    known = owners(part)
    node, alive = next(x for i, x in enumerate(_alive(part.graph)) if i == place)
    rows = [*_constant(part, known), *(_row(n, known[key]) for key, n in alive.items())]
    rows = sorted((row for row in rows if row.bytes), key=lambda row: (-row.bytes, row[1:]))
    return Peak(tuple(rows), part.name, phases(part.graph)[node], node.name, origin_of(node))


def memory(parts: Iterable[Part]) -> Memory:
    """What is alive at each node of a step."""
    return Memory(tuple(moment for part in parts for moment in _moments(part)))


def _moments(part: Part) -> Iterator[Moment]:
    known, phase = owners(part), phases(part.graph)
    born, dies = lifetimes(part.graph)
    now = dict(summed((row.bytes, row.category) for row in _constant(part, known)))
    for node in part.graph.nodes:
        for key, nbytes in born.get(node, {}).items():
            category = known[key].category
            now[category] = now.get(category, 0) + nbytes
        categories = summed((nbytes, category) for category, nbytes in now.items() if nbytes)
        if node.op == "call_function":
            origin = origin_of(node)
            yield Moment(
                sum(categories.values()),
                categories,
                part.name,
                phase[node],
                node.name,
                origin.module,
                origin.where,
            )
        for key, nbytes in dies.get(node, {}).items():
            now[known[key].category] -= nbytes


def _alive(graph: fx.Graph) -> Iterator[tuple[fx.Node, dict[int, int]]]:
    """What lives while each node runs, without inputs; the dict changes from one to the next."""
    born, dies = lifetimes(graph)
    alive: dict[int, int] = {}
    for node in graph.nodes:
        alive |= born.get(node, {})
        yield node, alive
        for key in dies.get(node, {}):
            del alive[key]


def _constant(part: Part, known: Mapping[int, Owner]) -> list[Row]:
    """What is there all the time."""
    inputs = storages(placeholders(part.graph))
    rows = [Row(row.bytes, row.category, row.name, "", "") for row in part.resident]
    return rows + [_row(nbytes, known[key]) for key, nbytes in inputs.items()]


def _row(nbytes: int, owner: Owner) -> Row:
    return Row(nbytes, owner.category, owner.name, owner.origin.module, owner.origin.where)
