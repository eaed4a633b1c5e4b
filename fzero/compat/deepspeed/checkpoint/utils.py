"""`deepspeed.checkpoint.utils`: copies of tensors for `torch.save`."""

from typing import Any

import torch

from fzero import tree

_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """`item` with a copy in the place of each tensor, which keeps no larger memory alive.

    Args:
        item: such as `engine.module.state_dict()`: any nest of containers.
        device: of the copies.

    Examples:
        >>> row = torch.zeros(1000, 2)[0]
        >>> clone_tensors_for_torch_save({"row": row})["row"].untyped_storage().nbytes()
        8
    """

    def copy(x: Any) -> Any:
        return x.detach().to(device, copy=True) if isinstance(x, torch.Tensor) else x

    return tree.map(copy, item)
