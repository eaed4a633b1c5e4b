"""One forward of an engine: what hooks on its outputs, and messages about its loss, know of it."""

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fzero.engine import events
from fzero.engine.autograd import current_node
from fzero.tasks import current_task

if TYPE_CHECKING:
    from fzero.engine.engine import Engine


class Forward:
    """One call of an engine, as the hooks on its outputs know it."""

    engine: "weakref.ref[Engine] | None" = None  # where __init__ was skipped, as by a compiler

    def __init__(self, engine: "Engine", number: int) -> None:
        self.engine, self.number = weakref.ref(engine), number
        self.loss: Tensor | None = None

    def reached(self, grad: Tensor) -> None:
        """A gradient has come to an output."""
        engine = self.engine() if self.engine is not None else None
        if engine is not None:
            engine._on(events.OutputReached(self.number, current_task()))
            if engine._node is None:
                engine._node = current_node()
            if self.loss is not None:
                engine._pending[self.number] = self.loss

    def __del__(self) -> None:
        engine = self.engine() if self.engine is not None else None
        if engine is not None and engine._reducer.aside:
            engine._on(events.ForwardGone(self.number))


def no_loss(loss: Any) -> str:
    """Why backward cannot start from `loss`, and what to do."""
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.requires_grad is False:
        found = f"a tensor of shape {tuple(loss.shape)} without a graph"
    else:
        found = f"a tensor of shape {tuple(loss.shape)}"
    return (
        f"engine.backward(loss) was given {found}; it takes a scalar tensor that was computed from "
        "the engine's parameters, with gradients enabled. Reduce the loss with .mean(), do not "
        ".detach() it, and compute it outside of torch.no_grad(); outputs of other shapes go "
        "through engine.scale(out).backward(gradient)."
    )
