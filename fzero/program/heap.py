"""Memory that a step frees stays with the process, for the next step.

[Note: pages that come and go] A step's activations come and go. glibc gives what is free at the end
of its heap back to the system once that is more than a threshold, and blocks above another one at
once; the system clears each page anew when it is asked for again. That took a tenth of a step's
processor time: 1,900 pages with two million parameters, 150,000 with batches of 4,096 tokens.

The first threshold is twice the second, which is the largest block that was mapped and freed so
far, up to 32 MiB. So one block of the largest size that counts is taken and freed; none of its
pages is ever touched. That will do for steps that make up to 64 MiB. A Program knows what it makes:
for larger ones both thresholds are set (mallopt(3)), to twice what the largest of those that are
alive makes at once, as gaps between blocks are free as well, and to its largest block. What is kept
serves whatever the process allocates in between. With the last of them it goes back.

These are the process's thresholds, as its heap is. Who has set one by hand (MALLOC_TRIM_THRESHOLD_,
GLIBC_TUNABLES) keeps it, other allocators take no notice, and what lives on other devices counts
for nothing.
"""

import ctypes
import os
import platform
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from fzero.program.graph import tensors_of
from fzero.program.memory import Bytes, lifetimes, storages, timeline


class Made(NamedTuple):
    """Host memory that a graph's run allocates.

    Args:
        at_once: most bytes that are alive at a moment.
        largest: bytes of the largest block.
    """

    at_once: int
    largest: int


def made_by(graph: fx.Graph) -> Made:
    """What a run of a graph allocates on the host."""
    born, _ = lifetimes(graph, _on_cpu)
    blocks = [nbytes for storages in born.values() for nbytes in storages.values()]
    return Made(max(timeline(graph, _on_cpu), default=0), max(blocks, default=0))


def keep_freed(owner: Callable[..., Any], made: Made) -> None:
    """Let the C library keep what a run of `owner` frees; what it does not free stays as it is.

    Args:
        owner: what allocates this, each time it is called: as long as it lives.
        made: by one call.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")  # and freed: nothing holds it
    if (made.at_once > 2 * _LARGEST or made.largest > _LARGEST) and _may_set():
        token = object()
        _ALIVE[token] = made
        weakref.finalize(owner, _gone, token).atexit = False
        _settle()


def _on_cpu(nodes: Iterable[fx.Node]) -> Bytes:
    return storages(n for n in nodes if all(x.device.type == "cpu" for x in tensors_of(n)))


# glibc's DEFAULT_MMAP_THRESHOLD_MAX, less what an allocation has beside it
_BESIDE = 2**16
_LARGEST = 2**25 - _BESIDE

_ALIVE: dict[object, Made] = {}
"""Of this process, as the heap is: what the owners that are alive make."""


def _settle() -> None:
    """Set the thresholds to what the largest of those alive needs."""
    alive = list(_ALIVE.values())
    free = 2 * max((_LARGEST, *(made.at_once for made in alive)))
    largest = max((_LARGEST, *(made.largest for made in alive))) + _BESIDE
    libc = ctypes.CDLL(None)
    # older glibc refuse more than 32 MiB for blocks, and keep what they had
    libc.mallopt(_M_MMAP_THRESHOLD, min(largest, _INT_MAX))
    # -1: whatever is free stays. No int says how much a step of more than 2 GiB makes
    libc.mallopt(_M_TRIM_THRESHOLD, free if free <= _INT_MAX else -1)


def _gone(token: object) -> None:
    del _ALIVE[token]
    _settle()
    ctypes.CDLL(None).malloc_trim(0)


def _may_set() -> bool:
    """Whether the C library has thresholds, and nobody has set them by hand."""
    mine = [name for name in os.environ if name.startswith("MALLOC_")]
    tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return platform.libc_ver()[0] == "glibc" and not mine and not tuned


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _INT_MAX = -1, -3, 2**31 - 1  # malloc.h
