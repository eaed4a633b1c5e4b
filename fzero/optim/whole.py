"""What functions of users are shown of the parameters: whole leaves, never a shard.

An optimizer works on shards, whose shapes depend on stage, world and rank. A function that decides
something by looking at the leaves (a mask) must decide the same everywhere. So it never sees what
the optimizer sees: it gets tensors without values, on the meta device, that have the shape and
dtype of the whole leaves.

A step says what its whole leaves are with `whole_leaves`, for as long as the optimizer runs;
`stand_ins` finds them from there, however deep in a composition it is called. Without a step the
trees are whole already.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Private, and used as `fzero.state.replay` does: what a mask computes is no part of a Program.
from torch.utils._python_dispatch import _disable_current_modes

from fzero import tree
from fzero.distributed.mesh import Axis
from fzero.errors import ConfigError, first_line
from fzero.layout import Home
from fzero.optim.base import PyTree


class Whole(NamedTuple):
    """A leaf as the user knows it.

    Attributes:
        shape: of the whole leaf.
        dtype: in which the optimizer updates it.
        part: shape of what the optimizer is given of it on this rank.
        dim: along which ranks have parts of it; None: each has all of it.
        home: its place in a flat, if it is in one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: tuple[int, ...]
    dim: int | None = None
    home: Home | None = None


class Leaves(NamedTuple):
    """All leaves of a step's parameters, frozen ones too.

    Attributes:
        spec: their structure.
        by_path: each of them.
        axis: the ranks that update them together.
        device_type: where collectives over these run; "": where the leaves are.
    """

    spec: tree.Spec
    by_path: Mapping[str, Whole]
    axis: Axis = Axis()
    device_type: str = ""


# Only this thread, and only while a step's optimizer runs.
_LEAVES: ContextVar[Leaves | None] = ContextVar("fzero_whole_leaves", default=None)


@contextlib.contextmanager
def whole_leaves(leaves: Leaves) -> Iterator[None]:
    """While an optimizer runs on shards: what they are shards of.

    Examples:
        >>> params = {"w": torch.ones(2)}  # this rank's part of 5
        >>> spec = tree.flatten(params)[1]
        >>> with whole_leaves(Leaves(spec, {"['w']": Whole((5,), torch.float32, (2,))})):
        ...     stand_ins(params, "masked")
        {'w': tensor(..., device='meta', size=(5,))}
    """
    token = _LEAVES.set(leaves)
    try:
        yield
    finally:
        _LEAVES.reset(token)


def given_leaves() -> Leaves | None:
    """What the running step's optimizer is given parts of; None outside of a step."""
    return _LEAVES.get()


def stand_ins(values: PyTree, where: str) -> PyTree:
    """Tensors on the meta device, as whole leaves are, for a function of a user's.

    Args:
        values: the params or gradients that an optimizer was given, or some leaves of them.
        where: who asks, for the message.

    Returns:
        Within a step the tree of all its parameters, whichever of them `values` has; otherwise a
        tree like `values`.

    Raises:
        ConfigError: within a step, `values` has leaves that are no parameters of it.
    """
    leaves = _LEAVES.get()
    with _disable_current_modes():
        if leaves is None:
            return tree.map(lambda x: _empty(tuple(x.shape), x.dtype), values)
        for path, x in zip(tree.paths(values), tree.leaves(values), strict=True):
            found = leaves.by_path.get(path)
            # an optimizer that knows nothing of shards is given whole leaves
            if found is None or tuple(x.shape) not in (found.part, found.shape):
                raise ConfigError(
                    f"{where}: it was given {path or 'a leaf'} {tuple(x.shape)}, which is no leaf "
                    f"of the step's parameters ({', '.join(list(leaves.by_path)[:5])}, ...). On "
                    "shards the whole shapes are known for those only. Pass on the trees of "
                    "params and gradients in the structure that they came in."
                )
        return tree.unflatten(leaves.spec, [_empty(*x[:2]) for x in leaves.by_path.values()])


def decided(fn: Callable[[PyTree], Any], values: PyTree, where: str) -> Any:
    """What a user's function says of the whole leaves that `values` is made of.

    Raises:
        ConfigError: the function reads values, or `values` doesn't fit the step.

    Examples:
        >>> decided(lambda tree: {k: x.ndim > 1 for k, x in tree.items()}, {"b": torch.ones(2)}, "")
        {'b': False}
    """
    shown = stand_ins(values, where)
    try:
        with _disable_current_modes():
            return fn(shown)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        raise ConfigError(
            f"{where}: the function reads values of the leaves ({first_line(error)}). It "
            "is shown shapes, dtypes and names only, so that it decides the same on every rank and "
            "in every step. Read values before training, and pass the tree that you find."
        ) from error


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
