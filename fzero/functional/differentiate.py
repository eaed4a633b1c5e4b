"""Gradients as `loss.backward()` accumulates them, from `torch.autograd.grad`."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fzero.errors import FzeroError
from fzero.functional.patch import Patch
from fzero.functional.transforms import in_transform

_DIFFERENTIATING: ContextVar[bool] = ContextVar("fzero_differentiating", default=False)


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """What runs inside is differentiated by `torch.autograd`, which leaves no mark of that."""
    token = _DIFFERENTIATING.set(True)
    try:
        yield
    finally:
        _DIFFERENTIATING.reset(token)


def is_differentiated() -> bool:
    """Whether a function around this one is differentiated, by whatever it reads.

    Not asked of arguments: what is differentiated may be another one, or come by a closure.

    Examples:
        >>> is_differentiated(), torch.func.grad(lambda x: x * is_differentiated())(torch.ones(()))
        (False, tensor(1.))
        >>> with differentiating():
        ...     is_differentiated()
        True
    """
    return in_transform() or _DIFFERENTIATING.get()


def differentiated(
    loss: Tensor, inputs: Sequence[Tensor], *, must_depend: bool = True
) -> list[Tensor | None]:
    """The gradients that `loss.backward()` accumulates in these leaves; None where it does not.

    Raises:
        FzeroError: the loss depends on none of them, and must.

    Examples:
        >>> x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> differentiated((3 * x).sum(), [x, y])
        [tensor([3.]), None]
    """
    found: list[Tensor | None] = [None] * len(inputs)
    if loss.requires_grad and inputs:
        found = pulled_back([loss], inputs)
    if must_depend and inputs and all(grad is None for grad in found):
        raise no_gradient()
    return found


def pulled_back(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """What backward of the outputs accumulates in these leaves, wherever it leaves it.

    Args:
        outputs: on autograd's graph.
        inputs: leaves.
        grads: one per output; None: of scalars.
    """
    found = reaching_all(outputs, inputs, grads)
    return [added(grad, accumulated(x)) for grad, x in zip(found, inputs, strict=True)]


def reaching_all(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """`torch.autograd.grad` that runs every node, as `loss.backward()` does.

    A re-entrant checkpoint of what needs no gradient but closes over what does (the first layer's,
    of `x.requires_grad_()`) is on the way to no input. So all leaves are asked for.
    """
    with _VALID:
        wanted = [*inputs, *_others(outputs, inputs)]
        found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return list(found[: len(inputs)])


def _others(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of the outputs' graph that are not among `inputs`, if a user's node is there."""
    ours = set(map(id, inputs))
    found: dict[int, Tensor] = {}
    has_users = False
    for node in chain.from_iterable(map(nodes_behind, outputs)):
        has_users |= isinstance(node, BackwardCFunction)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ours:
            found[id(leaf)] = leaf
    # only a user's node runs backward inside; else more leaves cost gradients for nobody
    return list(found.values()) if has_users else []


def nodes_behind(x: Tensor) -> Iterator[Any]:
    """Every node of autograd's graph that a tensor comes from; a leaf's has it as `variable`.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> [node.name() for node in nodes_behind((w * 2).sum())]
        ['SumBackward0', 'MulBackward0', 'torch::autograd::AccumulateGrad']
    """
    seen = {x.grad_fn}
    nodes: list[Any] = [x.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)


# What re-entrant checkpoints (torch's, Megatron's, DeepSpeed's, FairScale's) ask in their backward,
# which refuses `torch.autograd.grad` since what they close over accumulates on the side: here it is
# taken from there. Private in torch, without alternative; where it is not asked, they refuse still.
_VALID = Patch((torch.autograd, "_is_checkpoint_valid", lambda original: lambda: True))


def accumulated(leaf: Tensor) -> Tensor | None:
    """Take what a backward inside of backward left in a leaf of ours, past `torch.autograd.grad`.

    The backward of Megatron's and DeepSpeed's `CheckpointFunction` calls `torch.autograd.backward`.
    """
    grad, leaf.grad = leaf.grad, None
    return grad


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of what is there."""
    return a if b is None else b if a is None else a + b


def no_gradient() -> FzeroError:
    """What to say of a loss that depends on no trained parameter, as `loss.backward()` would."""
    return FzeroError(
        "the loss depends on no trained parameter, so there is nothing to train. Compute it from "
        "the params that the model function is given: apply(params, x), not module(x), which has "
        "parameters of its own; without .detach(), and outside of torch.no_grad(). What is not to "
        "be trained is named in Config(frozen=...)."
    )
