"""Counts of leaves in a checkpoint, and in a tree that is to be filled: either may have none.

See [Note: counts of leaves]. A checkpoint of a run without any is read into a state that has them:
each leaf was updated as often as all. One with counts is read into a state without: it gets them,
for its `step` alone would correct moments wrongly.
"""

from collections.abc import Callable, Set

from fzero import tree
from fzero.checkpoint.flatten import keys, without_masters
from fzero.optim.counts import common_count, own_counts, recount_
from fzero.state.opt_state import OptState
from fzero.tree import PyTree


def as_stored(opt_state: PyTree, stored: Set[str]) -> tuple[PyTree, Set[str]]:
    """The state to fill, with counts of leaves if these keys have some.

    Returns:
        It, and the keys of counts that it has and the checkpoint has not.
    """
    here = {*_keys(opt_state)}
    uncounted: set[str] = set()

    def fit(state: OptState, counts: set[str]) -> OptState:
        if counts & stored:
            return _own(state)
        uncounted.update(counts & here)
        return state

    return _each(fit, opt_state), uncounted


def count_as_all(opt_state: PyTree, uncounted: Set[str]) -> None:
    """Every leaf of the states with these keys was updated as often as their `step` says."""

    def recount(state: OptState, counts: set[str]) -> OptState:
        if counts & uncounted:
            recount_(state.inner)
        return state

    _each(recount, opt_state)


def _each(fn: Callable[[OptState, set[str]], OptState], opt_state: PyTree) -> PyTree:
    """`fn` on each state in a tree, with the keys that its counts have or would have."""
    common = tree.map_nodes(OptState, _common, opt_state)

    def of(state: OptState) -> OptState:
        def counted(x: OptState, other: OptState) -> OptState:
            return _own(x) if x is state else other

        own = tree.map_nodes(OptState, counted, opt_state, common)
        return fn(state, {*_keys(own)} - {*_keys(common)})

    return tree.map_nodes(OptState, of, opt_state)


def _own(state: OptState) -> OptState:
    return state._replace(inner=own_counts(state.inner))


def _common(state: OptState) -> OptState:
    return state._replace(inner=common_count(state.inner))


def _keys(opt_state: PyTree) -> list[str]:
    return keys("opt_state", without_masters(opt_state))
