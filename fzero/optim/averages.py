"""The moving average of what a transform passes on."""

# torch.optim is built on torch._foreach_*, which have no public names.
# pyright: reportPrivateImportUsage=false

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import arguments_by_name
from fzero.inference import makes_normal
from fzero.optim import check
from fzero.optim.base import Optimizer, Params, PyTree
from fzero.optim.counts import NEVER, increased
from fzero.optim.foreach import by_group, cast_like, leaves_like, scaled_each, zero_step, zeros_like
from fzero.optim.inplace import in_place


class EmaState(NamedTuple):
    """A moving average.

    Attributes:
        step: Updates so far; 0-d float32.
        ema: The average, shaped as the params; it starts at zero, and is not corrected for that.
        counts: Each leaf's own updates: see `AdamState`; of an average that is never corrected
            there are none.
    """

    step: Tensor
    ema: Params
    counts: Params = None

    @property
    def counted(self) -> Params:
        """A tree with the leaves of the params."""
        return self.ema


@arguments_by_name
def ema(decay: float, debias: bool = True) -> Optimizer:
    """Pass on the moving average of the updates: `ema = decay * ema + (1 - decay) * updates`.

    Args:
        decay: Share of the average that stays, in [0, 1).
        debias: Divide what is passed on by `1 - decay ** step`: the average starts at zero.

    Returns:
        An elementwise transform; its state is an `EmaState`.

    Raises:
        ConfigError: `decay` is out of its range.

    Examples:
        >>> opt = ema(0.5)
        >>> updates, state = opt.update([torch.tensor([4.0])], opt.init([torch.ones(1)]))
        >>> updates, state.ema
        ([tensor([4.])], [tensor([2.])])

    References:
        optax.ema. Of the parameters themselves an average is a tree of its own, beside them:
        `average = fzero.tree_map(lambda a, p: decay * a + (1 - decay) * p, average, params)`.
    """
    check.fraction("ema", decay=decay)

    @makes_normal
    def init(params: Params) -> EmaState:
        counts = None if debias else NEVER
        return EmaState(zero_step(params), zeros_like(params), counts)

    def update(
        grads: PyTree, state: EmaState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, EmaState]:
        check.state("ema", state, EmaState)
        leaves, spec = tree.flatten(grads)
        step, counts, own = increased(spec, state)
        unbias = [(1.0 - decay ** t.double()).reciprocal() for t in counts or [step]]

        def kernel(means: list[Tensor], grads: list[Tensor], *each: list[Tensor]) -> Any:
            means = list(torch._foreach_lerp(means, cast_like(grads, means), 1.0 - decay))
            # not the average itself: a state is never somebody's update, too
            if not debias:
                return [x.clone() for x in means], means
            factors = each[0] if each else unbias
            return scaled_each(means, factors), means

        means = leaves_like(spec, state.ema, "the optimizer's state")
        numbers = [unbias] if counts else []
        updates, new = by_group(kernel, means, leaves, outputs=2, numbers=numbers)
        return tree.unflatten(spec, updates), EmaState(step, tree.unflatten(spec, new), own)

    return Optimizer(init, update, in_place(update))
