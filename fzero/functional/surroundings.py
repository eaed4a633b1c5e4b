"""Where a whole step can't be called: inside of what would change its meaning without a word."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fzero.errors import TraceError
from fzero.functional.transforms import in_transform


def refuse_transforms(what: str) -> None:
    """Raise if a step is called inside of a transform of `torch.func`.

    A step writes over its state, and its collectives and fused kernels have neither a derivative
    nor a rule for batches: inside of a transform its numbers would be wrong, where they came.

    Args:
        what: was called, as messages name it.

    Raises:
        TraceError: it is.

    Examples:
        >>> refuse_transforms("step_fn")
        >>> torch.func.vmap(lambda x: refuse_transforms("step_fn") or x)(torch.ones(2))
        Traceback (most recent call last):
        ...
        fzero.errors.TraceError: step_fn was called inside of a transform of torch.func ...
    """
    if in_transform():
        raise TraceError(
            f"{what} was called inside of a transform of torch.func (grad, vmap, jvp, ...), and a "
            "whole step has neither a derivative nor a rule for batches: it writes over its state, "
            "and runs collectives. Transform inside of the model function; take several steps in "
            "a loop; to differentiate through an update, write the step of torch.func.grad, "
            "opt.update and fzero.apply_updates on plain tensors."
        )


def refuse_fakes(what: str) -> None:
    """Raise if tensors that are made here have no values.

    Args:
        what: was called, as messages name it.

    Raises:
        TraceError: they have none.
    """
    # whatever else is in force, what torch makes now is one of these
    if isinstance(torch.empty(0, device="cpu"), FakeTensor):
        raise TraceError(
            f"{what} was called under FakeTensorMode, where tensors have no values, and a step "
            "needs them. For shapes, collectives and memory without values, make parameters and "
            "batch under torch.device('meta') and read step_fn.lower(...), or use fzero.simulate."
        )
