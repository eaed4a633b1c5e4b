"""`deepspeed.runtime.engine`: what scripts import from it, for annotations for one."""

from fzero.compat.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
