"""`deepspeed.runtime`: what scripts import from it."""

from fzero.compat.deepspeed.runtime import engine, lr_schedules, zero

__all__ = ["engine", "lr_schedules", "zero"]
