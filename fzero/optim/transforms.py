"""Building blocks without a state worth keeping, and the learning rate."""

# torch.optim is built on torch._foreach_* and torch._fused_*, which have no public names.
# pyright: reportPrivateImportUsage=false

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import ConfigError
from fzero.inference import makes_normal
from fzero.optim import check
from fzero.optim.base import Optimizer, Params, PyTree, Rate, rate_at, rate_by_step
from fzero.optim.foreach import by_group, cast_like, leaves_like, scaled, zero_step
from fzero.optim.inplace import EmptyState, in_place


class ScheduleState(NamedTuple):
    """How many updates there were; 0-d float32."""

    step: Tensor


def identity() -> Optimizer:
    """Updates are the gradients, the very same tensors.

    Examples:
        >>> opt = identity()
        >>> opt.update([torch.ones(1)], opt.init([]))
        ([tensor([1.])], EmptyState())
    """

    def update(
        grads: PyTree, state: EmptyState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, EmptyState]:
        return grads, state

    return Optimizer(EmptyState.of, update, in_place(update))


def scale(factor: float) -> Optimizer:
    """Multiply by a fixed factor.

    Examples:
        >>> opt = scale(-0.5)
        >>> opt.update([torch.ones(1)], opt.init([]))[0]
        [tensor([-0.5000])]
    """
    check.finite("scale", factor=factor)

    def update(
        grads: PyTree, state: EmptyState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, EmptyState]:
        return scale_tree(grads, factor), state

    return Optimizer(EmptyState.of, update, in_place(update))


def scale_by_learning_rate(lr: Rate) -> Optimizer:
    """Multiply by `-lr`: the last part of a chain, which turns a direction into a step downhill.

    Args:
        lr: A number, or a schedule of the step.

    Raises:
        ConfigError: `lr` is negative or not a number.

    Examples:
        >>> opt = scale_by_learning_rate(lambda step: 1.0 / (1.0 + step))
        >>> state = opt.init([torch.ones(1)])
        >>> updates, state = opt.update([torch.ones(1)], state)
        >>> updates, opt.update([torch.ones(1)], state)[0]
        ([tensor([-1.])], [tensor([-0.5000])])
    """
    check.learning_rate("scale_by_learning_rate", lr)
    if not callable(lr) and not isinstance(lr, Tensor):
        return scale(-lr)._replace(rates=lambda state: [lr])

    def update(
        grads: PyTree, state: ScheduleState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, ScheduleState]:
        return scale_tree(grads, -rate_at(lr, state.step)), ScheduleState(state.step + 1)

    @makes_normal
    def init(params: Params) -> ScheduleState:
        return ScheduleState(zero_step(params))

    return Optimizer(init, update, in_place(update), rates=rate_by_step(lr))


def add_decayed_weights(weight_decay: float | Tensor) -> Optimizer:
    """Add `weight_decay * params`.

    Before the moments it is L2 regularisation, after them decoupled decay.

    Examples:
        >>> opt = add_decayed_weights(0.1)
        >>> opt.update([torch.zeros(1)], opt.init([]), [torch.ones(1)])[0]
        [tensor([0.1000])]

    References:
        Loshchilov and Hutter, arXiv:1711.05101.
    """
    check.decay("add_decayed_weights", weight_decay)

    def update(
        grads: PyTree, state: EmptyState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, EmptyState]:
        return decay_tree(grads, params, weight_decay, "add_decayed_weights"), state

    return Optimizer(EmptyState.of, update, in_place(update))


def scale_tree(values: PyTree, factor: float | Tensor) -> PyTree:
    """New tensors `value * factor`, dtypes kept."""
    leaves, spec = tree.flatten(values)
    (products,) = by_group(lambda group: (scaled(group, factor),), leaves, outputs=1)
    return tree.unflatten(spec, products)


def decay_tree(
    grads: PyTree, params: Params | None, weight_decay: float | Tensor, where: str
) -> PyTree:
    """`grads + weight_decay * params`; the gradients themselves if there is no decay."""
    # a tensor's value is for the device to know
    if not isinstance(weight_decay, Tensor) and weight_decay == 0:
        return grads
    if params is None:
        raise ConfigError(
            f"{where}: weight_decay={weight_decay} needs the params, but update was called "
            "without them. Call update(grads, state, params)."
        )
    leaves, spec = tree.flatten(grads)
    decayed = leaves_like(spec, params, "params")

    def kernel(grads: list[Tensor], params: list[Tensor]) -> tuple[list[Tensor]]:
        decayed = cast_like(params, grads)
        if isinstance(weight_decay, Tensor):
            return (list(torch._foreach_add(grads, scaled(decayed, weight_decay))),)
        return (list(torch._foreach_add(grads, decayed, alpha=weight_decay)),)

    (sums,) = by_group(kernel, leaves, decayed, outputs=1)
    return tree.unflatten(spec, sums)
