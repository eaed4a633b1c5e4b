"""Values of a Program that wait for backward in the host's memory: the operators that carry them.

[Note: transfers] A value that is sent away is four nodes. `to_host` starts a copy into host memory
after the value's last reader in forward, and `landed` awaits it: from there on the value's memory
on the device is free. `from_host` starts a copy back, and a second `landed` awaits that before the
first reader in backward. As with collectives, what is sent lives until it is awaited, so the bytes
on the device follow from the graph alone, and not from how fast a link is.

On a GPU host memory is page-locked, and each way has a stream of its own, which computes nothing:
`landed` lets the stream that computes wait for it. A copy of bits is what comes back.

`to_host` says whether the host's memory is apart from the device's. Where the device is the CPU it
is not, and the copies count as what they are: more of the same memory. A Program that is recorded
on the CPU for another machine says that it is, see `planned_for`; what is there then is counted by
`on_host`, and on the device takes nothing.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from fzero.operators import define
from fzero.program.graph import tensors_of
from fzero.program.hardware import GPU, Hardware

DOWN, UP = "to host", "from host"
"""The two ways over the link between a device and its host, as `spans` calls them."""


# ---------------------------------------------------------------------------- asked of a graph
def is_sent(node: fx.Node) -> bool:
    """Whether a node starts a copy into host memory."""
    return node.target is TO_HOST


def is_brought(node: fx.Node) -> bool:
    """Whether a node starts a copy out of host memory."""
    return node.target is FROM_HOST


def is_landing(node: fx.Node) -> bool:
    """Whether a node awaits a copy."""
    return node.target is LANDED


def is_transfer(node: fx.Node) -> bool:
    """Whether a node is one of a transfer's; see [Note: transfers]."""
    return node.target in (TO_HOST, FROM_HOST, LANDED)


def on_host(node: fx.Node) -> bool:
    """Whether a node's value is in host memory that is apart from the device's."""
    if is_landing(node):
        (node,) = node.all_input_nodes
    return is_sent(node) and bool(node.args[1])


def way_of(node: fx.Node) -> str | None:
    """Over which way of the link a node sends: `DOWN`, `UP`, or None if it does not."""
    if is_sent(node) and on_host(node):
        return DOWN
    return UP if is_brought(node) and on_host(node.all_input_nodes[0]) else None


def storages_on_host(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """The storages of nodes that are in host memory, and their bytes: of `lifetimes`' kind."""
    found: dict[int, int] = {}
    for node in nodes:
        for x in tensors_of(node) if on_host(node) else ():
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    return found


# ------------------------------------------------------------------------------- for which machine
_MACHINE: ContextVar[Hardware | None] = ContextVar("fzero_machine", default=None)


@contextlib.contextmanager
def planned_for(hardware: Hardware) -> Iterator[None]:
    """What is staged out inside stands for a step on this hardware, on whatever it is recorded."""
    token = _MACHINE.set(hardware)
    try:
        yield
    finally:
        _MACHINE.reset(token)


def machine_of(inputs: Iterable[Tensor]) -> Hardware | None:
    """The hardware that values may be sent away from; None: the host's memory is the device's own.

    Args:
        inputs: of a Program.

    Examples:
        >>> machine_of([torch.zeros(2)]) is None
        True
        >>> with planned_for(GPU):
        ...     machine_of([torch.zeros(2)]).name
        'a GPU of a data centre'
    """
    machine = _MACHINE.get()
    if machine is None and any(x.device.type == "cuda" for x in inputs):
        machine = GPU
    return None if machine is None or machine.shares_memory else machine


# --------------------------------------------------------------------------------- as they run
def _to_host(x: Tensor, apart: bool) -> Tensor:
    there = torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda
    )
    return _copied(there, x, x.device, DOWN)


def _from_host(x: Tensor, device: torch.device) -> Tensor:
    here = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return _copied(here, x, device, UP)


def _copied(target: Tensor, source: Tensor, device: torch.device, way: str) -> Tensor:
    if device.type != "cuda":
        return target.copy_(source)
    beside = _stream(device, way)
    # what made the source, and what had the target's memory before, is on the stream that computes
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        return target.copy_(source, non_blocking=True)


def _landed(x: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        way = DOWN if x.device.type == "cpu" else UP
        torch.cuda.current_stream(device).wait_stream(_stream(device, way))
    return x


@functools.cache
def _stream(device: torch.device, way: str) -> Any:
    return torch.cuda.Stream(device)


def _fake(x: Tensor, device: Any) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _fake_sent(x: Tensor, apart: bool) -> Tensor:
    return _fake(x, "cpu")


def _fake_landed(x: Tensor, device: Any) -> Tensor:
    return _fake(x, x.device)


TO_HOST = define("to_host(Tensor x, bool apart) -> Tensor", _to_host, _fake_sent)
FROM_HOST = define("from_host(Tensor x, Device device) -> Tensor", _from_host, _fake)
# torch is told of a value of its own, as of what waits for a collective
LANDED = define("landed(Tensor x, Device device) -> Tensor", _landed, _fake_landed)
