"""Whether what autograd saves for backward may go through hooks of ours, and hooks that were left
off."""

import functools
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

# Private: the public `saved_tensors_hooks` pushes hooks, and nothing public tells of those that are
# there. Where these are not what they were, `takes_hooks` says no.
_ASKED: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]


def takes_hooks() -> bool:
    """Whether what is saved now may go through hooks of ours: they would replace another's.

    A checkpoint's hooks, or those of who offloads, have what is saved computed again or copied.

    Examples:
        >>> takes_hooks()
        True
        >>> with torch.autograd.graph.save_on_cpu():
        ...     takes_hooks()
        False
    """
    enabled = getattr(_ASKED, "_saved_tensors_hooks_is_enabled", None)
    if enabled is None or not enabled() or not torch.is_grad_enabled():
        return False
    return knows_hooks() and _top() is None


def enable_hooks() -> None:
    """Allow hooks again, where a refusal of `torch.func` has left them off."""
    _ASKED._saved_tensors_hooks_enable()


@functools.cache
def knows_hooks() -> bool:
    """Whether torch tells of the hooks that there are as it did; asked where any may be."""

    def pack(x: Any) -> Any:
        return x

    def unpack(x: Any) -> Any:
        return x

    try:
        before = _top()
        with saved_tensors_hooks(pack, unpack):
            inside = _top()
        return inside[0] is pack and inside[1] is unpack and _top() == before
    except (AttributeError, TypeError, RuntimeError):
        return False


def _top() -> Any:
    return _ASKED._top_saved_tensors_default_hooks(True)
