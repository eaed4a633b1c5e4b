"""`deepspeed.comm`: the ranks. What is not here is `torch.distributed`'s, under its name."""

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start `torch.distributed`, unless somebody has, or `dist_init_required=False`.

    Under torchrun (or what else sets RANK and WORLD_SIZE) with those ranks; else with this process
    alone.

    Args:
        dist_backend: None: NCCL where there is a GPU, else gloo.
        distributed_port: on this machine, where MASTER_PORT is not set.
        timeout: of collectives.
        init_method: as of `torch.distributed.init_process_group`.
        dist_init_required: False: somebody else starts it.
        rank, world_size: -1: from the environment.
        auto_mpi_discovery, verbose, config: of no effect.
    """
    if dist_init_required is False or dist.is_initialized():
        return
    backend = dist_backend or ("nccl" if device_type() == "cuda" else "gloo")
    rank = int(os.environ.get("RANK", "0")) if rank < 0 else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size < 0 else world_size
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if device_type() == "cuda":
        torch.cuda.set_device(get_local_rank())
    if world_size == 1 and init_method is None and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **more)
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    dist.init_process_group(backend, init_method, rank=rank, world_size=world_size, **more)


def device_type() -> str:
    """The kind of device that is trained on: DS_ACCELERATOR's, else a GPU where there is one."""
    asked = os.environ.get("DS_ACCELERATOR")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def is_initialized() -> bool:
    """Whether the ranks have met."""
    return dist.is_available() and dist.is_initialized()


def is_available() -> bool:
    """Whether ranks can meet."""
    return dist.is_available()


def get_rank(group: Any = None) -> int:
    """This rank's number; 0 where there is one process.

    >>> get_rank(), get_world_size(), get_local_rank()
    (0, 1, 0)
    """
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """How many ranks there are."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """This rank's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Wait until all ranks are here."""
    if is_initialized():
        return dist.barrier(group, async_op=async_op, device_ids=device_ids)
    return None


def log_summary(show_straggler: bool = False) -> None:
    """DeepSpeed's log of collectives: there is none; see `torch.profiler`."""


def configure(*args: Any, **kwargs: Any) -> None:
    """Settings of DeepSpeed's log of collectives: of no effect."""


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(dist, name)
