"""What two Programs do differently."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from fzero.program.cost import cost
from fzero.program.foreign import sending
from fzero.program.graph import Part
from fzero.program.hardware import CPU
from fzero.program.held import peak
from fzero.program.listing import collectives
from fzero.program.text import count, size, table


class Change(NamedTuple):
    """One thing that differs.

    Args:
        what: it is: "peak", "peak: gathered", "sent: all_gather", "FLOP", "backward: aten.mm", ...
        one: of the first Program, as a number.
        other: of the second.
        unit: "bytes", "FLOP", "times".
    """

    what: str
    one: int
    other: int
    unit: str


@dataclass(frozen=True)
class Diff(Sequence[Change]):
    """What differs between two Programs, in numbers, and the lines of their logs.

    Args:
        changes: of numbers.
        one, other: lines of log that only the first, only the second has.
    """

    changes: tuple[Change, ...]
    one: tuple[str, ...]
    other: tuple[str, ...]

    @overload
    def __getitem__(self, index: int) -> Change: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Change]: ...
    def __getitem__(self, index: int | slice) -> Change | Sequence[Change]:
        return self.changes[index]

    def __len__(self) -> int:
        return len(self.changes)

    def __str__(self) -> str:
        if not self.changes and not self.one and not self.other:
            return "no difference"
        rows = [
            [change.what, _shown(change.one, change.unit), _shown(change.other, change.unit)]
            + [_times(change)]
            for change in self.changes
        ]
        lines = table(rows, "lrrr")
        lines += [f"  - {line}" for line in self.one]
        lines += [f"  + {line}" for line in self.other]
        return "\n".join(lines)


def diff(parts: Iterable[Part], others: Iterable[Part]) -> Diff:
    """What differs from `parts` to `others`."""
    one, other = list(parts), list(others)
    pairs = zip(_numbers(one), _numbers(other), strict=True)
    changes = tuple(change for (unit, a), (_, b) in pairs for change in _changes(a, b, unit))
    logs = [{line: None for part in parts for line in part.log} for parts in (one, other)]
    only = [tuple(x for x in logs[i] if x not in logs[1 - i]) for i in (0, 1)]
    return Diff(changes, *only)


def _numbers(parts: list[Part]) -> Iterator[tuple[str, dict[str, int]]]:
    """What is compared: tables of one unit each, the same for every Program."""
    held, spent = peak(parts), cost(parts, CPU)
    most = {f"peak: {category}": n for category, n in held.by_category().items()}
    yield "bytes", {"peak": held.bytes, **most}
    yield "bytes", {"moved": spent.bytes_moved, **{f"sent: {k}": n for k, n in spent.sent.items()}}
    yield "FLOP", {"FLOP": spent.flops}
    launched: Counter[str] = Counter()
    for row in collectives(parts):
        launched[f"{row.phase}: {row.kind}"] += row.times
    yield "times", dict(launched)
    yield "times", dict(_operators(parts))


def _operators(parts: list[Part]) -> Counter[str]:
    """How often a step runs each operator; collectives are counted by kind."""
    found: Counter[str] = Counter()
    for part in parts:
        for node in part.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op == "call_function" and schema is not None and sending(node) is None:
                found[f"{part.name}: {schema.name.replace('::', '.')}"] += part.times
    return found


def _changes(one: dict[str, int], other: dict[str, int], unit: str) -> Iterator[Change]:
    for what in dict.fromkeys([*one, *other]):
        a, b = one.get(what, 0), other.get(what, 0)
        if a != b:
            yield Change(what, a, b, unit)


def _shown(number: int, unit: str) -> str:
    return size(number) if unit == "bytes" else count(number)


def _times(change: Change) -> str:
    if not change.one or not change.other:
        return "new" if change.other else "gone"
    return f"x {change.other / change.one:.3g}"
