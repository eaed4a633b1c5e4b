"""How an engine is made of a module: checks, the plan of what travels together, the takeover."""

import glob
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.config import Config
from fzero.distributed.batched import plan_buckets
from fzero.distributed.collectives import Axis
from fzero.distributed.mesh import is_gloo
from fzero.eager.units import LazyParameter, Units
from fzero.engine.counts import masks
from fzero.engine.grouping import plan_units
from fzero.errors import ConfigError, ShardError
from fzero.functional.parameter_slots import ParameterSlots
from fzero.layout import LeafLayout
from fzero.optim.base import Optimizer

WITHOUT = Optimizer(
    init=lambda params: (),
    update=lambda grads, state, params=None, **_: (grads, state),
    apply_=lambda grads, state, params, **_: state,
)
"""What an engine without an optimizer is made with; `step()` refuses."""


class Grouping(NamedTuple):
    """Which leaves travel together, by their places.

    Args:
        units: gathered together; empty where parameters are always there.
        special: the modules that only some ranks may run: the last units.
        buckets: reduced together, in the order of reduction.
        masks: the same as bit masks, for the state machine.
    """

    units: list[list[int]]
    special: list[str]
    buckets: list[list[int]]
    masks: tuple[int, ...]


def plan_grouping(
    leaves: Sequence[LeafLayout], registered: Sequence[int], cfg: Config, *, lazy: bool, alone: bool
) -> Grouping:
    """Units, and buckets in the order in which a backward is likely to complete them.

    Args:
        leaves: of all parameters.
        registered: their places in the order of the module.
        cfg: the step's.
        lazy: whether parameters are gathered on use.
        alone: whether there is no other rank.
    """
    limit = int(cfg.bucket_mb * 2**20)
    units, special = [], []
    if lazy:
        units, special = plan_units(leaves, registered, limit, cfg.gather_together)
    return plan_order(Grouping(units, special, [], ()), leaves, registered[::-1], cfg, alone=alone)


def plan_order(
    grouping: Grouping,
    leaves: Sequence[LeafLayout],
    arrivals: Sequence[int],
    cfg: Config,
    *,
    alone: bool = False,
) -> Grouping:
    """The same units with buckets for another order of gradients.

    Args:
        grouping: its buckets don't matter.
        arrivals: places of all leaves as gradients come.
    """
    trained = [place for place in arrivals if leaves[place].trainable]
    units, special = grouping.units, grouping.special
    if alone:
        return grouping._replace(buckets=[], masks=())
    if not units:
        nbytes = [leaf.nbytes for leaf in leaves]
        buckets = plan_buckets(nbytes, trained, int(cfg.bucket_mb * 2**20))
        return grouping._replace(buckets=buckets, masks=masks(buckets))
    turn = {place: i for i, place in enumerate(trained)}
    parts = [[place for place in unit if place in turn] for unit in units]
    common = len(units) - len(special)
    first = sorted(filter(None, parts[:common]), key=lambda unit: max(turn[i] for i in unit))
    last = [unit for unit in parts[common:] if unit]
    # ranks may run parts of the special ones only: they wait for the end, on an extra bit
    bits = masks(first) + tuple(mask | 1 << len(leaves) for mask in masks(last))
    return grouping._replace(buckets=[*first, *last], masks=bits)


def units_ahead(cfg: Config, axis: Axis) -> int:
    """How many units ahead gathers are launched."""
    if cfg.prefetch is not None:
        return cfg.prefetch
    # over gloo a transfer takes the cores that compute, so it would only cost memory
    return 0 if axis.size == 1 or is_gloo(axis.group) else 1


def owned_hook(
    hook: Callable[[Tensor], None], engine: "weakref.ref[Any]"
) -> Callable[[Tensor], None]:
    """`hook`, which tells whose it is: a parameter has one engine."""
    hook.engine = engine  # pyright: ignore[reportFunctionMemberAccess]
    return hook


def install(
    slots: ParameterSlots,
    params: dict[str, nn.Parameter],
    leaves: Sequence[LeafLayout],
    held: Sequence[Tensor],
    units: Units | None,
    taker: Callable[[int], Callable[[Tensor], None]],
) -> dict[int, Tensor]:
    """Make the module's parameters an engine's, in place.

    Args:
        slots: where they sit.
        params: by name.
        leaves: how each is split.
        held: the tensors that are trained, by place.
        units: what gathers them; None if they are always there.
        taker: makes what is called with a parameter that has got a gradient, from its place.

    Returns:
        The parameters by place.
    """
    places = {leaf.name: place for place, leaf in enumerate(leaves)}
    new: dict[str, Tensor] = {}
    for name, param in params.items():
        place = places[name]
        trainable = leaves[place].trainable
        param.grad = None
        if units is not None:
            new[name] = LazyParameter(units, place, None, trainable)
            param.data = param.data.new_empty(0)  # whoever else holds it holds no memory
        else:
            new[name] = param
            param.data = held[place]
            param.requires_grad_(trainable)
        if trainable:
            new[name].register_post_accumulate_grad_hook(taker(place))
    slots.install(new)
    return {places[name]: x for name, x in new.items()}


def parameters_of(model: Any) -> tuple[ParameterSlots, dict[str, nn.Parameter]]:
    """The module's parameters, each once, and where they sit.

    Raises:
        ConfigError: it is no module.
        ShardError: a parameter has no values, or has an engine.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"Engine(model): model is a {type(model).__name__}; it must be a torch.nn.Module. For "
            "a function of parameters use fzero.make_train_step."
        )
    slots = ParameterSlots(model)
    params: Any = slots.tensors()
    if not params:
        raise ShardError(f"{type(model).__name__} has no parameters, so there is nothing to train.")
    for name, param in params.items():
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        owners = [hook.engine for hook in hooks.values() if hasattr(hook, "engine")]
        if isinstance(param, LazyParameter) or any(owner() is not None for owner in owners):
            raise ShardError(
                f"the parameter {name!r} belongs to another engine already. A parameter has one "
                "engine; make it of the module that holds all of them."
            )
        if param.device.type == "meta":
            raise ShardError(
                f"the parameter {name!r} is on the meta device and has no values. Build the module "
                "on a real device, or use make_train_step(...).init with a function that builds "
                "the parameters: then no rank ever holds the whole model."
            )
    return slots, params


def frozen_too(cfg: Config, params: dict[str, nn.Parameter]) -> Config:
    """`cfg` with the names of what is frozen, by it or by `requires_grad=False`."""
    frozen = [n for n, p in params.items() if not p.requires_grad or cfg.is_frozen(n)]
    return cfg.replace(frozen=tuple(glob.escape(name) for name in frozen))


def factors(
    world: int, cfg: Config, reduction: str, predivide: float | None
) -> tuple[float, float]:
    """Factors on gradients before and after they are added up, which make the mean or the sum."""
    if reduction not in ("mean", "sum"):
        raise ConfigError(
            f"Engine(gradient_reduction={reduction!r}): must be 'mean' or 'sum' (over ranks)."
        )
    if predivide is not None and not predivide > 0:
        raise ConfigError(f"Engine(gradient_predivide={predivide!r}): must be None or > 0.")
    share = 1 / cfg.accum_steps / (world if reduction == "mean" else 1)
    if predivide is None:
        low = cfg.dtypes.reduce or cfg.dtypes.param or torch.float32
        predivide = 1.0
        while low.itemsize == 2 and world % predivide == 0 and world / predivide > predivide:
            predivide *= 2
    return 1 / predivide, share * predivide
