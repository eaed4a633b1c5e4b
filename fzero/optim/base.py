"""What the library asks of objects that users hand in.

An optimizer is a pair of pure functions, as in optax, and optionally a third one that does the
same work in place. All trees hold plain local tensors: this rank's shards, of any shape, empty
ones included; `None` is an empty subtree (a frozen leaf).
"""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from fzero.errors import ConfigError, TraceError

PyTree = Any
Params = PyTree
Schedule = Callable[[Tensor], Tensor]
"""0-d step in (0 at the first call), 0-d value out; without `.item()`, so that it stages out."""

GlobalNorm = Callable[[PyTree], Tensor]
"""The 2-norm of a whole tree as a 0-d tensor. Over shards it has to sum over ranks."""


class InitFn(Protocol):
    """`params -> state`."""

    def __call__(self, params: Params, /) -> PyTree: ...


class UpdateFn(Protocol):
    """`(grads, state, params) -> (updates, state)`, pure."""

    def __call__(
        self,
        grads: PyTree,
        state: PyTree,
        params: Params | None = None,
        *,
        global_norm: GlobalNorm = ...,
    ) -> tuple[PyTree, PyTree]: ...


class ApplyFn(Protocol):
    """`(grads, state, params) -> state`, in place."""

    def __call__(
        self, grads: PyTree, state: PyTree, params: Params, *, global_norm: GlobalNorm = ...
    ) -> PyTree: ...


RatesFn = Callable[[PyTree], Sequence[float | Tensor]]
"""`state -> learning rates` of the next update."""


def _unknown(state: PyTree) -> Sequence[float | Tensor]:
    return ()


Rate = float | Tensor | Schedule
"""A learning rate: a number, a 0-d tensor, or a schedule."""


def rate_at(lr: Rate, step: Tensor) -> float | Tensor:
    """The learning rate of the update after `step` others.

    >>> import torch
    >>> rate_at(0.1, torch.tensor(3.0)), rate_at(lambda step: step / 2, torch.tensor(3.0))
    (0.1, tensor(1.5000))

    Raises:
        ConfigError: a schedule gives something else than a number or a 0-d tensor.
        TraceError: a schedule reads the value of the step while the update is staged out.
    """
    return lr if isinstance(lr, Tensor) or not callable(lr) else value_at(lr, step)


def value_at(schedule: Schedule, step: Tensor) -> float | Tensor:
    """What a schedule gives for the update after `step` others; errors are those of `rate_at`."""
    name = getattr(schedule, "__qualname__", type(schedule).__name__)
    try:
        value: Any = schedule(step)
    except DataDependentOutputException as error:
        raise TraceError(
            f"the schedule {name} reads the value of its "
            "step (an `if` on it, float(), a function of math). An update is staged out once for "
            "all steps, and there the step is a tensor without a value. Compute with torch "
            "(torch.where, torch.cos), use a schedule of fzero.optim (join puts several one after "
            "another), or make the rate a tensor that you set between steps: "
            "fzero.optim.inject_hyperparams(fzero.optim.adamw)(lr=3e-4)."
        ) from error
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        return cast(float, value)
    kind = type(value).__name__
    if isinstance(value, Tensor):
        kind = f"tensor of shape {tuple(value.shape)}"
    raise ConfigError(
        f"the schedule {name} gave a {kind} for the step, and must give a number or a 0-d tensor, "
        "the value for all leaves (x.squeeze() of one element). Other values for other leaves are "
        "fzero.optim.multi_transform's."
    )


def rate_by_step(lr: Rate) -> RatesFn:
    """The learning rate of an optimizer whose state counts its steps."""
    return lambda state: [rate_at(lr, state.step)]


class Optimizer(NamedTuple):
    """An optimizer, or a part of one, as functions of pytrees.

    Attributes:
        init: `(params) -> state`. The state is a tree of tensors.
        update: `(grads, state, params=None, *, global_norm) -> (updates, state)`. Pure: no input
            changes, and `params + updates` is the new params.
        apply_: `(grads, state, params, *, global_norm) -> state`. The same step in place: the
            tensors of `params` and `state` are overwritten, and the state that comes back has
            the same tensors. None: `fzero.optim.as_optimizer` makes one out of `update`.
        foreign: True if the functions were written without shards in mind:
            `fzero.optim.as_optimizer` gathers whole leaves for them.
        rates: `(state) -> [learning rate, ...]` of the next update, numbers or 0-d tensors; what
            it doesn't know of it leaves out.

    Examples:
        >>> halve = Optimizer(init=lambda params: (),
        ...                   update=lambda grads, state, params=None, **_: (-grads / 2, state))
        >>> halve.update(4.0, halve.init(1.0))
        (-2.0, ())
    """

    init: InitFn
    update: UpdateFn
    apply_: ApplyFn | None = None
    foreign: bool = False
    rates: RatesFn = _unknown
