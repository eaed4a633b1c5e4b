"""`deepspeed.ops.lamb`."""

from fzero.compat.deepspeed.optimizers import FusedLamb

__all__ = ["FusedLamb"]
