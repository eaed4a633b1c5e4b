"""From a pure `update` to a step in place: what every transform without kernels of its own uses."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.distributed.dtensor import shard_like
from fzero.errors import ConfigError
from fzero.optim.base import ApplyFn, Params, PyTree, UpdateFn
from fzero.optim.foreach import add_, copy_, leaves_like


class EmptyState(NamedTuple):
    """The state of a transform that remembers nothing."""

    @classmethod
    def of(cls, params: Params) -> "EmptyState":
        """The `init` of such a transform."""
        return cls()


def in_place(update: UpdateFn) -> ApplyFn:
    """An `apply_` that calls `update` and writes what comes out over params and state.

    Args:
        update: A pure update.

    Returns:
        `apply_(grads, state, params, **options) -> state`; the options go to `update`.

    Examples:
        >>> def descend(grads, state, params=None):
        ...     return -grads, state
        >>> params = torch.ones(2)
        >>> state = in_place(descend)(torch.ones(2), (), params)
        >>> params
        tensor([0., 0.])
    """

    @torch.no_grad()
    def apply_(grads: PyTree, state: PyTree, params: Params, **options: Any) -> PyTree:
        leaves, spec = tree.flatten(params)
        updates, new_state = update(grads, state, params, **options)
        # All that can be wrong is found before anything is written.
        stored = Overwrite(state, new_state, keep=leaves)
        changes = leaves_like(spec, updates, "updates")
        _check_updates(changes, params)
        add_(leaves, changes)
        return stored.write()

    return apply_


class Overwrite:
    """A new state that is to be written over the old one's tensors.

    Two moments, because an update written by others may hand out the same tensor twice: the
    values are secured before params change, and written afterwards.

    Args:
        old: The state whose tensors are overwritten.
        new: A state of the same structure.
        keep: Tensors that change before `write`.

    Raises:
        ConfigError: The update changed the structure, a shape or a dtype of the state.

    Examples:
        >>> old = {"m": torch.zeros(2)}
        >>> Overwrite(old, {"m": torch.ones(2)}).write() and old
        {'m': tensor([1., 1.])}
    """

    def __init__(self, old: PyTree, new: PyTree, keep: list[Tensor] | None = None):
        self._old, self._spec = tree.flatten(old)
        values = tree.leaves_at(self._spec, new)
        if values is None:
            raise ConfigError(
                "the optimizer's update changed the structure of its state, from "
                f"{tree.paths(old)} to {tree.paths(new)}. A state keeps its structure: make every "
                "field in init."
            )
        taken = {id(tensor): index for index, tensor in enumerate(self._old)}
        taken |= dict.fromkeys((id(tensor) for tensor in keep or ()), -1)
        self._new: list[Any] = []
        for index, (value, before) in enumerate(zip(values, self._old, strict=True)):
            if _kind(value) != _kind(before):
                raise ConfigError(
                    f"the optimizer's update changed state{tree.paths(old)[index]} from "
                    f"{_shown(before)} to {_shown(value)}. A state keeps its shapes and dtypes, "
                    "its tensors and its numbers: make it in init as update returns it."
                )
            if not isinstance(before, Tensor):
                self._new.append(value)
                continue
            aliased = taken.get(id(value), index) != index
            value = shard_like(value, before)
            # a tensor that is written as another leaf would change under this one
            self._new.append(value.clone() if aliased else value)

    def write(self) -> PyTree:
        """Copy the values; returns the state with its old tensors."""
        changed = [
            (before, value)
            for before, value in zip(self._old, self._new, strict=True)
            if isinstance(before, Tensor) and before is not value
        ]
        copy_([before for before, _ in changed], [value for _, value in changed])
        pairs = zip(self._old, self._new, strict=True)
        # Numbers in a state written by others cannot be overwritten, only replaced.
        leaves = [old if isinstance(old, Tensor) else new for old, new in pairs]
        return tree.unflatten(self._spec, leaves)


def _check_updates(updates: list[Tensor], params: Params) -> None:
    """Raise before anything changes: updates are added, and must not broadcast."""
    for update, param, path in zip(updates, tree.leaves(params), tree.paths(params), strict=True):
        if not isinstance(update, Tensor) or update.shape != param.shape:
            raise ConfigError(
                f"the optimizer's update returned {_shown(update)} as updates{path}, for a "
                f"parameter of {_shown(param)}. Updates have the shapes of their parameters."
            )


def _kind(x: Any) -> Any:
    return (x.shape, x.dtype) if isinstance(x, Tensor) else None


def _shown(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    return f"a {type(x).__name__} ({x!r:.40})"
