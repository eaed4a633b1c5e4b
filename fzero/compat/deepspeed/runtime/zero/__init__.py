"""`deepspeed.runtime.zero`: `deepspeed.zero` under the path that it has in DeepSpeed."""

from fzero.compat.deepspeed.refused import ZERO, missing
from fzero.compat.deepspeed.runtime.zero import partition_parameters
from fzero.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
]
__getattr__ = missing("runtime.zero", ZERO)
