"""How early gathers can be launched without more memory.

[Note: early gathers] A gather that is launched where it is read is waited for in full. Launched
some buckets before, it travels while others are computed with, and its buffer is there for longer.
Most of a step has room for that: activations grow through forward and go through backward, so the
peak is where the two meet. Hence gathers are early but for the last ones of forward and the first
ones of backward, as few as keep the peak within what buckets may cost. So it is over gloo, whose
buffers are host memory; on devices each gather is one bucket early.

Four numbers say it, and ranks settle them with the size of buckets: who is early decides how
gathers and reductions mix, and that must be alike on all of them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from fzero.program.passes.groups import ALIKE, Growth
from fzero.program.passes.schedule import Early
from fzero.program.passes.sketch import Launched, Sketch


def as_early_as_fits(sketch: Sketch, size: int, bound: int, growth: Growth = ALIKE) -> Early | None:
    """How early gathers go in buckets of a size; None: as early as always.

    Args:
        sketch: of a graph.
        size, growth: of its buckets.
        bound: bytes that may be alive at once.
    """
    alive, segments, always, *_ = sketch.at(size, None, growth)
    if always.forward or max(alive, default=0) > bound or not segments:
        return None
    directions = [_deepest(alive, segments, bound, forward=forward) for forward in (True, False)]
    (forward, last), (backward, first) = directions
    early = Early(forward, backward, last, first)
    # counted bucket by bucket; what they do to each other's buffers a walk tells
    return early if max(sketch.timeline_at(size, early, growth)) <= bound else None


def _deepest(
    alive: Sequence[int], segments: Sequence[Sequence[Launched]], bound: int, *, forward: bool
) -> tuple[int, int]:
    """The most buckets ahead that half of the gathers of a direction can be, and how many can't."""
    mine = [gathers for gathers in segments if gathers[0].forward == forward]
    longest = max(map(len, mine), default=0)

    def fits(depth: int, late: int) -> bool:
        early = Early(depth, depth, late, late)
        more = [0] * (len(alive) + 1)
        for gathers in mine:
            depths = early.depths(len(gathers), forward=forward)
            for turn, (gather, ahead) in enumerate(zip(gathers, depths, strict=True)):
                more[gathers[max(turn - ahead, 0)].end if ahead else gather.start] += gather.nbytes
                more[gather.start] -= gather.nbytes
        return all(now + x <= bound for now, x in zip(alive, accumulate(more), strict=False))

    for depth in DEPTHS:
        late = bisect_left(range(longest), True, key=partial(fits, depth))
        if 2 * late <= longest or depth == DEPTHS[-1]:
            return (depth, late) if late < longest else (0, 0)
    raise AssertionError("DEPTHS is empty")


DEPTHS = (4, 2, 1)
"""Buckets ahead, of which the first is taken that fits."""
