"""The losses that a step reports: those that a user named, else what outputs look like losses."""

import torch
from torch import Tensor


class Losses:
    """Losses since the last update, without a graph.

    Attributes:
        given: to `engine.backward`, which names its loss.
        reached: outputs that look like losses, by forward: those of the running task. If it raises,
            they are none of the step's.
        seen: the same of the tasks before.
        weight: of this rank's losses from now on among all ranks'.
    """

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.reached: dict[int, Tensor] = {}
        self.seen: dict[int, Tensor] = {}
        self.weight = 1.0

    def give(self, loss: Tensor) -> None:
        """A loss that `engine.backward` was given, in memory of its own."""
        self.given.append(self._weighed(loss))

    def _weighed(self, loss: Tensor) -> Tensor:
        if self.weight == 1:
            return loss
        # what counts for nothing may be infinite
        return loss * self.weight if self.weight else torch.zeros_like(loss)

    def commit(self) -> None:
        """The running task has ended well."""
        self.seen.update({i: self._weighed(loss) for i, loss in self.reached.items()})
        self.reached = {}

    def discard(self) -> None:
        """The running task has raised."""
        self.reached = {}

    def of_step(self) -> list[Tensor]:
        """What was given; if nothing was, what the outputs had.

        >>> losses = Losses()
        >>> losses.reached[0] = "of an output"
        >>> losses.commit()
        >>> losses.of_step()
        ['of an output']
        >>> losses.give("to backward")
        >>> losses.of_step()
        ['to backward']
        """
        return self.given or list(self.seen.values())

    def unscale(self, factor: Tensor) -> None:
        """What was given came with a scale; outputs of forwards have none."""
        self.given = [loss * factor.to(loss.device) for loss in self.given]

    def clear(self) -> None:
        """An update, or `zero_grad`: none from here on."""
        self.given, self.seen = [], {}
