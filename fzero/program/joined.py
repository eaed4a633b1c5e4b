"""Kernels of lists of leaves that take as one what lies end to end: see [Note: end to end]."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from fzero.layout.end_to_end import one_of, runs
from fzero.program.graph import is_op


def joined(node: fx.Node, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a node's kernel: itself, or what joins the leaves that it takes.

    Args:
        node: of a graph.
        kernel: of its operator.
    """
    if is_op(node, "aten::_fused_adam_", "aten::_fused_adamw_"):
        return _updating(kernel)
    if is_op(node, "aten::_foreach_mul_") and not isinstance(node.args[1], list | tuple):
        return _scaling(kernel)
    return kernel


def _updating(kernel: Callable[..., None]) -> Callable[..., None]:
    """An optimizer's fused kernel: lists of parameters, gradients and state, and one of steps."""

    def run(*lists: Any, **more: Any) -> None:
        *columns, steps = lists
        found = None
        if all(step is steps[0] for step in steps):
            # gradients first: most often they tell
            found = _runs(*([columns[1], columns[0], *filter(None, columns[2:])]))
        if found is not None:
            columns = [_joined(x, found) if x else x for x in columns]
            steps = steps[: len(found)]
        kernel(*columns, steps, **more)

    return run


def _scaling(kernel: Callable[..., None]) -> Callable[..., None]:
    """Leaves times one factor, in place."""

    def run(leaves: list[Tensor], factor: Any) -> None:
        found = _runs(leaves)
        kernel(leaves if found is None else _joined(leaves, found), factor)

    return run


def _joined(leaves: Sequence[Tensor], found: Sequence[Sequence[int]]) -> list[Tensor]:
    return [one_of([leaves[i] for i in run]) for run in found]


def _runs(*columns: Sequence[Tensor]) -> list[list[int]] | None:
    """`runs`; None where each leaf is by itself, or not all are plain and on a CPU."""
    first = columns[0]
    if len(first) < 2 or first[0].device.type != "cpu":
        return None
    if len(runs(first)) == len(first) or not all(map(_are_plain, columns)):
        return None
    found = runs(*columns)
    return found if len(found) < len(first) else None


def _are_plain(leaves: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, leaves)) and len({x.dtype for x in leaves}) == 1
