"""The factor on each gradient of a task, beyond what its backward has multiplied in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.engine.stepper import Stepper
from fzero.errors import BackwardError


class Correction:
    """Makes gradients of any backward those of a loss that is scaled, and not divided yet.

    `accum_steps` divides every gradient when it is reduced or used, so one of a loss that was
    divided already is multiplied first. The loss scale is the backward's own work, which may be
    that of another engine's scale.

    Args:
        accum_steps: micro-batches per update.
        stepper: has the loss scale of now.

    Attributes:
        divides: whether the backward of now is to be divided by `accum_steps`.
        weight: of this rank's gradients among all ranks'; see [Note: along for the ride].
        factor: on each gradient of the running task; None: 1.
        carried: the loss scale that the running task carries.
    """

    def __init__(self, accum_steps: int, stepper: Stepper) -> None:
        self.accum_steps, self.stepper = accum_steps, stepper
        self.divides = True
        self.weight = 1.0
        self.factor: Tensor | float | None = None
        self.carried: Tensor | None = None

    @property
    def undivided(self) -> float:
        """What takes the division back where there is to be none; times the weight."""
        return self.weight * (1.0 if self.divides else float(self.accum_steps))

    def open(self) -> None:
        """A task begins."""
        plain = self.divides and self.weight == 1
        self.factor, self.carried = None if plain else self.undivided, None

    def carries(self, scale: Tensor) -> None:
        """The running task's gradients carry `scale` from here on.

        Raises:
            BackwardError: others carry another one.
        """
        # by identity: a comparison of values would wait for the device
        if self.carried is not None and self.carried is not scale:
            raise BackwardError(
                "two different loss scales met in one backward of this engine, and its gradients "
                "cannot be told apart. Put one nest of scales around the whole loss: "
                "a.scale(b.scale(loss)).backward()."
            )
        self.carried = scale
        own = self.stepper.opt_state.loss_scale
        assert own is not None, "without a loss scale none is applied"
        if scale is not own.scale:  # another engine's, or one that has changed since
            self.factor = own.scale / scale.to(own.scale.device) * self.undivided

    def apply(self, grads: Sequence[Tensor]) -> None:
        """Multiply gradients by the factor, in place."""
        if not grads or self.factor is None:
            return
        if self.weight == 0:  # not multiplied: what counts for nothing may be infinite
            torch._foreach_zero_(list(grads))
        else:
            torch._foreach_mul_(list(grads), self.factor)

    def of_aside(self, *, scaled: bool) -> Tensor | float:
        """The factor on what a backward inside a forward brought, which carries no scale."""
        if self.weight == 0:
            return 0.0
        own = self.stepper.opt_state.loss_scale
        return own.scale * self.undivided if scaled and own is not None else self.undivided
