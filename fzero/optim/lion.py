"""Lion: the sign of a momentum."""

# torch.optim is built on torch._foreach_* and torch._fused_*, which have no public names.
# pyright: reportPrivateImportUsage=false

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import arguments_by_name
from fzero.inference import makes_normal
from fzero.optim import check
from fzero.optim.base import Optimizer, Params, PyTree, Rate, rate_at, rate_by_step
from fzero.optim.foreach import (
    by_group,
    cast_like,
    leaves_like,
    mixed,
    scale_,
    subtract_,
    temporary_bytes,
    zero_step,
    zeros_like,
)
from fzero.optim.inplace import in_place
from fzero.optim.transforms import decay_tree, scale_tree


class LionState(NamedTuple):
    """The momentum.

    Attributes:
        step: Updates so far; 0-d float32.
        mu: Running mean of the gradients, shaped as the params.
    """

    step: Tensor
    mu: Params


@arguments_by_name
def scale_by_lion(b1: float | Tensor = 0.9, b2: float = 0.99) -> Optimizer:
    """Lion's direction: the sign of the gradients mixed into their running mean.

    Args:
        b1: Share of the mean in the mix, in [0, 1); or a 0-d tensor, which may change from step to
            step.
        b2: Decay of the mean, in [0, 1).

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> opt = scale_by_lion()
        >>> opt.update([torch.tensor([-3.0, 0.0, 2.0])], opt.init([torch.ones(3)]))[0]
        [tensor([-1.,  0.,  1.])]

    References:
        Chen et al., arXiv:2302.06675, algorithm 2.
    """
    check.decay_rate("scale_by_lion", b1=b1)
    check.fraction("scale_by_lion", b2=b2)

    @makes_normal
    def init(params: Params) -> LionState:
        return LionState(zero_step(params), zeros_like(params))

    def update(
        grads: PyTree, state: LionState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, LionState]:
        def kernel(mu: list[Tensor], grads: list[Tensor]) -> Any:
            grads = cast_like(grads, mu)
            directions = mixed(mu, grads, b1)
            torch._foreach_sign_(directions)
            return directions, torch._foreach_lerp(mu, grads, 1.0 - b2)

        leaves, spec = tree.flatten(grads)
        mu = leaves_like(spec, state.mu, "the optimizer's state")
        directions, new = by_group(kernel, mu, leaves, outputs=2)
        return tree.unflatten(spec, directions), LionState(
            state.step + 1, tree.unflatten(spec, new)
        )

    return Optimizer(init, update, in_place(update))


@arguments_by_name
def lion(
    lr: Rate,
    b1: float | Tensor = 0.9,
    b2: float = 0.99,
    weight_decay: float | Tensor = 0.0,
) -> Optimizer:
    """Lion: `params -= lr * (sign(mix of mean and gradient) + weight_decay * params)`.

    Its learning rate is typically a third to a tenth of AdamW's, its decay larger by as much.

    Args:
        lr: A number, or a schedule of the step.
        b1: Share of the mean in the mix, in [0, 1); or a 0-d tensor, which may change from step to
            step.
        b2: Decay of the mean, in [0, 1).
        weight_decay: Share of the params that goes per unit of learning rate.

    Returns:
        An elementwise optimizer; its state is a `LionState`.

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> opt = lion(0.1)
        >>> params = {"w": torch.ones(2)}
        >>> state = opt.apply_({"w": torch.tensor([5.0, -0.1])}, opt.init(params), params)
        >>> params
        {'w': tensor([0.9000, 1.1000])}

    References:
        Chen et al., arXiv:2302.06675, algorithm 2.
    """
    check.learning_rate("lion", lr)
    check.decay_rate("lion", b1=b1)
    check.fraction("lion", b2=b2)
    check.decay("lion", weight_decay)
    signs = scale_by_lion(b1, b2)

    def update(
        grads: PyTree, state: LionState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, LionState]:
        check.state("lion", state, LionState)
        rate = rate_at(lr, state.step)
        directions, state = signs.update(grads, state)
        directions = decay_tree(directions, params, weight_decay, "lion")
        return scale_tree(directions, -rate), state

    @torch.no_grad()
    def apply_(grads: PyTree, state: LionState, params: Params, **_: Any) -> LionState:
        check.state("lion", state, LionState)
        rate = rate_at(lr, state.step)

        def kernel(params: list[Tensor], grads: list[Tensor], mu: list[Tensor]) -> None:
            grads = cast_like(grads, params)
            directions = mixed(mu, grads, b1)
            torch._foreach_sign_(directions)
            # after the direction, which is mixed from the mean of the steps before
            torch._foreach_lerp_(mu, grads, 1.0 - b2)
            if weight_decay:
                scale_(params, 1.0 - rate * weight_decay)
            subtract_(params, directions, rate)

        leaves, spec = tree.flatten(grads)
        columns = (
            leaves_like(spec, params, "params"),
            leaves,
            leaves_like(spec, state.mu, "the optimizer's state"),
        )
        by_group(kernel, *columns, max_bytes=temporary_bytes)
        state.step.add_(1)
        return state

    if isinstance(weight_decay, Tensor):  # which the kernels would have to read
        return Optimizer(signs.init, update, in_place(update), rates=rate_by_step(lr))
    return Optimizer(signs.init, update, apply_, rates=rate_by_step(lr))
