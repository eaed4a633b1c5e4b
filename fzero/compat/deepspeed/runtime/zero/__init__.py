"""`deepspeed.runtime.zero`: `deepspeed.zero` under the path that it has in DeepSpeed."""

import contextlib
from collections.abc import Iterator
from typing import Any

from fzero.compat.deepspeed.refused import ZERO, missing
from fzero.compat.deepspeed.runtime.zero import partition_parameters
from fzero.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside, an engine's parameters are gathered once, and not in each forward."""
    with GatheredParameters(model.parameters()):
        yield model


__all__ = [
    "GatheredParameters",
    "Init",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
__getattr__ = missing("runtime.zero", ZERO)
