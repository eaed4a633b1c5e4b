"""DeepSpeed's interface over `fzero.Engine`: `import fzero.compat.deepspeed as deepspeed`.

What has no counterpart raises an error that names it, and what to do instead.
"""

from fzero.compat.deepspeed import (
    accelerator,
    checkpoint,
    checkpointing,
    comm,
    ops,
    runtime,
    utils,
    zero,
)
from fzero.compat.deepspeed.comm import init_distributed
from fzero.compat.deepspeed.devices import get_accelerator
from fzero.compat.deepspeed.engine import DeepSpeedEngine
from fzero.compat.deepspeed.launch import add_config_arguments, initialize
from fzero.compat.deepspeed.optimizers import DeepSpeedOptimizer
from fzero.compat.deepspeed.refused import NAMES, missing, watch_imports
from fzero.compat.deepspeed.utils import log_dist, logger
from fzero.errors import ConfigError as DeepSpeedConfigError

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]
__version__ = "0.19.8"
"""DeepSpeed's, whose interface this is; scripts ask for it."""

__getattr__ = missing("", NAMES)
watch_imports(__name__)
