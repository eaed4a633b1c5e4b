"""Hyperparameters as tensors of the state: read and set between steps, staged out once."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.errors import ConfigError, arguments_by_name
from fzero.inference import makes_normal
from fzero.optim import check
from fzero.optim.adapt import as_optimizer
from fzero.optim.base import Optimizer, Params, PyTree, Schedule, value_at
from fzero.optim.foreach import zero_step


class InjectState(NamedTuple):
    """Hyperparameters, and the state of the optimizer that has them.

    Attributes:
        step: Updates so far; 0-d float32.
        hyperparams: By name; 0-d float64. Those of the next update, but for schedules: of these the
            last one's.
        inner: The optimizer's own state.
    """

    step: Tensor
    hyperparams: dict[str, Tensor]
    inner: PyTree


MOMENTA = ("momentum", "b1")
"""What a scheduler cycles against the rate: SGD's; Adam's and Lion's."""


@arguments_by_name
def inject_hyperparams(
    factory: Callable[..., Any], *, momentum: bool = False
) -> Callable[..., Optimizer]:
    """An optimizer's factory whose numbers are tensors in the state.

    Of the arguments that are given, all are injected that the factory takes as a 0-d tensor: of
    ours `lr` and `weight_decay`, of your own function what it passes on as such. Numbers that it
    takes as numbers only stay what they are. Schedules are injected, too: they are called with the
    step, and what they gave is shown. A decay or a beta that is a tensor costs Adam its fused
    kernel.

    Set one between steps by writing into it, which costs nothing:
    `opt_state.inner.hyperparams["lr"].fill_(1e-4)`.

    Args:
        factory: Such as `optim.adamw`, or a function that puts an optimizer together.
        momentum: Inject the momentum of ours as well, given or not: `momentum` of `sgd`, `b1` of
            `adam`, `adamw` and `lion`. Schedulers that cycle it (`OneCycleLR`, `CyclicLR`) then
            drive `engine.optimizer`.

    Returns:
        A function of the same arguments, whose optimizer keeps an `InjectState`.

    Raises:
        ConfigError: The factory takes none of its arguments as a tensor, or no momentum.

    Examples:
        >>> from fzero.optim import sgd
        >>> opt = inject_hyperparams(sgd)(lr=0.1, momentum=0.9)
        >>> params = [torch.ones(1)]
        >>> state = opt.init(params)
        >>> state.hyperparams
        {'lr': tensor(0.1000, dtype=torch.float64)}
        >>> _ = state.hyperparams["lr"].fill_(0.5)
        >>> opt.update([torch.ones(1)], state, params)[0]
        [tensor([-0.5000])]

    References:
        optax.inject_hyperparams.
    """

    def make(*args: Any, **kwargs: Any) -> Optimizer:
        try:
            given = inspect.signature(factory).bind(*args, **kwargs)
        except TypeError:
            factory(*args, **kwargs)  # ours say better what they take
            raise
        if momentum:
            _fill_in_momentum(factory, given)
        # what is wrong with a number is told now, not of the tensor that it becomes
        plain = as_optimizer(factory(*args, **kwargs))
        named = {k: v for k, v in given.arguments.items() if _injectable(factory, k)}
        if _is_ours(factory) and not momentum:  # for it costs Adam its kernel
            named = {k: v for k, v in named.items() if k not in MOMENTA}
        schedules: dict[str, Any] = {k: v for k, v in named.items() if callable(v)}
        numbers = {k: v for k, v in named.items() if _is_number(v) and _takes(factory, given, k)}
        if not schedules and not numbers:
            raise ConfigError(
                f"inject_hyperparams: {getattr(factory, '__name__', factory)} takes none of "
                f"{', '.join(named) or 'its arguments'} as a 0-d tensor, so there is nothing to "
                "keep in the state. Of fzero.optim lr and weight_decay are taken."
            )

        def build(values: Mapping[str, Tensor]) -> Optimizer:
            bound = inspect.BoundArguments(given.signature, given.arguments | dict(values))
            return as_optimizer(factory(*bound.args, **bound.kwargs))

        def current(state: InjectState) -> dict[str, Tensor]:
            check.state("inject_hyperparams", state, InjectState)
            for name in numbers:
                x = state.hyperparams.get(name)
                if not isinstance(x, Tensor) or x.dim():
                    raise ConfigError(
                        f"inject_hyperparams: hyperparams[{name!r}] is {x!r}, and must be a 0-d "
                        f"tensor. Write into the one that is there: hyperparams[{name!r}].fill_(x)."
                    )
            now = {name: _value(fn, state.step) for name, fn in schedules.items()}
            return {name: now.get(name, x) for name, x in state.hyperparams.items()}

        @makes_normal
        def init(params: Params) -> InjectState:
            step = zero_step(params)
            values = {
                name: torch.full_like(step, value, dtype=torch.float64)
                for name, value in numbers.items()
            }
            values |= {name: _value(fn, step) for name, fn in schedules.items()}
            # made with tensors: a state may count steps for those that a number needs no count for
            return InjectState(step, values, build(values).init(params))

        def update(
            grads: PyTree, state: InjectState, params: Params | None = None, **options: Any
        ) -> tuple[PyTree, InjectState]:
            values = current(state)
            updates, inner = build(values).update(grads, state.inner, params, **options)
            return updates, InjectState(state.step + 1, values, inner)

        @torch.no_grad()
        def apply_(
            grads: PyTree, state: InjectState, params: Params, **options: Any
        ) -> InjectState:
            values = current(state)
            apply = build(values).apply_
            assert apply is not None  # as_optimizer has filled it in
            inner = apply(grads, state.inner, params, **options)
            for name in schedules:
                state.hyperparams[name].copy_(values[name])
            state.step.add_(1)
            return state._replace(inner=inner)

        def rates(state: InjectState) -> list[Any]:
            return list(build(current(state)).rates(state.inner))

        return Optimizer(init, update, apply_, plain.foreign, rates)

    return make


def injected(state: PyTree) -> Iterator[tuple[str, Tensor]]:
    """The hyperparameters in a state, with where they are.

    Examples:
        >>> from fzero.optim import chain, clip_by_global_norm, sgd
        >>> opt = chain(clip_by_global_norm(1.0), inject_hyperparams(sgd)(lr=0.5))
        >>> dict(injected(opt.init([torch.ones(1)])))
        {"[1].hyperparams['lr']": tensor(0.5000, dtype=torch.float64)}
    """
    if isinstance(state, InjectState):
        yield from ((f".hyperparams[{name!r}]", x) for name, x in state.hyperparams.items())
        parts: Any = [(".inner", state.inner)]
    elif isinstance(state, tuple) and (names := getattr(state, "_fields", None)) is not None:
        parts = ((f".{name}", getattr(state, name)) for name in names)
    elif isinstance(state, (tuple, list)):
        parts = ((f"[{i}]", part) for i, part in enumerate(state))
    elif isinstance(state, dict):
        parts = ((f"[{key!r}]", part) for key, part in state.items())
    else:
        return
    for label, part in parts:
        yield from ((f"{label}{name}", x) for name, x in injected(part))


def _fill_in_momentum(factory: Callable[..., Any], given: inspect.BoundArguments) -> None:
    """Of a momentum that was not given, its default."""
    parameters = given.signature.parameters
    for name in MOMENTA:
        if name in parameters and _is_number(parameters[name].default):
            given.arguments.setdefault(name, parameters[name].default)
    if not any(name in given.arguments and _takes(factory, given, name) for name in MOMENTA):
        raise ConfigError(
            f"inject_hyperparams: {getattr(factory, '__name__', factory)} takes no momentum as a "
            "0-d tensor. Of fzero.optim sgd, adam, adamw and lion do."
        )


def _is_ours(factory: Callable[..., Any]) -> bool:
    return getattr(factory, "__module__", "").startswith(f"{__package__}.")


def _value(schedule: Schedule, step: Tensor) -> Tensor:
    # in memory of its own, whatever the schedule hands out: a step writes over its state
    value = value_at(schedule, step)
    return torch.as_tensor(value, device=step.device).to(torch.float64, copy=True)


def _injectable(factory: Callable[..., Any], name: str) -> bool:
    kind = inspect.signature(factory).parameters[name].kind
    return kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _takes(factory: Callable[..., Any], given: inspect.BoundArguments, name: str) -> bool:
    """Whether the factory makes an optimizer of a 0-d tensor in the place of a number."""
    value = torch.tensor(float(given.arguments[name]), dtype=torch.float64, device="cpu")
    bound = inspect.BoundArguments(given.signature, given.arguments | {name: value})  # pyright: ignore
    try:
        factory(*bound.args, **bound.kwargs)
    except (ConfigError, TypeError, ValueError):
        return False
    return True
