"""`deepspeed.checkpoint`: what scripts that write their own files take from there."""

from fzero.compat.deepspeed.checkpoint import utils

__all__ = ["utils"]
