"""What a `torch.amp.GradScaler` finds where it looks for an optimizer's gradients.

[Note: a scaler's gradients] `scaler.unscale_(optimizer)` walks through `optimizer.param_groups`,
divides each `param.grad` by its scale in place, and learns whether one was not finite. Those of an
engine are shards, or not reduced yet, and there may be none of a leaf on this rank. So a scaler,
and nobody else, is shown one group of one parameter, whose gradient stands for all of them: the one
operator of a scaler's, run on it, is run on what every rank holds, and what is not finite on one
rank is so on all.

Private in torch: that the scaler's own methods read `param_groups`, and which operator they use.
Where that is no longer so the scaler gets an error, of this module or of [Note: owned parameters],
and never wrong gradients.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.errors import BackwardError

Unscale = Callable[[Tensor], bool]
"""Multiplies an engine's gradients by a 0-d tensor; whether all are finite, on every rank."""

_FOREACH = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def is_asked_by_scaler() -> bool:
    """Whether the function that called the caller is a method of a `GradScaler`."""
    return isinstance(sys._getframe(2).f_locals.get("self"), torch.amp.GradScaler)


def groups_for_scaler(unscale: Unscale, device: torch.device) -> list[dict[str, Any]]:
    """Param groups for a scaler: one parameter, with a gradient that stands for an engine's."""
    # float32 whatever the parameters are: a scaler refuses gradients of float16
    stand_in = torch.empty((), dtype=torch.float32, device=device)
    stand_in.grad = AllGradients(unscale, device)
    return [{"params": [stand_in]}]


class AllGradients(Tensor):
    """Stands for all gradients of an engine; see [Note: a scaler's gradients]."""

    unscale: Unscale

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls, unscale: Unscale, device: torch.device) -> "AllGradients":
        self: AllGradients = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, (), dtype=torch.float32, device=device
        )
        self.unscale = unscale
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # to be put into `.grad`
            return args[0]
        if func is not _FOREACH:
            raise BackwardError(
                f"a GradScaler was to run {func} on the gradients of an engine, which are sharded "
                "or not reduced yet. torch.amp.GradScaler divides them in a way that an engine "
                "follows; use that one, or Config(loss_scale='dynamic') with "
                "engine.backward(loss) and without a scaler."
            )
        (mine,), found_inf, inverse = args
        if not mine.unscale(inverse):
            found_inf.fill_(1.0)
        return None

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return "AllGradients()"
