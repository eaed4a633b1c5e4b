"""LAMB: Adam's direction, as long as the layer's parameters are."""

import math
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.distributed.dtensor import local_tensor
from fzero.errors import ConfigError, arguments_by_name
from fzero.inference import makes_normal
from fzero.optim import check
from fzero.optim.adam import AdamState, scale_by_adam
from fzero.optim.base import Optimizer, Params, PyTree, Rate, rate_at, rate_by_step
from fzero.optim.foreach import by_group, leaves_like
from fzero.optim.inplace import EmptyState, in_place
from fzero.optim.shards import like_given, splits, squares, summed
from fzero.optim.transforms import decay_tree, scale_tree


def scale_by_trust_ratio(min_ratio: float = 0.0, max_ratio: float = math.inf) -> Optimizer:
    """Give each leaf's update the norm of its parameters: `update * |params| / |update|`.

    Norms are those of whole leaves: of sharded ones all are summed over ranks in one message. A
    leaf whose parameters or update are zero keeps its update.

    Args:
        min_ratio: The least that an update is multiplied by.
        max_ratio: The most.

    Raises:
        ConfigError: `min_ratio` is negative, or above `max_ratio`.

    Examples:
        >>> opt = scale_by_trust_ratio()
        >>> params = [torch.tensor([3.0, 4.0])]
        >>> opt.update([torch.tensor([0.0, 0.1])], opt.init(params), params)[0]
        [tensor([0., 5.])]

    References:
        You et al., arXiv:1904.00962, algorithm 2, with the identity for phi.
    """

    if not 0 <= min_ratio <= max_ratio:
        raise ConfigError(
            f"scale_by_trust_ratio(min_ratio={min_ratio!r}, max_ratio={max_ratio!r}): must be "
            "0 <= min_ratio <= max_ratio. Leave both out for no bounds."
        )

    def update(
        grads: PyTree, state: EmptyState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, EmptyState]:
        return trust_tree(grads, params, "scale_by_trust_ratio", min_ratio, max_ratio), state

    return Optimizer(EmptyState.of, update, in_place(update))


def trust_tree(
    updates: PyTree,
    params: Params | None,
    where: str,
    min_ratio: float = 0.0,
    max_ratio: float = math.inf,
) -> PyTree:
    """Updates with the norms of their parameters, leaf by leaf, within the bounds of the ratio."""
    if params is None:
        raise ConfigError(
            f"{where}: the norms of the params are needed, but update was called without them. "
            "Call update(grads, state, params)."
        )
    leaves, spec = tree.flatten(updates)
    lie = splits(updates, where)
    own = leaves_like(spec, params, "params")
    found = summed([*squares(own), *squares(leaves)], lie * 2, f"{where}: norms")
    pairs = zip(found[: len(lie)], found[len(lie) :], strict=True)
    ratios = [
        torch.where((p > 0) & (u > 0), (p / u).sqrt().clamp(min_ratio, max_ratio), 1.0)
        for p, u in pairs
    ]

    def kernel(group: list[Tensor], factors: list[Tensor]) -> tuple[list[Tensor]]:
        return ([(x * factor).to(x.dtype) for x, factor in zip(group, factors, strict=True)],)

    (scaled,) = by_group(kernel, [local_tensor(x) for x in leaves], ratios, outputs=1)
    return tree.unflatten(spec, like_given(scaled, leaves))


@arguments_by_name
def lamb(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float | Tensor = 0.0,
) -> Optimizer:
    """LAMB: `params -= lr * |params| / |direction| * direction`, leaf by leaf.

    The direction is AdamW's, `adam(grads) + weight_decay * params`. For batches of many thousands,
    whose learning rates would be too large for some layers.

    Args:
        lr: A number, or a schedule of the step.
        b1: Decay of the mean, in [0, 1).
        b2: Decay of the mean square, in [0, 1).
        eps: Added to the root of the mean square.
        weight_decay: Share of the params in the direction.

    Returns:
        An optimizer whose state is an `AdamState`. Two norms of each leaf travel in a step.

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> opt = lamb(0.1)
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> opt.update({"w": torch.ones(2)}, opt.init(params), params)[0]
        {'w': tensor([-0.3536, -0.3536])}

    References:
        You et al., arXiv:1904.00962, algorithm 2, with the identity for phi, as in optax.
    """
    check.learning_rate("lamb", lr)
    check.fraction("lamb", b1=b1, b2=b2)
    check.positive("lamb", eps=eps)
    check.decay("lamb", weight_decay)
    moments = scale_by_adam(b1, b2, eps)

    @makes_normal
    def init(params: Params) -> AdamState:
        splits(params, "lamb")  # refuses what has no norm
        return moments.init(params)

    def update(
        grads: PyTree, state: AdamState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, AdamState]:
        check.state("lamb", state, AdamState)
        rate = rate_at(lr, state.step)
        directions, state = moments.update(grads, state)
        directions = decay_tree(directions, params, weight_decay, "lamb")
        return scale_tree(trust_tree(directions, params, "lamb"), -rate), state

    return Optimizer(init, update, in_place(update), rates=rate_by_step(lr))
