"""One forward of an engine: what hooks on its outputs, and messages about its loss, know of it."""

import weakref
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fzero.engine.outputs import loss_in, tensors_in
from fzero.functional.uncompiled import never_compiled


class Listener(Protocol):
    """Who is told of forwards: an engine's driver.

    Hooks hold it weakly: autograd's graph and the module may outlive it.
    """

    module: nn.Module

    def output_reached(self, forward: int, loss: Tensor | None, /, *, trains: bool) -> None:
        """A gradient has come to an output."""
        ...

    def forward_gone(self, forward: int, /) -> None:
        """Nobody can call backward on its outputs any more."""
        ...

    def calls_directly(self) -> None:
        """The module is about to run."""
        ...

    def called_directly(self, out: Any, /) -> None:
        """The module has run, and its output is there."""
        ...

    def left_directly(self) -> None:
        """The module has run, or has raised."""
        ...


class Forward:
    """One call of an engine, as the hooks on its outputs know it."""

    listener: "weakref.ref[Listener] | None" = None  # where __init__ was skipped, as by a compiler

    def __init__(self, listener: Listener, number: int) -> None:
        self.listener, self.number = weakref.ref(listener), number
        self.loss: Tensor | None = None
        self.trains = True

    def hook(self, out: Any, *, trains: bool) -> None:
        """Be told of gradients that come to `out`, what the call has given.

        Args:
            out: in any containers.
            trains: whether a parameter of the engine's may get one from there.
        """
        self.trains = trains
        self.loss = loss_in(out)
        for x in tensors_in(out):
            # a view that is written to gets another node, and backward may come by its base alone
            for y in (x, x._base):
                if y is not None and y.grad_fn is not None:
                    y.register_hook(self.reached)

    @never_compiled
    def reached(self, grad: Tensor | None) -> None:
        """A gradient has come to an output."""
        listener = self.listener() if self.listener is not None else None
        if listener is not None:
            listener.output_reached(self.number, self.loss, trains=self.trains)

    def __del__(self) -> None:  # the hooks on its outputs held it, so the graph is gone
        listener = self.listener() if self.listener is not None else None
        if listener is not None:
            listener.forward_gone(self.number)


class Door:
    """The hooks on an engine's module through which `model(x)` counts as `engine(x)` does.

    Copies of the module take copies of it along, which tell nobody.
    """

    def __init__(self, listener: "weakref.ref[Listener] | None" = None) -> None:
        self.listener = listener

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        """Be called before and after the module's forward, and when it raises."""
        return [
            module.register_forward_pre_hook(self.before, prepend=True),  # others gather and hold
            module.register_forward_hook(self.after),
            module.register_forward_hook(self.left, always_call=True),
        ]

    def before(self, module: nn.Module, args: Any) -> None:
        """Forward begins."""
        if (listener := self._listener_of(module)) is not None:
            listener.calls_directly()

    def after(self, module: nn.Module, args: Any, out: Any) -> None:
        """Forward has ended."""
        if (listener := self._listener_of(module)) is not None:
            listener.called_directly(out)

    def left(self, module: nn.Module, args: Any, out: Any) -> None:
        """Forward has ended or raised."""
        if (listener := self._listener_of(module)) is not None:
            listener.left_directly()

    def _listener_of(self, module: nn.Module) -> Listener | None:
        listener = self.listener() if self.listener is not None else None
        return listener if listener is not None and listener.module is module else None

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
