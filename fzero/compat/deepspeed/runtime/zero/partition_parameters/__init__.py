"""`deepspeed.runtime.zero.partition_parameters`: what scripts import from it.

Scripts that save look at `param.ds_status` of what has a `ds_id`. Parameters have none here, and
are gathered by whatever reads them, so such code goes plain PyTorch's way; it needs the names.
"""

from enum import Enum

from fzero.compat.deepspeed.refused import ZERO, missing
from fzero.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)


class ZeroParamStatus(Enum):
    """Where a parameter of DeepSpeed's is; no parameter has one here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]
__getattr__ = missing("runtime.zero.partition_parameters", ZERO)
