"""Which backward is running: autograd calls it a graph task."""

import contextlib
import functools
import sys
import threading
from typing import Any

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


# What calls autograd's engine. Private in torch, without alternative; where it has another name,
# no node is known to be autograd's own.
_run: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
_RUN = getattr(_run, "__code__", None)


def runs_own_node() -> bool:
    """Whether a node of autograd's own called an operator, in a backward that records nothing.

    Such a node is a formula in C++, which keeps nothing of what it computes but the gradients.
    Hooks and `backward` of a user's Function are no such nodes. To be asked by what the operator
    called.
    """
    if torch.is_grad_enabled() or current_task() == -1:
        return False
    try:
        return sys._getframe(2).f_code is _RUN  # nothing of Python's between the engine and there
    except ValueError:  # nothing at all, in the thread of a device
        return _RUN is not None


def in_backward_of(ident: int) -> bool:
    """Whether a thread is in autograd's engine, and nothing of Python's runs in it meanwhile."""
    frame = sys._current_frames().get(ident)
    return frame is not None and frame.f_code is _RUN


def in_engines_thread() -> bool:
    """Whether this is the engine's own thread for a device, which has called no backward itself."""
    frame = sys._getframe() if current_task() != -1 else None
    found = frame is not None
    while frame is not None:
        found &= frame.f_code is not _RUN
        frame = frame.f_back
    return found


def is_backward(frame: Any) -> bool:
    """Whether a frame is that of a call into autograd's engine."""
    return frame.f_code is _RUN


def is_autograds_thread() -> bool:
    """Whether a backward runs in a thread that it has from autograd: a device's, or a pool's."""
    return current_task() != -1 and isinstance(threading.current_thread(), threading._DummyThread)


def thread_of_task() -> int | None:
    """The thread that has called the running task and waits for it in autograd's engine.

    To be asked in a thread of the engine's own. None: no thread of Python's waits, as where the
    task was called by a node of another one. Which nodes a task runs is private in torch, without
    alternative.
    """
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or frame.f_code is not _RUN or isinstance(thread, threading._DummyThread):
            continue
        # a tensor, or an edge of the graph
        nodes = (
            getattr(x, "grad_fn", getattr(x, "node", None))
            for x in frame.f_locals.get("t_outputs", ())
        )
        if any(_is_run(node) for node in nodes if node is not None):
            return thread.ident
    return None


def _is_run(node: Any) -> bool:
    """Whether the running task runs a node; of a single root autograd notes what comes next."""
    for one in (node, *(x for x, _ in node.next_functions if x is not None)):
        with contextlib.suppress(RuntimeError):  # a leaf
            if torch._C._will_engine_execute_node(one):  # pyright: ignore
                return True
    return False


@functools.cache
def check_tasks() -> None:
    """Raise unless a backward inside of backward is seen to be another task.

    Raises:
        TraceError: it is not, and gradients that it brings would be taken for the outer one's.
    """
    seen: list[int] = [current_task()]
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, requires_grad=True, device="cpu")

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
