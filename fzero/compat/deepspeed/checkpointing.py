"""`deepspeed.checkpointing`: activations that are computed again in backward."""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from fzero.errors import ConfigError


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args)`, whose activations are computed again in backward.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(torch.exp, x).sum().backward()
    >>> x.grad
    tensor([2.7183, 2.7183])
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Settings of `checkpoint`; those that say where activations live are refused.

    Raises:
        ConfigError: activations were to be split over ranks, or kept on the host.
    """
    asked = {"partition_activations": partition_activations, "checkpoint_in_cpu": checkpoint_in_cpu}
    for name, value in asked.items():
        if value:
            raise ConfigError(
                f"deepspeed.checkpointing.configure({name}=True) has no counterpart: what a "
                "checkpoint keeps stays on its rank and device. Leave it out."
            )


def is_configured() -> bool:
    """Always: there is nothing that must be configured."""
    return True


def reset() -> None:
    """Nothing is kept between steps."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch's generators: there is no model parallelism, whose ranks would differ."""
    torch.manual_seed(seed)
