"""Values, gradients and optimizer states of single parameters, in full or this rank's part.

Of a frozen parameter there is nothing to get: None, as DeepSpeed has it.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.compat.deepspeed.owners import owned
from fzero.distributed.dtensor import from_local_like, local_tensor, shard_like, whole_tensor
from fzero.engine import Engine
from fzero.errors import ShardError

# DeepSpeed's keys are torch's; ours are fields of a state.
_FIELDS = {
    "exp_avg": ("mu",),
    "exp_avg_sq": ("nu",),
    "max_exp_avg_sq": ("nu_max",),
    "momentum_buffer": ("trace", "mu"),
}


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The value in full, in float32; every rank must call it."""
    if not param.requires_grad:
        return None
    engine, name = owned(param, "safe_get_full_fp32_param")
    return engine.full_param(name).float()


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Write the value, and its master; every rank must call it, with the same value."""
    engine, name = owned(param, "safe_set_full_fp32_param")
    full = value.detach().reshape(param.shape).float()
    engine.load_state_dict({name: full}, strict=False)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The mean gradient so far, in full, unscaled, in float32; every rank must call it."""
    engine, name = owned(param, "safe_get_full_grad")
    grad = engine.full_grad(name)
    return None if grad is None else grad.float()


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Write the gradient that the next step takes; every rank must call it, with the same value."""
    engine, name = owned(param, "safe_set_full_grad")
    engine.set_full_grad(name, value.detach().reshape(param.shape))


def safe_update_full_grad_vectorized(
    param_list: Sequence[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Write `update_func(gradient, parameter)` for each that has a gradient; all ranks call it."""
    for param in param_list:
        if (grad := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A state of the optimizer in full, by torch's key: "exp_avg"; every rank must call it."""
    if not param.requires_grad:
        return None
    engine, name = owned(param, "safe_get_full_optimizer_state")
    x = _state(engine, name, optim_state_key)
    return whole_tensor(x).detach().clone().float()


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Write a state of the optimizer; every rank must call it, with the same value."""
    engine, name = owned(param, "safe_set_full_optimizer_state")
    _write(_state(engine, name, optim_state_key), value.detach().reshape(param.shape))


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's part of the value: of the master where there is one, else of the parameter."""
    if not param.requires_grad:
        return None
    return local_tensor(_value(param, "safe_get_local_fp32_param")).detach().clone().float()


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Write this rank's part of the value; every rank must call it, as it is gathered once."""
    engine, name = owned(param, "safe_set_local_fp32_param")
    x = _value(param, "safe_set_local_fp32_param")
    if not isinstance(x, DTensor):
        safe_set_full_fp32_param(param, value)
        return
    # through the full value, so that parameter and master get the same
    part = value.detach().reshape(local_tensor(x).shape).to(x.dtype)
    full = whole_tensor(from_local_like(part, x))
    engine.load_state_dict({name: full}, strict=False)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of the mean gradient; every rank must call it."""
    engine, name = owned(param, "safe_get_local_grad")
    grad = engine.local_grad(name)
    return None if grad is None else grad.float()


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Write this rank's part of the gradient; every rank must call it."""
    engine, name = owned(param, "safe_set_local_grad")
    engine.set_local_grad(name, value.detach())


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's part of a state of the optimizer."""
    if not param.requires_grad:
        return None
    engine, name = owned(param, "safe_get_local_optimizer_state")
    return local_tensor(_state(engine, name, optim_state_key)).detach().clone().float()


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's part of a state of the optimizer."""
    engine, name = owned(param, "safe_set_local_optimizer_state")
    x = local_tensor(_state(engine, name, optim_state_key))
    with torch.no_grad():
        x.copy_(value.reshape(x.shape))


def _value(param: Tensor, asked: str) -> Tensor:
    engine, name = owned(param, asked)
    params, state = engine.state
    master = None if state.master is None else state.master.get(name)
    return params[name] if master is None else master


def _state(engine: Engine, name: str, key: str) -> Tensor:
    """The state of one parameter, under torch's key."""
    inner = engine.state[1].inner
    paths: Sequence[str] = tree.paths(inner)
    for field in _FIELDS.get(key, (key,)):
        ends = re.compile(rf"\.{re.escape(field)}{re.escape(f'[{name!r}]')}$")
        for path, x in zip(paths, tree.leaves(inner), strict=True):
            if ends.search(path) and isinstance(x, Tensor):
                return x
    of_it = re.compile(rf"\.(\w+){re.escape(f'[{name!r}]')}$")
    found = sorted({match[1] for match in map(of_it.search, paths) if match})
    there = f"{', '.join(found)}, and torch's {', '.join(_FIELDS)} mean those" if found else "none"
    raise ShardError(f"the optimizer has no state {key!r} of {name!r}; it has {there}.")


@torch.no_grad()
def _write(x: Tensor, value: Tensor) -> None:
    """Copy a full value into a tensor that may be sharded."""
    local_tensor(x).copy_(local_tensor(shard_like(value.to(x.dtype), x)))
