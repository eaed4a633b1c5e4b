"""Tensors that live on are normal ones, also where the caller is under `torch.inference_mode()`.

Outside of that mode torch refuses to write over an inference tensor, which counts no versions. What
is made to be trained, by `init`, `shard`, a step or an Engine, is therefore made outside of it.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference() -> contextlib.AbstractContextManager[Any]:
    """Tensors made in it are ordinary ones, also under `torch.inference_mode()`.

    Examples:
        >>> with torch.inference_mode(), outside_inference():
        ...     torch.ones(2).is_inference()
        False
    """
    # only there: leaving a mode that is not in force would switch gradients on
    inside = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inside else contextlib.nullcontext()


def makes_normal(fn: Callable[P, T]) -> Callable[P, T]:
    """A function whose tensors live on: it runs in `outside_inference()`."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with outside_inference():
            return fn(*args, **kwargs)

    return run


def counts_versions(x: Tensor) -> bool:
    """Whether torch counts what is written to a tensor, as autograd asks.

    A normal parameter whose `data` is set to an inference tensor does, and `is_inference()`.

    Examples:
        >>> with torch.inference_mode():
        ...     x = torch.ones(2)
        >>> counts_versions(x), counts_versions(x.clone())
        (False, True)
    """
    try:
        return x._version >= 0
    except RuntimeError:
        return False


def with_versions(x: Tensor) -> Tensor:
    """The same values, in a tensor that autograd takes, also if `x` is an inference tensor.

    Examples:
        >>> with torch.inference_mode():
        ...     x = torch.ones(2)
        >>> x.is_inference(), with_versions(x).is_inference()
        (True, False)
    """
    with outside_inference():
        return x.clone() if x.is_inference() else x
