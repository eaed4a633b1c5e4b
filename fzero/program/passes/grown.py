"""How much larger buckets can be, away from where most is alive, without more memory.

See [Note: buckets that grow]. Each of three shares is the largest of a few with which the Program,
by its sketch, stays within the bound. Forward's gathers come first: they meet no gradients, so they
have most room. Reductions come before the gathers of backward: the update waits for the last.

So it is over gloo, where a collective costs some 0.1 ms of the cores beside its bytes. On devices
it costs some microseconds, which is less than copying a leaf that would else travel alone.
"""

from fzero.program.passes.groups import ALIKE, Growth
from fzero.program.passes.sketch import Sketch


def as_grown_as_fits(
    sketch: Sketch, size: int, most: int, bound: int, prefetch: int | None = None
) -> Growth:
    """How much larger buckets may be than a size, away from where most is alive.

    Args:
        sketch: of a graph.
        size: most bytes of full leaves in a bucket where most is alive.
        most: bytes that no bucket may be larger than.
        bound: bytes that may be alive at once.
        prefetch: see `bucket`.
    """
    if size >= most:  # nothing may be larger, and a sketch takes its time
        return ALIKE
    alike = sketch.at(size, prefetch)
    if not alike.gloo:
        return ALIKE
    growth, fewest = Growth(most), alike.collectives
    for way in ("forward", "reductions", "backward"):
        for share in SHARES:
            grown = growth._replace(**{way: share})
            found = sketch.at(size, prefetch, grown)
            if max(found.alive, default=0) > bound:
                break  # nor will a larger one fit
            if found.collectives < fewest:
                growth, fewest = grown, found.collectives
    return ALIKE if growth == Growth(most) else growth


SHARES = (4, 8, 16)
"""Sixteenths of the bytes in between that are tried."""
