"""`copy.deepcopy` of tensors without memory.

Torch asks a tensor for its address there, to see whether it has memory, and what is recorded has
none to tell (see `fzero.numerics.fakes`). So while something is recorded torch's `__deepcopy__`
gives way here. As in torch a memory is copied once: what overlaps in the original does in the copy.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero.functional.patch import Patch

DeepCopy = Callable[[Tensor, dict[int, Any]], Tensor]


def _replacement(original: DeepCopy) -> DeepCopy:
    def __deepcopy__(x: Tensor, memo: dict[int, Any]) -> Tensor:
        # torch says itself that others than leaves can't be copied
        if isinstance(x, FakeTensor) and x.is_leaf and x.layout is torch.strided:
            return _copied(x, memo)
        return original(x, memo)

    return __deepcopy__


deep_copies = Patch((Tensor, "__deepcopy__", _replacement))
"""While this is entered tensors without memory can be copied."""


def _copied(x: FakeTensor, memo: dict[int, Any]) -> Tensor:
    if id(x) in memo:
        return memo[id(x)]
    with torch.no_grad():
        key = x.untyped_storage()._cdata, x.dtype
        held: dict[Any, Tensor] = memo.setdefault(id(_copied), {})
        if key not in held:
            numel = x.untyped_storage().nbytes() // x.itemsize
            dense = x.is_contiguous() and x.numel() == numel
            held[key] = x.clone() if dense else x.as_strided((numel,), (1,), 0).clone()
        found = held[key]
        whole = found.shape == x.shape and found.stride() == x.stride()
        place = x.shape, x.stride(), x.storage_offset()
        made = (found if whole else found.as_strided(*place)).detach()
    memo[id(x)] = made
    if x.requires_grad:  # inside of a transform of torch.func even False is refused
        made.requires_grad_()
    if x.grad is not None:
        made.grad = copy.deepcopy(x.grad, memo)
    for name, value in vars(x).items():
        if name not in vars(made):  # what users have put there
            setattr(made, name, copy.deepcopy(value, memo))
    return made
