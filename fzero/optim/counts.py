"""A count of updates for each leaf, where some leaves were left out of some updates.

[Note: counts of leaves] Adam corrects its moments by how often they were updated; the decay of
Adafactor's mean squares, the correction of `ema` and the first gradient of a damped momentum go by
that, too. One `step` tells it of all leaves, until one is frozen for a while: from then on the
state has `counts`, shaped as the params, a 0-d tensor for each leaf, as torch.optim keeps one for
each parameter. `step` goes on to count all updates, for schedules. A state without `counts` costs
nothing and means the same as one whose counts all are `step`.

A state that may have them is a namedtuple with the fields `step` and `counts` and a property
`counted`, a tree with a leaf for each of the params. Its `counts` are None before they are needed,
and NEVER where the optimizer was made so that no number depends on them.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fzero import tree
from fzero.optim.base import PyTree
from fzero.optim.foreach import leaves_like

NEVER: Final = ()
"""The counts of a state whose optimizer goes by none."""


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
        return part._replace(counts=tree.map(lambda _: _copy(part.step), part.counted))

    return _each(state, fill)


def common_count(state: PyTree) -> PyTree:
    """The same state without them: `step` counts for all leaves again.

    Examples:
        >>> from fzero.optim import adam
        >>> state = adam(0.1).init({"w": torch.ones(2)})
        >>> common_count(own_counts(state)).counts is None
        True
    """
    return _each(state, lambda part: part if part.counts == NEVER else part._replace(counts=None))


def has_counts(state: PyTree) -> bool:
    """Whether leaves have counts of their own anywhere in a state.

    Examples:
        >>> from fzero.optim import adam
        >>> has_counts(adam(0.1).init({"w": torch.ones(2)}))
        False
    """
    found: list[bool] = []

    def look(part: Any) -> Any:
        found.append(part.counts is not None and part.counts != NEVER)
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


def counts_of(spec: tree.Spec, state: Any) -> list[Tensor]:
    """Each leaf's own count, in the order of `spec`; none where `step` is that of all.

    Examples:
        >>> from fzero.optim import adam
        >>> leaves, spec = tree.flatten({"w": torch.ones(2)})
        >>> counts_of(spec, own_counts(adam(0.1).init({"w": torch.ones(2)})))
        [tensor(0.)]
    """
    if state.counts is None or state.counts == NEVER:
        return []
    return leaves_like(spec, state.counts, "the optimizer's state")


def increased(spec: tree.Spec, state: Any) -> tuple[Tensor, list[Tensor], PyTree]:
    """The step and the counts after one more update, and these as a field of the new state.

    Examples:
        >>> from fzero.optim import adam
        >>> leaves, spec = tree.flatten({"w": torch.ones(2)})
        >>> increased(spec, own_counts(adam(0.1).init({"w": torch.ones(2)})))
        (tensor(1.), [tensor(1.)], {'w': tensor(1.)})
    """
    counts = [count + 1 for count in counts_of(spec, state)]
    return state.step + 1, counts, tree.unflatten(spec, counts) if counts else state.counts


def _each(state: PyTree, change: Callable[[Any], Any]) -> PyTree:
    """The state with `change` of each part of it that may have counts."""
    fields = getattr(state, "_fields", None) if isinstance(state, tuple) else None
    if fields and {"step", "counts"} <= {*fields} and hasattr(type(state), "counted"):
        return change(state)
    if fields is not None:
        return type(state)(*(_each(part, change) for part in state))
    if isinstance(state, (tuple, list)):
        return type(state)(_each(part, change) for part in state)
    if type(state) is dict:
        return {key: _each(part, change) for key, part in state.items()}
    return state


def _copy(step: Any) -> Any:
    return step.clone() if isinstance(step, Tensor) else step  # a placeholder in a structure
