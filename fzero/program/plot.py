"""A picture of a step: memory over its estimated time, what computes then, and what communicates.

Drawn with matplotlib, which is not among the library's dependencies.
"""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fzero.errors import ConfigError, FzeroError
from fzero.program.categories import ORDER
from fzero.program.cost import COMPUTE, Span, spans
from fzero.program.file import whole
from fzero.program.foreign import sending
from fzero.program.graph import BACKWARD, FORWARD, UPDATE, Part
from fzero.program.hardware import Hardware
from fzero.program.held import Moment, memory
from fzero.program.origin import origin_of
from fzero.program.sections import layer_of
from fzero.program.text import size
from fzero.program.transfers import DOWN, UP


def plot(parts: Iterable[Part], path: str | Path, hardware: Hardware) -> None:
    """Draw a step's memory and time line.

    Args:
        parts: of the step; what runs once per micro-batch is drawn once.
        path: of the picture; its ending says what kind.
        hardware: what it would run on.

    Raises:
        FzeroError: matplotlib is not installed.
    """
    figure = new_figure()
    parts = list(parts)
    line = _line(parts, hardware)
    above, below = figure.subplots(2, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    _draw_memory(above, line)
    _draw_lanes(below, line)
    times = max(part.times for part in parts)
    once = f"; one of {times} micro-batches" if times > 1 else ""
    figure.suptitle(f"one step, estimated for {hardware.name}{once}", fontsize=10)
    save_figure(figure, path)


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a picture, whole or not at all; without an ending it is a ".png".

    Raises:
        ConfigError: its ending is of no kind of picture.
        FzeroError: it can't be written; what was there is as it was.
    """
    path = Path(path) if Path(path).suffix else Path(f"{path}.png")
    kinds = sorted(figure.canvas.get_supported_filetypes())
    kind = path.suffix[1:].lower()
    if kind not in kinds:
        raise ConfigError(
            f"{path}: a picture ends with one of {', '.join(f'.{x}' for x in kinds)}."
        )
    with whole(path, "pictures") as part:
        figure.savefig(part, dpi=150, format=kind)


def new_figure(width: float = 12, height: float = 7) -> Any:
    """A figure of matplotlib's, in inches.

    Raises:
        FzeroError: matplotlib is not installed.
    """
    try:
        # not pyplot: nothing global is to change
        figure = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise FzeroError(
            "pictures are drawn with matplotlib, which is not installed: pip install matplotlib. "
            "program.save_trace(path) needs nothing more, and print(program.memory()) neither."
        ) from error
    return figure.Figure(figsize=(width, height), layout="constrained")


class _Line(NamedTuple):
    """A step on its time line: seconds, and what is alive there."""

    spans: list[Span]  # with times from the start of the step
    moments: list[Moment]  # of the spans that compute
    starts: list[float]
    end: float


def _line(parts: Sequence[Part], hardware: Hardware) -> _Line:
    moments = {(moment.program, moment.node): moment for moment in memory(parts)}
    line = _Line([], [], [], 0.0)
    start = 0.0
    for part in parts:
        end = start
        for span in spans(part, hardware):
            span = span._replace(start=start + span.start, end=start + span.end)
            line.spans.append(span)
            end = max(end, span.end)
            # a launch makes its buffer while the one before it ends
            at = line.starts[-1] if span.lane != COMPUTE and line.starts else span.start
            line.moments.append(moments[part.name, span.node.name])
            line.starts.append(at)
        start = end
    return line._replace(end=start)


def _draw_memory(axes: Any, line: _Line) -> None:
    axes.set_ylabel("alive")
    axes.set_xlim(0, line.end * 1e3 or 1)
    axes.spines[["top", "right"]].set_visible(False)
    if not line.moments:  # a function that returns what it is given runs nothing
        return
    scale, unit = _scale(max(moment.bytes for moment in line.moments))
    times = [*line.starts, line.end]
    names = [name for name in ORDER if any(name in m.categories for m in line.moments)]
    # a stack of steps: each value holds to the next time
    levels = [[m.categories.get(name, 0) / scale for m in line.moments] for name in names]
    levels = [[*values, values[-1]] for values in levels]
    colours = [_COLOURS[name] for name in names]
    axes.stackplot(
        [t * 1e3 for t in times], levels, labels=names, colors=colours, step="post", linewidth=0
    )
    peak = max(line.moments, key=lambda moment: moment.bytes)
    at = line.starts[line.moments.index(peak)] * 1e3
    top = peak.bytes / scale
    axes.plot([at], [top], "v", color="black", markersize=5)
    where = peak.module or peak.where.replace("\\", "/").rpartition("/")[2]
    side = "left" if at < line.end * 500 else "right"
    text = f"  peak {size(peak.bytes)}, {peak.phase}{f', {where}' if where else ''}  "
    axes.text(at, top, text, ha=side, va="bottom", fontsize=8)
    axes.set_ylim(0, top * 1.12 or 1)
    axes.set_ylabel(f"alive, {unit}")
    handles, labels = axes.get_legend_handles_labels()
    # as they lie on one another; beside the picture, where nothing is under it
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1, 1), fontsize=8,
        frameon=False,
    )  # fmt: skip


def _draw_lanes(axes: Any, line: _Line) -> None:
    found = dict.fromkeys(s.lane for s in line.spans)
    sends = [lane for lane in found if lane not in (COMPUTE, DOWN, UP)]
    ways = [lane for lane in (DOWN, UP) if lane in found]
    lanes = [COMPUTE, *sends, *ways]
    for place, lane in enumerate(lanes):
        kinds: dict[str, list[Span]] = {}
        for span in line.spans:
            if span.lane == lane and span.end > span.start:
                kinds.setdefault(_kind(span), []).append(span)
        for kind, those in kinds.items():
            bars = _joined(those, line.end / 4000)
            axes.broken_barh(
                [(a * 1e3, (b - a) * 1e3) for a, b in bars],
                (place - 0.35, 0.7),
                color=_LANE_COLOURS[kind],
                label=kind,
                linewidth=0,
            )
    _draw_layers(axes, line)
    # names of groups are torch's own, and tell a reader nothing: what a lane carries does
    names = ["communicates"] * len(sends)
    if len(sends) > 1:
        carried = {lane: [_kind(s) for s in line.spans if s.lane == lane] for lane in sends}
        names = ["\n".join(dict.fromkeys(carried[lane])) for lane in sends]
    axes.set_yticks(range(len(lanes)), ["computes", *names, *ways], fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -1.1)
    axes.set_xlabel("ms, estimated")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(
        once.values(), once.keys(), loc="upper left", bbox_to_anchor=(1, 1), fontsize=8,
        frameon=False,
    )  # fmt: skip
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_layers(axes: Any, line: _Line) -> None:
    """Names of layers above what they compute, as many as there is room for."""
    found: list[tuple[str, float, float]] = []
    for span in line.spans:
        layer = layer_of(origin_of(span.node).module)
        if span.lane != COMPUTE or not layer:
            continue
        if found and found[-1][0] == layer:
            found[-1] = (layer, found[-1][1], span.end)
        else:
            found.append((layer, span.start, span.end))
    shown_to = 0.0
    for layer, start, end in found:
        middle, half = (start + end) / 2, line.end * _LETTER * len(layer) / 2
        if middle - half >= shown_to:
            axes.text(middle * 1e3, -0.45, layer, ha="center", va="bottom", fontsize=7)
            shown_to = middle + half + line.end * _LETTER


_LETTER = 0.0065  # of the width of the picture


def _kind(span: Span) -> str:
    if span.waits:
        return "waits"
    sent = sending(span.node)
    return sent.kind if sent is not None else span.phase


def _joined(those: Sequence[Span], gap: float) -> list[tuple[float, float]]:
    """Bars, joined where what is between them can't be seen: a picture has few thousand dots."""
    bars: list[tuple[float, float]] = []
    for span in those:
        if bars and span.start - bars[-1][1] <= gap:
            bars[-1] = (bars[-1][0], span.end)
        else:
            bars.append((span.start, span.end))
    return bars


def _scale(nbytes: int) -> tuple[float, str]:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power:
            return 2.0**power, unit
    return 1.0, "B"


_COLOURS = {
    "parameters": "#3b5b92",
    "masters": "#6d8fc7",
    "optimizer": "#a3b9dc",
    "model state": "#7f7f7f",
    "loss scale": "#9f9f9f",
    "batch": "#c7c7c7",
    "inputs": "#b0b0b0",
    "gradients": "#b8433a",
    "gathered": "#3f9a6c",
    "buckets": "#9fd3b4",
    "activations": "#e8a33d",
    "recomputed": "#f6d08f",
    "temporaries": "#a06aa8",
    "results": "#333333",
}
_LANE_COLOURS = {
    FORWARD: "#e8a33d",
    BACKWARD: "#b8433a",
    UPDATE: "#3b5b92",
    "waits": "#d9d9d9",
    "all_gather": "#3f9a6c",
    "reduce_scatter": "#a06aa8",
    "all_reduce": "#6d8fc7",
    "all_to_all": "#c9a227",
    "broadcast": "#5aa7b5",
}
