"""Which backward is running: autograd calls it a graph task."""

import functools

import torch
from torch import Tensor

from fzero.errors import TraceError


def current_task() -> int:
    """The number of the graph task that is running, -1 outside of backward.

    Private in torch; there is no public alternative.

    Examples:
        >>> x, tasks = torch.ones(1, requires_grad=True), []
        >>> y = x * 2
        >>> _ = y.register_hook(lambda grad: tasks.append(current_task()))
        >>> _ = torch.autograd.grad(y, x, retain_graph=True), torch.autograd.grad(y, x)
        >>> current_task(), len(set(tasks)), -1 in tasks
        (-1, 2, False)
    """
    return torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def check_tasks() -> None:
    """Raise unless a backward inside of backward is seen to be another task.

    Raises:
        TraceError: it is not, and gradients that it brings would be taken for the outer one's.
    """
    seen: list[int] = [current_task()]
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, requires_grad=True)

        def hook(grad: Tensor) -> None:
            with torch.enable_grad():
                inner = x * 3
            inner.register_hook(lambda _: seen.append(current_task()))
            seen.append(current_task())
            torch.autograd.grad(inner, x)
            seen.append(current_task())

        outer = x * 2
        outer.register_hook(hook)
        torch.autograd.grad(outer, x)
    outside, first, nested, again = seen
    if not (outside == -1 == current_task() and first == again and len({-1, first, nested}) == 3):
        raise TraceError(
            f"torch {torch.__version__} numbers its backward passes in a way that executor='eager' "
            "does not know. Use a torch that fzero's README names, or Config(executor='traced')."
        )
