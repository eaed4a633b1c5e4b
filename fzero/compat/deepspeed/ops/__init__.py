"""`deepspeed.ops`: DeepSpeed's optimizers, as holders of param groups."""

from fzero.compat.deepspeed.ops import adam, lamb, lion
from fzero.compat.deepspeed.refused import OPTIMIZERS, missing

__all__ = ["adam", "lamb", "lion"]
__getattr__ = missing("ops", OPTIMIZERS)
