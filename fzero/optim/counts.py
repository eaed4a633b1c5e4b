"""A count of updates for each leaf, where some leaves were left out of some updates.

[Note: counts of leaves] Adam corrects its moments by how often they were updated. One `step` tells
that of all leaves, until one is frozen for a while: from then on the state has `counts`, shaped as
the params, a 0-d tensor for each leaf, as torch.optim keeps one for each parameter. `step` goes on
to count all updates, for schedules. A state without `counts` costs nothing and means the same as
one whose counts all are `step`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.optim.base import PyTree


def own_counts(state: PyTree) -> PyTree:
    """The state of an optimizer with a count for each leaf, which starts at the count of all.

    What has counts already keeps them. The other tensors are the very same.

    Examples:
        >>> from fzero.optim import adam
        >>> state = own_counts(adam(0.1).init({"w": torch.ones(2)}))
        >>> state.counts
        {'w': tensor(0.)}
    """

    def fill(part: Any) -> Any:
        if part.counts is not None:
            return part
        return part._replace(counts=tree.map(lambda _: _copy(part.step), part.mu))

    return _each(state, fill)


def common_count(state: PyTree) -> PyTree:
    """The same state without them: `step` counts for all leaves again.

    Examples:
        >>> from fzero.optim import adam
        >>> state = adam(0.1).init({"w": torch.ones(2)})
        >>> common_count(own_counts(state)).counts is None
        True
    """
    return _each(state, lambda part: part._replace(counts=None))


def has_counts(state: PyTree) -> bool:
    """Whether leaves have counts of their own anywhere in a state.

    Examples:
        >>> from fzero.optim import adam
        >>> has_counts(adam(0.1).init({"w": torch.ones(2)}))
        False
    """
    found: list[bool] = []

    def look(part: Any) -> Any:
        found.append(part.counts is not None)
        return part

    _each(state, look)
    return any(found)


@torch.no_grad()
def recount_(state: PyTree) -> None:
    """Let the counts of leaves be the count of all: of a state that was read from before them."""

    def write(part: Any) -> Any:
        for count in tree.leaves(part.counts):
            count.copy_(part.step)
        return part

    _each(state, write)


def _each(state: PyTree, change: Callable[[Any], Any]) -> PyTree:
    """The state with `change` of each part of it that may have counts."""
    if isinstance(state, tuple) and {"step", "mu", "counts"} <= {*getattr(state, "_fields", ())}:
        return change(state)
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_each(part, change) for part in state))
    if isinstance(state, (tuple, list)):
        return type(state)(_each(part, change) for part in state)
    if type(state) is dict:
        return {key: _each(part, change) for key, part in state.items()}
    return state


def _copy(step: Any) -> Any:
    return step.clone() if isinstance(step, Tensor) else step  # a placeholder in a structure
