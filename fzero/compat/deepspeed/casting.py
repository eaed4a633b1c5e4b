"""What a model is cast to before it is taken: its parameters, and the buffers that are named."""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import nn


def cast(
    model: nn.Module,
    params: torch.dtype | None,
    buffers: torch.dtype | None = None,
    keep: Sequence[str] | None = None,
) -> None:
    """Round parameters, as DeepSpeed's masters start from the rounded values.

    Args:
        model: is changed in place.
        params: what it computes in; None: they stay.
        buffers: of those with floating numbers; None: they stay as precise as they are.
        keep: parts of names of buffers that are float32 in 16 bits, "*" for any text; None: those
            that models of transformers have in `_keep_in_fp32_modules_strict`, and in float16
            those in `_keep_in_fp32_modules`, too.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> cast(model, torch.bfloat16, torch.float16, keep=["var"])
        >>> model[0].weight.dtype, model[1].running_mean.dtype, model[1].running_var.dtype
        (torch.bfloat16, torch.float16, torch.float32)
    """
    named = {id(x): (name, x) for name, x in model.named_buffers() if x.is_floating_point()}
    kept = _kept(model, [name for name, _ in named.values()], params, keep)
    for name, x in named.values():
        if name in kept:
            x.data = x.data.float()
        elif buffers is not None:
            x.data = x.data.to(buffers)
    for module in model.modules() if params is not None else ():
        # torch's norms want weights in the dtype of their statistics, which are buffers
        statistics = getattr(module, "running_mean", None)
        dtype = params if statistics is None else statistics.dtype
        for param in module.parameters(recurse=False):
            if param.is_floating_point():
                param.data = param.data.to(dtype)


def _kept(
    model: nn.Module,
    names: Iterable[str],
    params: torch.dtype | None,
    keep: Sequence[str] | None,
) -> set[str]:
    """The buffers that are float32 whatever the rest is, by name."""
    if params not in (torch.float16, torch.bfloat16):
        return set()
    attributes = ["_keep_in_fp32_modules_strict"]
    if params == torch.float16:
        attributes.append("_keep_in_fp32_modules")
    patterns = [_pattern(part) for part in keep or ()]
    for name, module in model.named_modules() if keep is None else ():
        parts = {part for key in attributes for part in getattr(module, key, None) or ()}
        start = rf"^{re.escape(name)}\..*" if name else ""
        patterns += [start + _pattern(part) for part in parts]
    return {name for name in names if any(re.search(one, name) for one in patterns)}


def _pattern(part: str) -> str:
    return part.replace("*", ".*")
