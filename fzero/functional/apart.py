"""Running something apart from a recording that is under way."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from fzero.functional.turns import acting_for, actor

R = TypeVar("R")


def apart(fn: Callable[[], R]) -> R:
    """What `fn()` returns or raises in a thread of its own, which is waited for.

    Modes, `torch.func` transforms, autocast and grad mode are each thread's own: there none is in
    force. So is the current device of CUDA, which stays the caller's: kernels start there.

    Examples:
        >>> import torch
        >>> with torch.no_grad():
        ...     torch.is_grad_enabled(), apart(torch.is_grad_enabled)
        (False, True)
    """
    results: list[R] = []
    errors: list[BaseException] = []
    me = actor()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            with acting_for(me), torch.cuda.device(-1 if device is None else device):
                results.append(fn())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="fzero: apart")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
