"""Masks count as a counter does, whatever the leaves."""

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fzero.engine.counts import Counts, add, as_often, count, rarer

COMINGS = st.lists(st.sets(st.integers(0, 5), min_size=1), max_size=6)


def counted(comings: list[set[int]]) -> tuple[Counts, Counter[int]]:
    counts: Counts = ()
    for leaves in comings:
        counts = count(counts, sum(1 << leaf for leaf in leaves))
    return counts, Counter(leaf for leaves in comings for leaf in leaves)


def as_counter(counts: Counts) -> Counter[int]:
    return Counter(leaf for mask in counts for leaf in range(6) if mask >> leaf & 1)


@given(COMINGS, COMINGS)
def test_masks_count_as_a_counter_does(one: list[set[int]], other: list[set[int]]) -> None:
    (a, seen), (b, last) = counted(one), counted(other)
    assert as_counter(a) == seen
    # each mask lies in the one before it: that is what tells "more than k times"
    assert all(not high & ~low for low, high in itertools.pairwise(a))
    assert as_counter(add(a, b)) == seen + last
    same = {leaf for leaf in range(6) if seen[leaf] == last[leaf] > 0}
    assert as_often(a, b) == sum(1 << leaf for leaf in same)
    assert rarer(a, b) == sum(1 << leaf for leaf in range(6) if seen[leaf] < last[leaf])
