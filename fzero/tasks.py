"""Which backward is running: autograd calls it a graph task."""

import torch


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
