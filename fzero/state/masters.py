"""Where each part of a step lives: on the device, or in host memory.

    offload   parameters, gradients   masters, optimizer state, the update
    None      device                  device
    "cpu"     device                  host, pinned if the device is a GPU

With offload the device keeps parameters in the compute dtype and no master of them, and what
crosses over in a step is a gradient down and a parameter in the compute dtype up.

References: Ren et al., ZeRO-Offload, arXiv:2101.06840. Unlike the paper, gradients stay on
the device until the step's last micro-batch: their sum crosses over once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.config import Config


class Placement(NamedTuple):
    """Where things live.

    Args:
        params: parameters, gradients, the model and its batches.
        masters: masters and the optimizer's state; the update runs there.
        pinned: whether `masters` is page-locked host memory, which a GPU can copy from and to
            while it computes.
    """

    params: torch.device
    masters: torch.device
    pinned: bool

    def master(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of `x` that lives where masters do."""
        x = x.detach().to(dtype)  # cast first: fewer bytes cross over
        made = torch.empty(x.shape, dtype=dtype, device=self.masters, pin_memory=self.pinned)
        return made.copy_(x)

    def state(self, x: Tensor) -> Tensor:
        """A leaf of the optimizer's state, which was made where masters live; pinned if they are.

        Leaves that are no plain host tensors stay as they are.
        """
        return x.pin_memory() if self.pinned and x.device.type == "cpu" else x


def place(cfg: Config, device: torch.device) -> Placement:
    """Where each part of a step lives whose parameters were given on `device`.

    Examples:
        >>> place(Config(), torch.device("cuda", 1)).masters
        device(type='cuda', index=1)
        >>> place(Config(offload="cpu"), torch.device("cuda", 1))[1:]
        (device(type='cpu'), True)
        >>> place(Config(offload="cpu"), torch.device("cpu"))[1:]
        (device(type='cpu'), False)
    """
    if cfg.offload is None:
        return Placement(device, device, False)
    return Placement(device, torch.device("cpu"), device.type == "cuda")


def copied(x: Tensor) -> Tensor:
    """A copy of `x`, pinned if it is."""
    if x.device.type != "cpu" or not x.is_pinned():
        return x.clone()
    return torch.empty_like(x, pin_memory=True).copy_(x)
