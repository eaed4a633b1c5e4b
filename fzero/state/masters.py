"""Where each part of a step lives: on the device, or in host memory.

    offload   parameters, gradients   masters, optimizer state, the update
    None      device                  device
    "cpu"     device                  host, pinned if the device is a GPU

With offload the device keeps parameters in the compute dtype and no master of them, and what
crosses over in a step is a gradient down and a parameter in the compute dtype up.

References: Ren et al., ZeRO-Offload, arXiv:2101.06840. Unlike the paper, gradients stay on
the device until the step's last micro-batch: their sum crosses over once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.config import Config
from fzero.distributed.dtensor import local_tensor
from fzero.errors import ConfigError
from fzero.numerics.precision import Precision, holds, wider


class Residence(NamedTuple):
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

    def state(self, x: Any) -> Any:
        """A leaf of the optimizer's state, which was made where masters live; pinned if they are.

        Leaves that are no plain host tensors stay as they are.
        """
        there = self.pinned and isinstance(x, Tensor) and x.device.type == "cpu"
        return x.pin_memory() if there else x


def plan_residence(cfg: Config, device: torch.device) -> Residence:
    """Where each part of a step lives whose parameters were given on `device`.

    Examples:
        >>> plan_residence(Config(), torch.device("cuda", 1)).masters
        device(type='cuda', index=1)
        >>> plan_residence(Config(offload="cpu"), torch.device("cuda", 1))[1:]
        (device(type='cpu'), True)
        >>> plan_residence(Config(offload="cpu"), torch.device("cpu"))[1:]
        (device(type='cpu'), False)
    """
    if not cfg.offloads_state:
        return Residence(device, device, False)
    return Residence(device, torch.device("cpu"), device.type == "cuda")


def copied(x: Any) -> Any:
    """A copy of `x`, pinned if it is; of what is no tensor, itself."""
    if not isinstance(x, Tensor):
        return x
    # asked of the local tensor: torch 2.11's DTensor has no answer
    if x.device.type != "cpu" or not local_tensor(x).is_pinned():
        return x.clone()
    # A clone would be pageable.
    return torch.empty_like(x, pin_memory=True).copy_(x)


class LeafDtypes(NamedTuple):
    """What is kept of each leaf between steps.

    Args:
        params: dtype of each parameter, as users hold them.
        masters: dtype of each copy beside them that the optimizer updates; None if it updates the
            parameters themselves.
    """

    params: tuple[torch.dtype, ...]
    masters: tuple[torch.dtype, ...] | None


def plan_leaf_dtypes(
    leaves: Sequence[Tensor],
    paths: Sequence[str],
    precision: Precision,
    *,
    trained: Sequence[bool],
    sharded: bool,
    apart: bool = False,
    kept: Sequence[bool] = (),
) -> LeafDtypes:
    """In which dtypes parameters live between steps, and whether masters do beside them.

    Args:
        leaves: the parameters as given; only their dtypes are read.
        paths: theirs, for messages.
        precision: the dtypes.
        trained: which leaves the optimizer updates. The others need no master.
        sharded: parameters live as shards (stage 3): then they are the masters, and are cast on
            their way into a step.
        apart: masters live elsewhere (in host memory), so that there are some in any case.
        kept: which leaves are computed with as they are; none if it is empty.

    Raises:
        ConfigError: a leaf that the master dtype cannot hold, named by its path.

    Examples:
        >>> from fzero.numerics.precision import resolve
        >>> leaf, bf16 = [torch.ones(2)], resolve("bf16")
        >>> plan_leaf_dtypes(leaf, [""], bf16, trained=[True], sharded=True)
        LeafDtypes(params=(torch.float32,), masters=None)
        >>> plan_leaf_dtypes(leaf, [""], bf16, trained=[True], sharded=False)
        LeafDtypes(params=(torch.bfloat16,), masters=(torch.float32,))
    """
    used: list[torch.dtype] = []
    high: list[torch.dtype] = []
    rows = zip(leaves, paths, trained, kept or [False] * len(leaves), strict=True)
    for leaf, path, train, keep in rows:
        floating = leaf.is_floating_point() and not keep
        used.append((precision.param if floating else None) or leaf.dtype)
        high.append((precision.master if floating and train else None) or used[-1])
        if not holds(high[-1], used[-1]):
            raise ConfigError(
                f"params{path} is {used[-1]}, which Precision.master={precision.master} cannot "
                "hold: a master is at least as precise as what is computed with. Use "
                f"master={wider(used[-1])}, or set Precision.param too."
            )
    if sharded and not apart:
        return LeafDtypes(tuple(high), None)
    differ = [a != b for a, b, train in zip(used, high, trained, strict=True) if train]
    return LeafDtypes(tuple(used), tuple(high) if apart or any(differ) else None)
