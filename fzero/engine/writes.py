"""What callers do to a module between two updates, seen before the second."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fzero.engine.stepper import Stepper
from fzero.errors import FzeroError
from fzero.layout import LeafLayout


class Writes:
    """The state of an engine's parameters, as the engine left them.

    Args:
        params: the module's parameters by index.
        leaves: how each is split.
        stepper: what trains them.
        lazy: whether they are gathered on use: there writing is refused at once.
    """

    def __init__(
        self,
        params: Mapping[int, Tensor],
        leaves: Sequence[LeafLayout],
        stepper: Stepper,
        *,
        lazy: bool,
    ) -> None:
        self.params, self.leaves, self.stepper, self.lazy = params, leaves, stepper, lazy

    def see(self) -> None:
        """An update would reach the module's parameters, and those that are to be trained.

        Raises:
            FzeroError: a parameter has been given other memory, or is to be trained or not to be
                trained from now on.
        """
        for index, param in self.params.items():
            leaf, own = self.leaves[index], self.stepper.locals[index]
            if param.requires_grad != leaf.trainable:
                raise FzeroError(
                    f"the parameter {leaf.name!r} has requires_grad={param.requires_grad}, and had "
                    f"{leaf.trainable} when the engine was made: what is trained is settled then. "
                    "Set it back, or make another engine from engine.full_params()."
                )
            if self.lazy:
                continue
            if param.data_ptr() != own.data_ptr() or param.dtype != own.dtype:
                raise FzeroError(
                    f"the parameter {leaf.name!r} is no longer in the engine's memory: "
                    "module.to(...), .half() or p.data = ... replaced it, and an update would be "
                    "lost. Move or cast the module before the engine is made; dtypes are "
                    "Config(precision=...)'s."
                )

    def ours(self) -> None:
        """The engine has written: autograd is to refuse graphs made with the values of before."""
        torch.autograd.graph.increment_version(list(self.params.values()))
