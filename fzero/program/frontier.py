"""Memory against work: what a step would hold, and do twice, under one limit after another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, overload

from fzero.program.cost import cost
from fzero.program.graph import Part
from fzero.program.hardware import Hardware
from fzero.program.memory import peak_bytes
from fzero.program.plot import new_figure, save_figure
from fzero.program.text import count, seconds, size, table


class Point(NamedTuple):
    """A step under a limit.

    Args:
        bytes: the peak; the least `memory_limit` that gives this step is little more.
        recomputed: FLOPs that are done a second time.
        flops: of the step in all.
        exposed: seconds in which a rank only waits for collectives, estimated.
        seconds: of the step, estimated.
    """

    bytes: int
    recomputed: int
    flops: int
    exposed: float
    seconds: float


@dataclass(frozen=True)
class Frontier(Sequence[Point]):
    """Points from the most memory to the least; none holds more and takes longer than another.

    Args:
        points: the largest first.
        unlimited: the step as it is without a limit.
    """

    points: tuple[Point, ...]
    unlimited: Point

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Point]: ...
    def __getitem__(self, index: int | slice) -> Point | Sequence[Point]:
        return self.points[index]

    def __len__(self) -> int:
        return len(self.points)

    def __str__(self) -> str:
        rows = [["peak", "of unlimited", "recomputed", "of the step", "waiting", "time"]]
        for point in (self.unlimited, *self.points):
            rows.append(
                [
                    size(point.bytes),
                    f"{point.bytes / max(self.unlimited.bytes, 1):.0%}",
                    f"{count(point.recomputed)} FLOP",
                    f"{point.recomputed / max(point.flops, 1):.1%}",
                    seconds(point.exposed),
                    seconds(point.seconds),
                ]
            )
        return "\n".join(table(rows, "rrrrrr"))

    def plot(self, path: str | Path) -> None:
        """Draw it: peak memory against FLOPs that are done a second time.

        Args:
            path: ends with what it is to be: ".png", ".svg", ".pdf".

        Raises:
            FzeroError: matplotlib is not installed.
        """
        figure = new_figure(8, 5)
        axes = figure.subplots()
        most = self.unlimited.bytes / 2**20
        axes.plot(
            [point.bytes / 2**20 for point in self.points],
            [100 * point.recomputed / max(self.unlimited.flops, 1) for point in self.points],
            marker="o",
            label="under a memory limit",
        )
        axes.axvline(most, color="gray", linestyle="--", label="no limit")
        axes.set_xlabel("peak of a step, MiB on a rank")
        axes.set_ylabel("recomputed, % of the FLOPs of a step without a limit")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        save_figure(figure, path)


def frontier(steps: Iterable[Sequence[Part]], hardware: Hardware) -> Frontier:
    """The frontier of steps that are one step under several plans.

    Args:
        steps: the parts of each; the first is the unlimited one.
        hardware: that times are estimated for.
    """
    unlimited, *points = [_point(parts, hardware) for parts in steps]
    best: list[Point] = []
    for point in sorted({*points}, key=lambda p: (p.bytes, p.recomputed, p.seconds)):
        if not best or (point.recomputed, point.seconds) < (best[-1].recomputed, best[-1].seconds):
            best.append(point)
    return Frontier(tuple(reversed(best)), unlimited)


def _point(parts: Sequence[Part], hardware: Hardware) -> Point:
    total = cost(parts, hardware)
    most = max(map(peak_bytes, parts))
    return Point(most, total.recomputed, total.flops, total.exposed, total.seconds)
