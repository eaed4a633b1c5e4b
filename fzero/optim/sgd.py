"""Gradient descent with momentum, bit for bit that of `torch.optim.SGD`."""

# torch.optim is built on torch._foreach_* and torch._fused_*, which have no public names.
# pyright: reportPrivateImportUsage=false

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import ConfigError, arguments_by_name
from fzero.inference import makes_normal
from fzero.optim import check
from fzero.optim.base import Optimizer, Params, PyTree, Rate, rate_at, rate_by_step
from fzero.optim.counts import NEVER, counts_of, increased
from fzero.optim.foreach import (
    Leaves,
    by_group,
    cast_like,
    leaves_like,
    scaled,
    scaled_each,
    subtract_,
    temporary_bytes,
    zero_step,
    zeros_like,
)
from fzero.optim.inplace import in_place
from fzero.optim.transforms import decay_tree, scale_tree


class TraceState(NamedTuple):
    """Momentum.

    Attributes:
        step: Updates so far; 0-d float32.
        trace: The decayed sum of gradients, shaped as the params; None without momentum.
        counts: Each leaf's own updates: see `AdamState`; without dampening there are none.
    """

    step: Tensor
    trace: Params
    counts: Params = NEVER

    @property
    def counted(self) -> Params:
        """A tree with the leaves of the params."""
        return self.trace


@arguments_by_name
def trace(decay: float | Tensor, nesterov: bool = False, dampening: float = 0.0) -> Optimizer:
    """Momentum: `trace = decay * trace + (1 - dampening) * grads`, and the trace is the update.

    The first gradient of each leaf enters undamped. With `nesterov` the update is
    `grads + decay * trace`. Without it, updates and the new state share their tensors.

    Args:
        decay: How much of the trace stays; at least 0. Or a 0-d tensor, which may change from step
            to step.
        nesterov: Look one step ahead.
        dampening: Share of each gradient that is left out.

    Raises:
        ConfigError: A negative or infinite number, or `nesterov` with dampening or no decay.

    Examples:
        >>> opt = trace(0.9)
        >>> updates, state = opt.update([torch.ones(1)], opt.init([torch.ones(1)]))
        >>> opt.update([torch.ones(1)], state)[0]
        [tensor([1.9000])]

    References:
        Sutskever et al., "On the importance of initialization and momentum in deep learning",
        ICML 2013. Unlike the paper, the learning rate stays outside the trace, as in torch.
    """
    check.momentum("trace", decay=decay)
    check.non_negative("trace", dampening=dampening)
    _check_nesterov("trace", nesterov, "decay", decay, dampening)

    @makes_normal
    def init(params: Params) -> TraceState:
        return TraceState(zero_step(params), zeros_like(params), None if dampening else NEVER)

    def update(
        grads: PyTree, state: TraceState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, TraceState]:
        leaves, spec = tree.flatten(grads)
        before = counts_of(spec, state)
        undamped = _undamped(before or [state.step], dampening)
        step, _counts, own = increased(spec, state)

        def kernel(
            traces: list[Tensor], grads: list[Tensor], *each: list[Tensor]
        ) -> tuple[list[Tensor], list[Tensor]]:
            grads = cast_like(grads, traces)
            new = scaled(traces, decay)
            _accumulate_(new, grads, each[0] if each else undamped)
            ahead = _ahead(grads, new, decay) if nesterov else new
            return list(ahead), new

        traces = leaves_like(spec, state.trace, "the optimizer's state")
        numbers = [undamped] if before else []
        updates, new = by_group(kernel, traces, leaves, outputs=2, numbers=numbers)
        return tree.unflatten(spec, updates), TraceState(step, tree.unflatten(spec, new), own)

    return Optimizer(init, update, in_place(update))


@arguments_by_name
def sgd(
    lr: Rate,
    momentum: float | Tensor = 0.0,
    nesterov: bool = False,
    weight_decay: float | Tensor = 0.0,
    dampening: float = 0.0,
) -> Optimizer:
    """Stochastic gradient descent: `params -= lr * momentum(grads + weight_decay * params)`.

    Args:
        lr: A number, or a schedule of the step.
        momentum: Decay of the trace; 0 keeps no trace. Or a 0-d tensor, which may change from step
            to step.
        nesterov: Nesterov's momentum.
        weight_decay: L2 regularisation.
        dampening: Share of each gradient but the first that the trace leaves out.

    Returns:
        An elementwise optimizer; its state is a `TraceState`.

    Raises:
        ConfigError: A negative or infinite number, or `nesterov` without momentum or with
            dampening.

    Examples:
        >>> opt = sgd(0.1, momentum=0.9)
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
        >>> updates
        {'w': tensor([-0.1000, -0.1000])}

    References:
        Sutskever et al., ICML 2013; see `trace`.
    """
    check.learning_rate("sgd", lr)
    check.momentum("sgd", momentum=momentum)
    check.non_negative("sgd", dampening=dampening)
    check.decay("sgd", weight_decay)
    _check_nesterov("sgd", nesterov, "momentum", momentum, dampening)
    accumulate = trace(momentum, nesterov, dampening)
    moving = isinstance(momentum, Tensor) or momentum != 0

    @makes_normal
    def init(params: Params) -> TraceState:
        if moving:
            return accumulate.init(params)
        return TraceState(zero_step(params), None)

    def update(
        grads: PyTree, state: TraceState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, TraceState]:
        check.state("sgd", state, TraceState)
        rate = rate_at(lr, state.step)
        grads = decay_tree(grads, params, weight_decay, "sgd")
        if moving:
            directions, state = accumulate.update(grads, state)
        else:
            directions, state = grads, TraceState(state.step + 1, None)
        return scale_tree(directions, -rate), state

    # which the kernels would have to read
    if isinstance(weight_decay, Tensor) or isinstance(momentum, Tensor):
        return Optimizer(init, update, in_place(update), rates=rate_by_step(lr))
    fixed, decay = weight_decay, momentum

    @torch.no_grad()
    def apply_(grads: PyTree, state: TraceState, params: Params, **_: Any) -> TraceState:
        check.state("sgd", state, TraceState)
        rate = rate_at(lr, state.step)
        leaves, spec = tree.flatten(grads)
        counts = counts_of(spec, state)
        undamped = _undamped(counts or [state.step], dampening)

        def kernel(params: list[Tensor], grads: list[Tensor], *rest: list[Tensor]) -> None:
            momenta, shares = rest[: bool(decay)], rest[-1] if counts else undamped
            directions = cast_like(grads, params)
            if fixed:
                directions = torch._foreach_add(directions, params, alpha=fixed)
            for traces in momenta:  # one list, or none without momentum
                torch._foreach_mul_(traces, decay)
                _accumulate_(traces, directions, shares)
                if not nesterov:
                    directions = traces
                elif fixed:  # the directions are a temporary already
                    torch._foreach_add_(directions, traces, alpha=decay)
                else:
                    directions = torch._foreach_add(directions, traces, alpha=decay)
            subtract_(params, directions, rate)

        columns = [leaves_like(spec, params, "params"), leaves]
        if moving:
            columns.append(leaves_like(spec, state.trace, "the optimizer's state"))
        numbers = [undamped] if counts else []
        by_group(kernel, *columns, max_bytes=temporary_bytes, numbers=numbers)
        state.step.add_(1)
        if counts:
            torch._foreach_add_(counts, 1)
        return state

    return Optimizer(init, update, apply_, rates=rate_by_step(lr))


def _undamped(ages: list[Tensor], dampening: float) -> list[Tensor]:
    # torch starts the trace with the whole first gradient. The trace starts at zero here, so the
    # share has to depend on the step, and on the device: reading the step would wait for it.
    return [1.0 - dampening * (age > 0).double() for age in ages] if dampening else []


def _accumulate_(traces: list[Tensor], grads: Leaves, shares: list[Tensor]) -> None:
    """Add each gradient's share: of its own, the one of all, or all of it."""
    torch._foreach_add_(traces, scaled_each(grads, shares) if shares else grads)


def _ahead(grads: Leaves, traces: list[Tensor], decay: float | Tensor) -> list[Tensor]:
    if isinstance(decay, Tensor):
        return list(torch._foreach_add(grads, scaled(traces, decay)))
    return list(torch._foreach_add(grads, traces, alpha=decay))


def _check_nesterov(
    where: str, nesterov: bool, field: str, momentum: float | Tensor, dampening: float
) -> None:
    unread = isinstance(momentum, Tensor)
    if nesterov and (dampening != 0 or (not unread and momentum == 0)):
        raise ConfigError(
            f"{where}: nesterov=True with {field}={momentum!r} and dampening={dampening!r}, but "
            f"nesterov needs {field} > 0 and dampening = 0."
        )
