"""`deepspeed.runtime`: what scripts import from it."""

from fzero.compat.deepspeed import zero
from fzero.compat.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules", "zero"]
