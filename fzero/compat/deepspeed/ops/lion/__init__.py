"""`deepspeed.ops.lion`."""

from fzero.compat.deepspeed.optimizers import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
