"""The garbage collector, out of the way while much is made and little of it is garbage.

[Note: collector] Python looks for cycles whenever 700 more objects were made than went, and at all
objects of the process once enough of those lived on. While a Program runs, thousands of tensors are
alive that are gone at its end, none in a cycle: with 1,000 leaves a tenth of a step went by in
looking through everything that the process has. So no collection begins inside of a Program. When
it ends, only what is left counts, and the next object that anybody makes may start one. Python of
users (an opaque part) makes what it makes: a Program that has some leaves the collector alone.
"""

import contextlib
import gc
from collections.abc import Iterator

import torch
from torch import fx


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection of cycles inside, if there are any outside.

    Recording makes some hundred objects for each node, which all live on: a third of its time goes
    by in looking for cycles among them.

    >>> with collector_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def runs_kernels_alone(graph: fx.Graph) -> bool:
    """Whether a graph calls nothing but operators, and what this library puts around collectives.

    >>> graph = fx.Graph()
    >>> x = graph.call_function(torch.ops.aten.ones.default, ([2],))
    >>> alone = runs_kernels_alone(graph)
    >>> _ = graph.call_function(print, (x,))
    >>> alone, runs_kernels_alone(graph)
    (True, False)
    """
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return all(isinstance(x, torch._ops.OpOverload) or _is_ours(x) for x in targets)


def _is_ours(target: object) -> bool:
    module = getattr(target, "__module__", "")
    is_function = isinstance(target, type(_is_ours)) and module.startswith("fzero.")
    return is_function or module == "_operator"
