"""The estimated time line of a step as a trace for ui.perfetto.dev or chrome://tracing.

One lane computes, each process group has one for what it carries and one for reductions beside it,
and a counter has the bytes alive by category. The format is the Trace Event Format's JSON.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fzero.program.categories import ORDER
from fzero.program.cost import COMPUTE, spans
from fzero.program.file import whole
from fzero.program.graph import Part
from fzero.program.hardware import Hardware
from fzero.program.held import memory
from fzero.program.origin import origin_of
from fzero.program.transfers import DOWN, UP


def save_trace(parts: Iterable[Part], path: str | Path, hardware: Hardware) -> None:
    """Write the trace of a step; what runs once per micro-batch is there once.

    Raises:
        FzeroError: it can't be written; what was there is as it was.
    """
    events = list(_events(list(parts), hardware))
    about = {"hardware": hardware.name, "times": "estimated"}
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})
    with whole(path, "traces", streams=True) as file:
        file.write_text(text)


def _events(parts: list[Part], hardware: Hardware) -> Iterator[dict[str, Any]]:
    lanes: dict[str, int] = {}
    start = 0.0
    moments = {(moment.program, moment.node): moment for moment in memory(parts)}
    for part in parts:
        end = start
        for span in spans(part, hardware):
            if span.lane not in lanes:
                lanes[span.lane] = len(lanes)
                yield _named(span.lane, lanes[span.lane])
            origin, cost = origin_of(span.node), span.cost
            bucket = span.node.meta.get("bucket")
            yield {
                "ph": "X",
                "name": repr(bucket) if bucket else span.node.name,
                "cat": f"{part.name},{span.phase}{',wait' if span.waits else ''}",
                "pid": 0,
                "tid": lanes[span.lane],
                "ts": _micro(start + span.start),
                "dur": _micro(span.end - span.start),
                "args": {
                    "operator": str(span.node.target),
                    "module": origin.module,
                    "where": origin.where,
                    "flops": cost.flops,
                    "bytes moved": cost.bytes_moved,
                    "bytes sent": cost.sent,
                    "bytes to or from the host": cost.crossed,
                    "micro-batches": part.times,
                },
            }
            moment = moments[part.name, span.node.name]
            if span.lane == COMPUTE:
                yield {
                    "ph": "C",
                    "name": "bytes alive",
                    "pid": 0,
                    "ts": _micro(start + span.start),
                    # every category at every place: a counter keeps what it was told last
                    "args": {name: moment.categories.get(name, 0) for name in ORDER},
                }
            end = max(end, start + span.end)
        start = end


def _named(lane: str, number: int) -> dict[str, Any]:
    ways = {COMPUTE: "computes", DOWN: DOWN, UP: UP}
    name = ways.get(lane, f"group {lane}")
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}


def _micro(time: float) -> float:
    return round(time * 1e6, 3)
