"""Bytes that a step holds, from the allocator's own events: exact, unlike a process's RSS."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T", bound=Callable[[], object])

_WINDOW = "## the measured step"


class LocalState(NamedTuple):
    """Bytes of tensors.

    Args:
        between: held when a step starts: parameters, optimizer state, the batch.
        peak: most bytes held at once during the step.
    """

    between: int
    peak: int


def measure(build: Callable[[], T], *, warm: int = 1) -> tuple[LocalState, T]:
    """What a step holds, and the step itself.

    Args:
        build: makes the step and all that it holds. Its allocations are counted too: the profiler
            knows nothing of memory that was there before it started.
        warm: steps before the measured one.
    """
    gc.collect()  # or what others left would be freed here, and counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        step = build()
        for _ in range(warm):
            step()
        with record_function(_WINDOW):
            step()
    profiler: Any = prof.profiler  # its events are typed in part only
    events = profiler.kineto_results.events()
    (window,) = [e for e in events if e.name() == _WINDOW]
    start, stop = window.start_ns(), window.start_ns() + window.duration_ns()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = between = peak = 0
    for when, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        if when < start:
            between = peak = now
        elif when <= stop:
            peak = max(peak, now)
    return LocalState(between, peak), step
