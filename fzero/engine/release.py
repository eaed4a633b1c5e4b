"""Giving a module back: plain parameters in place of an engine's, and no hooks left."""

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from fzero.eager.owned import disown
from fzero.engine import phases
from fzero.engine.driver import Driver
from fzero.engine.parts import Parts
from fzero.errors import BackwardError
from fzero.functional.slots import ParameterSlots


class Former(NamedTuple):
    """A parameter as it was before the engine.

    Args:
        param: the object.
        requires_grad: whether it was to be trained.
        dtype: of its values.
    """

    param: nn.Parameter
    requires_grad: bool
    dtype: torch.dtype


class Released:
    """In place of the parts of an engine that is over."""

    def __getattr__(self, name: str) -> NoReturn:
        raise BackwardError(
            "this engine has released its module, which is plain PyTorch again. Make a new one, "
            "fzero.Engine(model, opt, cfg), to go on; its state can be assigned what the old one's "
            "was."
        )


def release(
    driver: Driver,
    parts: Parts,
    slots: ParameterSlots,
    former: Mapping[str, Former],
) -> None:
    """Put the parameters that the module had into its slots again, with the values of now.

    Args:
        driver, parts: of the engine.
        slots: where the parameters sit.
        former: the parameters that the module had, by name.
    """
    driver.writes.take()
    phases.refuse_inside(driver.state, "release()")
    phases.refuse_in_block(driver.state, "release()")
    full = parts.full_values()  # the last collective: what raises, raises before anything changed
    if driver.units is not None:
        driver.units.reshard()
    if driver.compiled is not None:
        driver.compiled.remove()
    for handle in driver.handles:
        handle.remove()
    for index, now in driver.params.items():
        was = former[driver.reducer.leaves[index].name]
        # what is frozen has no master, and was rounded
        disown(was.param, now, full[index].to(was.dtype))
        was.param.requires_grad_(was.requires_grad)
    slots.install({name: was.param for name, was in former.items()})
