"""Casts that are in force while a model function runs: inputs, outputs, autocast."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fzero import tree
from fzero.errors import ConfigError
from fzero.numerics.precision import LOW, Precision, is_floating
from fzero.tree import PyTree


def cast(values: PyTree, dtype: torch.dtype | None) -> PyTree:
    """Every floating tensor in `dtype`; other leaves, and all leaves if it is None, as they are.

    Differentiable: the gradient comes back in each leaf's own dtype.

    Args:
        values: a pytree.
        dtype: the floating dtype, or None.

    Returns:
        The same tree; a leaf that has the dtype already is not copied.

    Examples:
        >>> out = cast({"w": torch.ones(2), "n": torch.tensor(3)}, torch.bfloat16)
        >>> out["w"].dtype, out["n"].dtype
        (torch.bfloat16, torch.int64)
    """
    if dtype is None:
        return values
    return tree.map(lambda leaf: leaf.to(dtype) if is_floating(leaf) else leaf, values)


def widened(x: Tensor) -> Tensor:
    """`x`, in float32 if its own floating dtype has fewer bits."""
    return x.float() if x.dtype in LOW else x


@contextlib.contextmanager
def in_force(precision: Precision, device_type: str) -> Iterator[None]:
    """While the model runs: autocasting, and the dtypes of what a module is given and returns.

    Only this thread is touched, and only until the end.

    Examples:
        >>> with in_force(Precision(autocast=torch.bfloat16), "cpu"):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.bfloat16
    """
    token = _EDGES.set(Edges(precision.param, precision.output))
    try:
        if precision.autocast is None:
            yield
        else:
            # no cache: it would hold casts of weights from one use to the next behind our back
            with torch.autocast(device_type, precision.autocast, cache_enabled=False):
                yield
    finally:
        _EDGES.reset(token)


def as_output(values: PyTree) -> PyTree:
    """What a model returns, in the output dtype that is in force here, if any."""
    return _cast_leaves(values, _EDGES.get().output)


def refuse_outer_autocast() -> None:
    """Raise if the caller has put a whole step under `torch.autocast`.

    It would reach gathers, norms and the update as well as the model, and a staged-out step would
    keep it or miss it depending on which call came first.

    Raises:
        ConfigError: autocast is on, for any device.
    """
    for kind in _AUTOCASTING:
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            raise ConfigError(
                f"the step was called under torch.autocast({kind!r}, {dtype}), which would also "
                "cast what comes after the model: norms and the update. Set "
                f"Config(precision=Precision(autocast={dtype})), or write `with torch.autocast` "
                "inside the model function."
            )


_AUTOCASTING = tuple(
    kind for kind in ("cpu", "cuda", "xpu", "hpu", "mps") if torch.amp.is_autocast_available(kind)
)


class Edges(NamedTuple):
    """In which dtypes tensors enter and leave a module; None: as they are."""

    input: torch.dtype | None = None
    output: torch.dtype | None = None


_EDGES: ContextVar[Edges] = ContextVar("fzero_edges", default=Edges())  # noqa: B039  (it is immutable)


def as_input(values: PyTree) -> PyTree:
    """What a module is given, in the compute dtype that is in force here, if any."""
    return _cast_leaves(values, _EDGES.get().input)


def _cast_leaves(values: PyTree, dtype: torch.dtype | None) -> PyTree:
    if dtype is None:
        return values
    # torch's trees: libraries of models register their classes of outputs there
    items, spec = pytree.tree_flatten(values, is_leaf=lambda x: x is not values)
    if spec.is_leaf():
        return values.to(dtype) if is_floating(values) else values
    cast_items = [_cast_leaves(x, dtype) for x in items]
    # a container where nothing is cast is the caller's own: a module may put into it what it finds
    changed = any(new is not old for new, old in zip(cast_items, items, strict=True))
    return pytree.tree_unflatten(cast_items, spec) if changed else values


@contextlib.contextmanager
def edges_in(edges: Edges) -> Iterator[None]:
    """Meanwhile `as_input` and `as_output` cast to these."""
    token = _EDGES.set(edges)
    try:
        yield
    finally:
        _EDGES.reset(token)


def edges() -> Edges:
    """The dtypes that are in force here."""
    return _EDGES.get()
