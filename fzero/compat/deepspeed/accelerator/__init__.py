"""`deepspeed.accelerator`: the device that is trained on."""

from fzero.compat.deepspeed.devices import Accelerator, get_accelerator

__all__ = ["Accelerator", "get_accelerator"]
