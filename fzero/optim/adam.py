"""Adam and AdamW: the moments as a pure transform, and the step through torch's fused kernels."""

# torch.optim is built on torch._foreach_* and torch._fused_*, which have no public names.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import arguments_by_name
from fzero.inference import makes_normal
from fzero.optim import check
from fzero.optim.base import Optimizer, Params, PyTree, Rate, rate_at, rate_by_step
from fzero.optim.counts import counts_of, increased
from fzero.optim.foreach import (
    by_group,
    cast_like,
    leaves_like,
    mixed,
    scale_each_,
    scaled_each,
    zero_step,
    zeros_like,
)
from fzero.optim.inplace import in_place
from fzero.optim.transforms import decay_tree, scale_tree


class AdamState(NamedTuple):
    """The moments.

    Attributes:
        step: Updates so far; 0-d float32.
        mu: Running mean of the gradients, shaped as the params.
        nu: Running mean of their squares, shaped as the params.
        nu_max: The largest `nu` so far, with amsgrad; otherwise None.
        counts: Each leaf's own updates, 0-d float32, shaped as the params, where leaves were left
            out of some; otherwise None, and `step` is that of every leaf.
    """

    step: Tensor
    mu: Params
    nu: Params
    nu_max: Params = None
    counts: Params = None

    @property
    def counted(self) -> Params:
        """A tree with the leaves of the params."""
        return self.mu


@arguments_by_name
def scale_by_adam(
    b1: float | Tensor = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    amsgrad: bool = False,
    bias_correction: bool = True,
) -> Optimizer:
    """Adam's direction: the running mean over the root of the running mean square.

    Args:
        b1: Decay of the mean, in [0, 1); or a 0-d tensor, which may change from step to step.
        b2: Decay of the mean square, in [0, 1).
        eps: Added to the root.
        amsgrad: Divide by the root of the largest mean square so far.
        bias_correction: Divide each mean by the share that gradients have in it by now.

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> opt = scale_by_adam()
        >>> updates, state = opt.update([torch.tensor([4.0])], opt.init([torch.ones(1)]))
        >>> updates
        [tensor([1.])]

    References:
        Kingma and Ba, arXiv:1412.6980, algorithm 1; Reddi et al., arXiv:1904.09237, algorithm 2.
        As in torch, the largest mean square is kept as it is and corrected for its bias when used.
    """
    check.decay_rate("scale_by_adam", b1=b1)
    check.fraction("scale_by_adam", b2=b2)
    check.positive("scale_by_adam", eps=eps)

    @makes_normal
    def init(params: Params) -> AdamState:
        largest = zeros_like(params) if amsgrad else None
        return AdamState(zero_step(params), zeros_like(params), zeros_like(params), largest)

    def update(
        grads: PyTree, state: AdamState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, AdamState]:
        check.state("adam", state, AdamState)
        leaves, spec = tree.flatten(grads)
        step, counts, own = increased(spec, state)

        def kernel(
            mu: list[Tensor], nu: list[Tensor], *rest: list[Tensor]
        ) -> tuple[list[Tensor], ...]:
            *before, grads = rest[:kinds]
            steps = rest[kinds] if counts else [step]
            grads = cast_like(grads, mu)
            mu = mixed(mu, grads, b1)
            nu = list(torch._foreach_mul(nu, b2))
            torch._foreach_addcmul_(nu, grads, grads, 1.0 - b2)
            largest = [list(torch._foreach_maximum(old, nu)) for old in before]
            # not written over: a root's derivative reads the root, as it is by then
            roots = torch._foreach_sqrt(largest[0] if largest else nu)
            if bias_correction:
                roots = scaled_each(roots, [_share(b2, t).rsqrt() for t in steps])
                torch._foreach_add_(roots, eps)
            else:
                roots = torch._foreach_add(roots, eps)
            updates = list(torch._foreach_div(mu, roots))
            if bias_correction:
                scale_each_(updates, [1.0 / _share(b1, t) for t in steps])
            return updates, mu, nu, *largest

        moments = _moments(spec, state)
        kinds = len(moments) - 1
        numbers = [counts] if counts else []
        columns = by_group(kernel, *moments, leaves, outputs=1 + len(moments), numbers=numbers)
        updates, *new = (tree.unflatten(spec, column) for column in columns)
        return updates, AdamState(step, *new)._replace(counts=own)

    return Optimizer(init, update, in_place(update))


@arguments_by_name
def adam(
    lr: Rate,
    b1: float | Tensor = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.0,
    amsgrad: bool = False,
) -> Optimizer:
    """Adam; with `weight_decay` on the gradients `grads + weight_decay * params`, as torch's.

    That is L2 regularisation, whose strength the division by the mean square undoes in part:
    `adamw` decays the params themselves.

    Args:
        lr: A number, or a schedule of the step.
        b1: Decay of the mean, in [0, 1); or a 0-d tensor, which may change from step to step, at
            the price of the fused kernel.
        b2: Decay of the mean square, in [0, 1).
        eps: Added to the root of the mean square.
        weight_decay: L2 regularisation.
        amsgrad: Divide by the root of the largest mean square so far.

    Returns:
        An elementwise optimizer; its state is an `AdamState`.

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> opt = adam(1e-3)
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
        >>> updates
        {'w': tensor([-0.0010, -0.0010])}

    References:
        Kingma and Ba, arXiv:1412.6980, algorithm 1.
    """
    return _adam("adam", lr, b1, b2, eps, weight_decay, amsgrad, decoupled=False)


@arguments_by_name
def adamw(
    lr: Rate,
    b1: float | Tensor = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.01,
    amsgrad: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay: `params -= lr * (adam(grads) + weight_decay * params)`.

    The same numbers as `chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay),
    scale_by_learning_rate(lr))`, in one kernel. To spare some leaves the decay, write that chain
    with `masked(add_decayed_weights(weight_decay), mask)`.

    Args:
        lr: A number, or a schedule of the step.
        b1: Decay of the mean, in [0, 1); or a 0-d tensor, which may change from step to step, at
            the price of the fused kernel.
        b2: Decay of the mean square, in [0, 1).
        eps: Added to the root of the mean square.
        weight_decay: Share of the params that goes per unit of learning rate.
        amsgrad: Divide by the root of the largest mean square so far.

    Returns:
        An elementwise optimizer; its state is an `AdamState`.

    Raises:
        ConfigError: A value out of its range.

    Examples:
        >>> opt = adamw(1e-3, weight_decay=0.1)
        >>> params = {"w": torch.ones(2)}
        >>> state = opt.apply_({"w": torch.ones(2)}, opt.init(params), params)
        >>> params["w"], state.step
        (tensor([0.9989, 0.9989]), tensor(1.))

    References:
        Loshchilov and Hutter, arXiv:1711.05101, algorithm 2. Unlike the paper, and as in torch,
        the decay is multiplied by the learning rate.
    """
    return _adam("adamw", lr, b1, b2, eps, weight_decay, amsgrad, decoupled=True)


def _adam(
    name: str,
    lr: Rate,
    b1: float | Tensor,
    b2: float,
    eps: float,
    weight_decay: float | Tensor,
    amsgrad: bool,
    *,
    decoupled: bool,
) -> Optimizer:
    check.learning_rate(name, lr)
    check.decay_rate(name, b1=b1)
    check.fraction(name, b2=b2)
    check.positive(name, eps=eps)
    check.decay(name, weight_decay)
    moments = scale_by_adam(b1, b2, eps, amsgrad)

    def update(
        grads: PyTree, state: AdamState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, AdamState]:
        check.state(name, state, AdamState)
        rate = rate_at(lr, state.step)
        if not decoupled:
            grads = decay_tree(grads, params, weight_decay, name)
        directions, state = moments.update(grads, state)
        if decoupled:
            directions = decay_tree(directions, params, weight_decay, name)
        return scale_tree(directions, -rate), state

    # which the kernels would have to read
    if isinstance(weight_decay, Tensor) or isinstance(b1, Tensor):
        return Optimizer(moments.init, update, in_place(update), rates=rate_by_step(lr))
    fixed: float = weight_decay
    fused = torch._fused_adamw_ if fixed and decoupled else torch._fused_adam_

    @torch.no_grad()
    def apply_(grads: PyTree, state: AdamState, params: Params, **_: Any) -> AdamState:
        check.state(name, state, AdamState)
        rate = rate_at(lr, state.step)
        leaves, spec = tree.flatten(grads)
        columns = (leaves_like(spec, params, "params"), leaves, *_moments(spec, state))
        counts = counts_of(spec, state)
        # After the schedule, whose first step is 0 (the kernels' is 1), and after what can raise.
        state.step.add_(1)
        if counts:
            torch._foreach_add_(counts, 1)

        def kernel(
            params: list[Tensor], grads: list[Tensor], mu: Any, nu: Any, *rest: list[Tensor]
        ) -> None:
            largest = rest[0] if amsgrad else []
            device = params[0].device
            # Where every leaf has the same age, one step serves all; the kernel only reads it.
            steps = [t.to(device) for t in (rest[-1] if counts else [state.step])]
            steps = steps if counts else steps * len(params)
            grads = [grad.contiguous() for grad in cast_like(grads, params)]
            with (
                _contiguous(params) as params,
                _contiguous(mu) as mu,
                _contiguous(nu) as nu,
                _contiguous(largest) as largest,
            ):
                fused(
                    params,
                    grads,
                    mu,
                    nu,
                    largest,
                    steps,
                    lr=_kernel_rate(rate, device),
                    beta1=b1,
                    beta2=b2,
                    weight_decay=fixed,
                    eps=eps,
                    amsgrad=amsgrad,
                    maximize=False,
                )

        by_group(kernel, *columns, numbers=[counts] if counts else [])
        return state

    return Optimizer(moments.init, update, apply_, rates=rate_by_step(lr))


def _moments(spec: tree.Spec, state: AdamState) -> tuple[list[Tensor], ...]:
    trees = (state.mu, state.nu, *([] if state.nu_max is None else [state.nu_max]))
    return tuple(leaves_like(spec, moments, "the optimizer's state") for moments in trees)


def _share(b: float | Tensor, step: Tensor) -> Tensor:
    """The share of a mean that gradients have by now."""
    # In float64: at the first steps 1 - b2**t has lost four of float32's seven digits.
    return 1.0 - b ** step.double()


def _kernel_rate(rate: float | Tensor, device: torch.device) -> Any:
    """The learning rate as the fused kernels read it: on GPUs through a float32 pointer."""
    if not isinstance(rate, Tensor):
        return rate
    return rate.to(device) if device.type == "cpu" else rate.to(device, torch.float32)


@contextmanager
def _contiguous(leaves: list[Tensor]) -> Iterator[list[Tensor]]:
    """The leaves, or row-major copies that are written back: the fused kernels ignore strides."""
    dense = [leaf if leaf.is_contiguous() else leaf.contiguous() for leaf in leaves]
    yield dense
    for leaf, written in zip(leaves, dense, strict=True):
        if leaf is not written:
            leaf.copy_(written)
