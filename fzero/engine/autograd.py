"""What autograd tells an engine, and what an engine asks of it."""

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.eager.owned import SharedHooks, raw_grad, set_raw_grad
from fzero.functional.uncompiled import never_compiled

Applied = tuple[Callable[[Tensor], None], ...]
"""Told of the factor that the gradients of the running task carry from here on."""


def current_node() -> Any:
    """The node of autograd's graph whose hooks run now. Private in torch, without alternative."""
    return torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]


def accumulates(node: Any) -> bool:
    """Whether the running task is a backward, which accumulates, and not `torch.autograd.grad`.

    Private in torch; there is no public alternative.

    Args:
        node: of a graph that the task runs through.
    """
    # down any path to a leaf: what accumulates there is run by a backward alone
    while inner := [x for x, _ in node.next_functions if x is not None]:
        node = inner[0]
    with contextlib.suppress(RuntimeError):  # a leaf that autograd.grad was asked for
        return torch._C._will_engine_execute_node(node)  # pyright: ignore
    return False


def own(grad: Tensor) -> Tensor:
    """A gradient, dense, without a graph, and in memory that is nobody else's.

    Autograd may hand one memory to two leaves (the gradients of `a.view(4) + b.view(4)`). How many
    hold a storage is private in torch; there is no public alternative.
    """
    if grad.requires_grad:
        grad = grad.detach()
    if grad.layout is not torch.strided:
        return grad.to_dense()
    count = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]
    shared = count(grad.untyped_storage()._cdata) > 2  # the gradient, and this look at it
    return grad.clone() if shared else grad


class AccumulateHook:
    """What autograd calls with a parameter into which it has accumulated a gradient.

    Args:
        engine: the driver that is told; autograd's hold of a hook is hidden from the collector.
    """

    __slots__ = ("engine",)

    def __init__(self, engine: "weakref.ref[Any]") -> None:
        self.engine = engine

    @never_compiled
    def __call__(self, param: Tensor) -> None:
        driver = self.engine()
        if driver is not None:
            driver.arrived(param)


class AccumulateHooks(SharedHooks):
    """One dict of hooks for all parameters of an engine: all are told of, or none, by one write.

    Of a thousand small parameters hooks that only note who has come are a fiftieth of a backward.
    """

    def __init__(self, engine: "weakref.ref[Any]") -> None:
        super().__init__()
        self._hook = AccumulateHook(engine)
        self.tell()

    def tell(self) -> None:
        """From now on hear of each gradient; after `clear` of none."""
        dict.__setitem__(self, 0, self._hook)


def take_left(params: Mapping[int, Any], *, alone: bool) -> dict[int, Tensor]:
    """Take the gradients that autograd has left in these parameters.

    Args:
        params: of an engine, by index.
        alone: whether nobody else may have their memory, because they will be written to.
    """
    dense, grads = torch.strided, dict[int, Tensor]()
    # torch need not ask a class that takes no part in __torch_function__, twice for each
    with torch._C.DisableTorchFunctionSubclass():
        for index, param in params.items():
            grad = raw_grad(param)
            if grad is None:  # none came, or a function returned None for it
                continue
            set_raw_grad(param, None)
            if alone or grad.requires_grad or grad.layout is not dense:
                grad = own(grad)
            grads[index] = grad
    return grads


class Watcher:
    """Told once when a graph task ends, or that it broke off.

    Autograd calls it at the end. A task that raises is destroyed, and with it its callbacks: that
    is how one that was never called learns of it.
    """

    done = True  # of an object without its __init__, as torch.compile makes one to trace with

    def __init__(self, ended: Callable[[], None], raised: Callable[[], None]) -> None:
        self.ended, self.raised = ended, raised
        self.done = False

    @never_compiled
    def __call__(self) -> None:
        self.ended()
        self.done = True  # not before: one that was interrupted on its way is over as well

    def __del__(self) -> None:
        if not self.done:
            self.raised()


def watch(ended: Callable[[], None], raised: Callable[[], None]) -> None:
    """Call one of these when the graph task that is running is over.

    Private in torch, where DDP and FSDP use it; there is no public alternative.
    """
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore
    engine.queue_callback(Watcher(ended, raised))


class Scale(torch.autograd.Function):
    """`x` times a loss scale, whose backward tells the engines that share it.

    The scales of several engines directly on top of each other are one node for all of them, with
    the factor of the innermost: it is on the gradient once, and each engine corrects its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, applied: Applied) -> Any:  # pyright: ignore
        ctx.unscaled, ctx.factor, ctx.applied = x, factor, applied
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        for tell in ctx.applied:
            tell(ctx.factor)
        return grad * ctx.factor, None, None


def scaled(x: Tensor, factor: Tensor, tell: Callable[[Tensor], None]) -> Tensor:
    """`x` times `factor`, with `tell` told of it in backward; see `Scale`.

    On top of another engine's scale there is one node for both, with the other's factor. `tell` is
    told once, however often it was put on.
    """
    applied = (tell,)
    node: Any = x.grad_fn
    if getattr(node, "applied", None) and hasattr(node, "unscaled"):  # another engine's
        if tell in node.applied:
            return x
        x, factor, applied = node.unscaled, node.factor, (*node.applied, tell)
    return Scale.apply(x, factor.to(x.device), applied)  # pyright: ignore
