"""One forward of an engine: what hooks on its outputs, and messages about its loss, know of it."""

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fzero.engine import events
from fzero.engine.autograd import current_node
from fzero.functional.tasks import current_task

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
            engine._came = True
            if engine._node is None:
                engine._node = current_node()
            if self.loss is not None:
                engine._pending[self.number] = self.loss

    def __del__(self) -> None:
        engine = self.engine() if self.engine is not None else None
        if engine is not None and engine._reducer.aside:
            engine._on(events.ForwardGone(self.number))


class Door:
    """A forward hook of an engine's module: `model(x)` counts as `engine(x)` does.

    Copies of the module take copies of it along, which tell nobody.
    """

    def __init__(self, engine: "weakref.ref[Engine] | None" = None) -> None:
        self.engine = engine

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        engine = self.engine() if self.engine is not None else None
        if engine is not None and engine.module is module:
            engine._called_directly(out)

    def __deepcopy__(self, memo: Any) -> "Door":
        return Door()

    def __reduce__(self) -> Any:
        return Door, ()


def no_loss(loss: Any) -> str:
    """Why backward cannot start from `loss`, and what to do."""
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.requires_grad and loss.grad_fn is None:
        found = f"a leaf of shape {tuple(loss.shape)}: nothing was computed from parameters"
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
