"""What stands in the way of staging out in torch and other libraries, taken aside meanwhile.

Other libraries are never imported: who has not imported one does not use it.
"""

import contextlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import functional

from fzero.functional.patch import Patch
from fzero.functional.remat import is_recording
from fzero.program.grouped import recordable


@contextlib.contextmanager
def transformers_is_tracing() -> Iterator[None]:
    """`transformers.utils.is_tracing()` answers True, wherever transformers asks.

    Its models ask before they read values (is a mask all ones? are there padding tokens?). On its
    own the function knows fake tensors, but not those inside `torch.func`. It is bound by name in
    many modules, so it is replaced in each; a transformers without it stays as it is.
    """
    library = sys.modules.get("transformers.utils")
    original = vars(library).get("is_tracing") if library is not None else None
    if original is None:
        yield
        return
    holders = [
        vars(module)
        for name, module in list(sys.modules.items())
        # through vars(): to ask such a module for an attribute can import half of the library
        if name.startswith("transformers.") and vars(module).get("is_tracing") is original
    ]
    try:
        for holder in holders:
            holder["is_tracing"] = _yes
        yield
    finally:
        for holder in holders:
            holder["is_tracing"] = original


def _yes(tensor: Any = None) -> bool:
    return True


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Torch does not log what fails on fake tensors, in this thread.

    It does so with a traceback of its own for every try, before it raises what the user is told.
    """
    here = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(of_others)
    try:
        yield
    finally:
        logger.removeFilter(of_others)


# ------------------------------------------------------------------ checks that read values
class _Unchecked:
    """`Distribution._validate_args`: False for who is being recorded, else as it was."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __get__(self, instance: Any, owner: Any) -> bool:
        return self.value and not is_recording()


def _gaussian_nll_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same loss, which does not look whether a variance is below zero."""

    def loss(
        input: Tensor,
        target: Tensor,
        var: Tensor | float,
        full: bool = False,
        eps: float = 1e-6,
        reduction: str = "mean",
    ) -> Tensor:
        if not is_recording() or not isinstance(var, Tensor):
            return original(input, target, var, full, eps, reduction)
        if var.dim() < input.dim():
            var = var.unsqueeze(-1)
        var = var.expand_as(input).clone()
        with torch.no_grad():  # the gradient is that of the variance itself
            var.clamp_(min=eps)
        each = (var.log() + (input - target).square() / var) / 2
        each = each + math.log(2 * math.pi) / 2 if full else each
        return {"mean": each.mean, "sum": each.sum, "none": each.clone}[reduction]()

    return loss


unchecked = Patch(
    (Distribution, "_validate_args", _Unchecked),
    (functional, "gaussian_nll_loss", _gaussian_nll_loss),
    (torch, "_grouped_mm", recordable),
)
"""Meanwhile torch does not read values of what is recorded only to validate them, and products of
groups are recorded in every dtype.

There is no public way for one thread: `Distribution.set_default_validate_args` is the process's.
"""
