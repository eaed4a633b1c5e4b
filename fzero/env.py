"""`python -m fzero.env`: what a report of a bug should say of the system that it was seen on."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from fzero.errors import TraceError
from fzero.functional.islands import check_islands
from fzero.functional.tasks import check_tasks
from fzero.functional.torch_checkpoint import check_checkpoints

_PACKAGES = ("fzero", "torch", "optree", "safetensors", "transformers", "accelerate", "peft")
_VARIABLES = ("NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "MALLOC_", "CUDA_")
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

_PROBES: Mapping[str, Callable[[], None]] = {
    "checkpoints, traced": lambda: check_checkpoints("traced"),
    "checkpoints, eager": lambda: check_checkpoints("eager"),
    "backward inside of backward": check_tasks,
    "islands": check_islands,
}


def report(environ: Mapping[str, str] = os.environ) -> str:
    """The system, one fact a line: versions, devices, backends, probes of torch, variables.

    Nothing that a probe asks for starts a process group, and no variable is shown but those of
    torch and what it runs on.

    Args:
        environ: the variables.

    >>> print(report({"OMP_NUM_THREADS": "1", "TOKEN": "secret"}))
    fzero                        ...
    OMP_NUM_THREADS              1
    """
    return "\n".join(f"{name:28} {value}" for name, value in _facts(environ))


def _facts(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        # of its own mouth: that names the build (CUDA or not), too
        yield name, torch.__version__ if name == "torch" else found
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    yield "processor", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "CUDA", f"{torch.version.cuda}, {', '.join(devices) or 'no device'}"
    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    yield "backends", ", ".join(name for name, found in there.items() if found()) or "none"
    for name, probe in _PROBES.items():
        try:
            probe()
            yield name, "as expected"
        except TraceError as error:
            yield name, f"REFUSED: {error}"
    for name, value in sorted(environ.items()):
        if name.startswith(_VARIABLES) or name in _OF_RANKS:
            yield name, value


def main() -> int:
    """Print it."""
    sys.stdout.write(report() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
