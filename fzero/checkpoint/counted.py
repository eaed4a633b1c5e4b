"""Counts of leaves in a checkpoint, and in a tree that is to be filled: either may have none.

See [Note: counts of leaves]. A checkpoint of a run without any is read into a state that has them:
each leaf was updated as often as all. One with counts is read into a state without: it gets them,
for its `step` alone would correct moments wrongly.
"""

from collections.abc import Set

from fzero.checkpoint.flatten import keys
from fzero.optim.counts import common_count, own_counts, recount_
from fzero.state.opt_state import OptState
from fzero.tree import PyTree


def as_stored(opt_state: PyTree, stored: Set[str]) -> tuple[PyTree, Set[str]]:
    """The state to fill, with counts of leaves if these keys have some.

    Returns:
        It, and the keys of counts that it has and the checkpoint has not.
    """
    if not isinstance(opt_state, OptState):
        return opt_state, frozenset()
    counted = opt_state._replace(inner=own_counts(opt_state.inner))
    common = opt_state._replace(inner=common_count(opt_state.inner))
    counts = {*_keys(counted)} - {*_keys(common)}
    if counts & stored:
        return counted, frozenset()
    return opt_state, counts & {*_keys(opt_state)}


def count_as_all(opt_state: PyTree) -> None:
    """Every leaf was updated as often as `step` says."""
    recount_(opt_state.inner)


def _keys(opt_state: OptState) -> list[str]:
    return keys("opt_state", opt_state._replace(master=None, metrics={}))
