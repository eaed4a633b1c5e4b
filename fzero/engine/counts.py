"""How often each of many leaves has come: bit masks, whose cost does not grow with the leaves."""

from collections.abc import Iterable

Counts = tuple[int, ...]
"""How often each leaf has got a gradient: bit i of the k-th mask is set if more than k times."""


def masks(buckets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Each bucket's leaves as a bit mask.

    >>> masks([[0, 2], [1]])
    (5, 2)
    """
    return tuple(sum(1 << leaf for leaf in bucket) for bucket in buckets)


def count(counts: Counts, bits: int) -> Counts:
    """One more of each of `bits`."""
    new: list[int] = []
    for mask in counts:
        new.append(mask | bits)
        # what was in this mask already has come once more often: it goes on to the next
        bits &= mask
        if not bits:
            return (*new, *counts[len(new) :])
    return (*new, bits)


def add(a: Counts, b: Counts) -> Counts:
    """Both together."""
    for mask in b:
        a = count(a, mask)
    return a


def as_often(seen: Counts, last: Counts) -> int:
    """Leaves that have come exactly as often as in the last task."""
    same = 0
    for k, mask in enumerate(last):
        if k >= len(seen):
            break
        more_last = last[k + 1] if k + 1 < len(last) else 0
        more_seen = seen[k + 1] if k + 1 < len(seen) else 0
        # in the k-th mask and not in the next: exactly k + 1 times
        same |= mask & ~more_last & seen[k] & ~more_seen
    return same


def rarer(seen: Counts, last: Counts) -> int:
    """Leaves that have come less often than in the last task."""
    rarer = 0
    for k, mask in enumerate(last):
        rarer |= mask & ~seen[k] if k < len(seen) else mask
    return rarer
