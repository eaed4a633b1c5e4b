"""Modules that only some ranks run, gathered where all ranks are.

A gather needs every rank, and a rank that skips a module never reads its parameters. So the units
that `Config.gather_together` names are gathered by the module around them, which all ranks call:
when its forward starts, and again when a gradient reaches its output.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fzero.eager.units import Units
from fzero.engine.outputs import tensors_in


def gather_around(module: nn.Module, units: Units, special: dict[str, int]) -> None:
    """Have the modules around these gather them.

    Args:
        module: the whole model.
        units: what gathers.
        special: the unit of each named module, by its name.
    """
    around: dict[str, list[int]] = {}
    for name, unit in special.items():
        around.setdefault(_caller_of(module, name), []).append(unit)
    for name, wanted in around.items():
        _hook(module.get_submodule(name), name, units, wanted)


def _hook(caller: nn.Module, name: str, units: Units, wanted: Sequence[int]) -> None:
    def before(module: nn.Module, args: Any) -> None:
        units.pin(name, wanted)

    def after(module: nn.Module, args: Any, out: Any) -> None:
        units.unpin(name)
        if torch.is_grad_enabled():
            for x in tensors_in(out):
                if x.grad_fn is not None:
                    x.register_hook(lambda grad: units.pin(name, wanted))

    caller.register_forward_pre_hook(before)
    caller.register_forward_hook(after, always_call=True)


def _caller_of(module: nn.Module, name: str) -> str:
    """The nearest module around `name` that has a forward of its own: no list of modules."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        around = ".".join(parts[:depth])
        # what a class without a forward inherits
        if type(module.get_submodule(around)).forward is not nn.Module.forward:
            return around
    return ""
