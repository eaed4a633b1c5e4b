"""What autograd tells an engine, and what an engine asks of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Applied = tuple[Callable[[Tensor], None], ...]
"""Told of the factor that the gradients of the running task carry from here on."""


def current_task() -> int:
    """The number of the graph task that is running, -1 outside of backward.

    Private in torch; there is no public alternative.
    """
    return torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue]


class Watcher:
    """Told once when a graph task ends, or that it broke off.

    Autograd calls it at the end. A task that raises is destroyed, and with it its callbacks: that
    is how one that was never called learns of it.
    """

    def __init__(self, ended: Callable[[], None], raised: Callable[[], None]) -> None:
        self.ended, self.raised = ended, raised
        self.done = False

    def __call__(self) -> None:
        self.done = True
        self.ended()

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

    Outermost of several engines' scales on one tensor is one node for all of them, so that the
    factor is on the gradient once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, factor: Tensor, applied: tuple[Callable[..., None], ...]
    ) -> Any:  # pyright: ignore
        ctx.unscaled, ctx.factor, ctx.applied = x, factor, applied
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        for tell in ctx.applied:
            tell(ctx.factor)
        return grad * ctx.factor, None, None
