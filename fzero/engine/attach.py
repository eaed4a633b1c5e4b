"""How an engine is made of a module: checks, what travels together, its parameters."""

import glob
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fzero.config import Config
from fzero.distributed.agree import agree
from fzero.distributed.journal import Journal
from fzero.distributed.mesh import is_simulated, resolve_mesh
from fzero.distributed.transport import Transport
from fzero.eager.lazy import LazyParameter
from fzero.eager.owned import (
    Holder,
    OwnedParameter,
    Owner,
    become_former,
    has_owner,
    keep_hooks,
    leave_accumulate_hooks,
    own,
    set_raw_grad,
)
from fzero.eager.units import Units
from fzero.engine.autograd import AccumulateHooks
from fzero.engine.grouping import Grouping
from fzero.engine.outputs import tensors_in
from fzero.errors import ConfigError, ShardError
from fzero.functional.memory import why_unwritable
from fzero.functional.plain import check_plain, foreign_accumulate_hooks
from fzero.functional.slots import ParameterSlots
from fzero.inference import counts_versions
from fzero.layout import LeafLayout
from fzero.optim.base import Optimizer

WITHOUT = Optimizer(
    init=lambda params: (),
    update=lambda grads, state, params=None, **_: (grads, state),
    apply_=lambda grads, state, params, **_: state,
)
"""What an engine without an optimizer is made with; `step()` refuses."""


def install(
    slots: ParameterSlots,
    params: dict[str, nn.Parameter],
    leaves: Sequence[LeafLayout],
    locals_: Sequence[Tensor],
    units: Units | None,
    hooks: AccumulateHooks,
    holder: "weakref.ref[Holder]",
) -> dict[int, Tensor]:
    """Make the module's parameters an engine's, in place.

    Args:
        slots: where they sit.
        params: by name.
        leaves: how each is split.
        locals_: this rank's tensors of the parameters, by index.
        units: what gathers them; None if they are always there.
        hooks: what hears that a parameter has got a gradient.
        holder: of their gradients.

    Returns:
        The parameters by index.
    """
    indices = {leaf.name: index for index, leaf in enumerate(leaves)}
    new: dict[str, Tensor] = {}
    for name, param in params.items():
        index = indices[name]
        trainable = leaves[index].trainable
        set_raw_grad(param, None)
        leave_accumulate_hooks(param)  # of an engine that is gone; others are refused
        if units is not None:
            new[name] = now = LazyParameter(units, index, None, trainable)
            keep_hooks(param, now)
            become_former(param, now)
        else:
            new[name] = now = param
            param.data = locals_[index]
            param.requires_grad_(trainable)
            # others are of an engine that is gone, or stand for plain ones in a simulation
            if type(param) is nn.Parameter:
                param.__class__ = OwnedParameter
        own(now, Owner(holder, index, name))
        # who still holds the former parameter asks the same engine for its gradient
        own(param, Owner(holder, index, name))
        if trainable:
            hooks.put_on(now)
    slots.install(new)
    return {indices[name]: x for name, x in new.items()}


def parameters_of(model: Any) -> tuple[ParameterSlots, dict[str, nn.Parameter]]:
    """The module's parameters, each once, and where they sit.

    Raises:
        ConfigError: it is no module.
        ShardError: a parameter has no values, or has an engine; it is no plain tensor, or one of
            `torch.inference_mode()`; it has a hook that would find no gradient.
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
        if isinstance(param, LazyParameter) or has_owner(param):
            way = _OF_ANOTHER if has_owner(param) else _OF_ONE_GONE
            raise ShardError(f"the parameter {name!r} {way}")
        check_plain(name, param)
        if not counts_versions(param):
            raise ShardError(
                f"the parameter {name!r} was made under torch.inference_mode(), outside of which "
                "torch can't train it, or write over it. Build the module outside of it, or take "
                "copy.deepcopy(module) there, which has normal parameters."
            )
        if foreign_accumulate_hooks(param):
            raise ShardError(
                f"the parameter {name!r} has a hook of register_post_accumulate_grad_hook. An "
                "engine takes gradients over as they come, so the hook would find none in "
                "param.grad. Remove it before the engine is made; to change gradients use "
                "parameter.register_hook, to clip Config(clip_norm=...)."
            )
        if param.device.type == "meta":
            raise ShardError(
                f"the parameter {name!r} is on the meta device and has no values. Pass the "
                "function that builds the module, fzero.Engine(lambda: Model(), opt, cfg), without "
                "torch.device('meta') around it: then no rank ever holds the whole model."
            )
    return slots, params


_OF_ANOTHER = (
    "belongs to another engine already, trained or frozen. A parameter has one engine; make it of "
    "the module that holds all of them. engine.release() of the other, on every rank, gives the "
    "module back for a new one. What is frozen in several modules can be kept out of them (a copy, "
    "or an argument of forward)."
)
_OF_ONE_GONE = (
    "is still split over ranks by an engine that is gone: its masters and optimizer state went "
    "with it. Call engine.release() on every rank before an engine is dropped: it gives the module "
    "back. Now build the module anew, and load a checkpoint, or what can be read here: on every "
    "rank new.load_state_dict(old.state_dict())."
)


def frozen_too(cfg: Config, params: dict[str, nn.Parameter]) -> Config:
    """`cfg` with the names of what is frozen, by it or by `requires_grad=False`."""
    cfg.check_frozen(list(params))
    frozen = [n for n, p in params.items() if not p.requires_grad or cfg.is_frozen(n)]
    # the config takes globs, and a name may hold what a glob takes for a pattern
    return cfg.replace(frozen=tuple(glob.escape(name) for name in frozen))


@torch.no_grad()
def take_the_first_ranks(model: nn.Module, cfg: Config) -> None:
    """Overwrite parameters and buffers by those of the mesh's first rank.

    Raises:
        RankMismatchError: ranks have tensors of other names, shapes or dtypes.
        ShardError: one can't be written over.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, x in tensors:
        if why := why_unwritable(x):
            raise ShardError(
                f"Engine(broadcast=True) writes the first rank's values over {name!r}, which "
                f"{why}. Give it normal memory of its own, outside of torch.inference_mode(): "
                ".clone()."
            )
    mesh = resolve_mesh(cfg.mesh, tensors[0][1].device.type)
    if mesh.world_size == 1 or is_simulated(mesh):
        return
    items = [(name, f"{x.dtype} {tuple(x.shape)}") for name, x in tensors]
    agree("the module", items, mesh, cfg.timeout, "Build the same module on every rank.")
    transport = Transport(mesh, mesh.axes, Journal(mesh, active=False, limit=cfg.timeout))
    for _, x in tensors:
        x.copy_(transport.chosen(x, mine=mesh.rank == 0))


def gather_around(module: nn.Module, units: Units, grouping: Grouping) -> list[RemovableHandle]:
    """Have the modules around those that only some ranks may run gather them.

    Args:
        module: the whole model.
        units: what gathers.
        grouping: its last units are the special modules.
    """
    around: dict[str, list[int]] = {}
    first = len(grouping.units) - len(grouping.special)
    for unit, name in enumerate(grouping.special, first):
        around.setdefault(_caller_of(module, name), []).append(unit)
    handles: list[RemovableHandle] = []
    for name, wanted in around.items():
        handles += _hook(module.get_submodule(name), name, units, wanted)
    return handles


def _hook(
    caller: nn.Module, name: str, units: Units, wanted: Sequence[int]
) -> list[RemovableHandle]:
    def before(module: nn.Module, args: Any) -> None:
        units.pin(name, wanted)

    def after(module: nn.Module, args: Any, out: Any) -> None:
        units.unpin(name)
        if torch.is_grad_enabled():
            for x in tensors_in(out):
                if x.grad_fn is not None:
                    # backward comes to the special modules from here; a pin elsewhere, or a
                    # reshard, lets go of them
                    x.register_hook(lambda grad: units.pin(name, wanted))

    return [
        caller.register_forward_pre_hook(before),
        # after an exception, too: what is pinned would stay
        caller.register_forward_hook(after, always_call=True),
    ]


def _caller_of(module: nn.Module, name: str) -> str:
    """The nearest module around `name` that has a forward of its own: no list of modules."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        around = ".".join(parts[:depth])
        # what a class without a forward inherits
        if type(module.get_submodule(around)).forward is not nn.Module.forward:
            return around
    return ""
