"""What a step would run on: a rank's processor and memory, and the links to the others.

A collective goes round a ring (the alpha-beta model). Where the ring leaves a node, each device has
a link of its own there, and as many rings turn as devices of the group share a node, each leaving
through another one: so of what a rank sends, one part in that many crosses, and the rest stays
inside. The slower of the two sets the pace.

A matrix product is computed in tiles, and tiles in waves of as many as there are units: what a tile
or the last wave has to spare is computed for nothing.

References: Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994; Patarasuk,
Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009;
NVIDIA, Matrix multiplication background user's guide (tile and wave quantization).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import torch

from fzero.distributed.buckets import ALL_REDUCE, EXCHANGE
from fzero.errors import ConfigError, fields_by_name, shown
from fzero.program.foreign import Sending
from fzero.program.links import Load

LOW = (torch.bfloat16, torch.float16)


class Sent(NamedTuple):
    """Bytes that a rank sends in a collective, by link.

    Args:
        inside: to devices of its node.
        between: to other nodes.
    """

    inside: int
    between: int


@fields_by_name
@dataclass(frozen=True)
class Hardware:
    """What a step would run on: one rank's processor, its memory, and its links to the others.

    All rates are those that are reached, not those that are sold, but for `peak_flops`.

    Args:
        name: for reports.
        flops: FLOP/s of matrix products in float32.
        memory_bandwidth: bytes/s.
        low_flops: as `flops`, in bfloat16 and float16; None: the same.
        overhead: seconds that launching an operator takes.
        link_latency: seconds for one hop of a collective inside a node (alpha).
        link_bandwidth: bytes/s that a rank sends inside a node (1 / beta).
        devices_per_node: ranks that share a node, neighbours in their numbers; None: all do.
        node_latency: seconds for one hop between nodes; None: `link_latency`.
        node_bandwidth: bytes/s that a rank sends to other nodes; None: `link_bandwidth`.
        memory: bytes that a device has; None: unknown.
        peak_flops: FLOP/s of the data sheet, for MFU; None: `low_flops` or `flops`.
        attention_flops: FLOP/s of fused attention in low precision; None: those of products.
        host_bandwidth: bytes/s between a device and its host's memory, each way, for
            `Config.offload`.
        shares_memory: whether it computes in its host's own memory, where sending anything there
            frees nothing.
        tile: rows and columns of a product that a unit computes at once.
        units: tiles that are computed at once; 1: sizes of products don't matter.
        strides: pairs of the name of a process group and how far apart the numbers of its ranks
            are; others' are neighbours.

    Raises:
        ConfigError: a rate is not positive, a time is negative, or one is no number.

    Examples:
        >>> Hardware("mine", flops=2e12, memory_bandwidth=1e11).name
        'mine'
    """

    name: str
    flops: float
    memory_bandwidth: float
    low_flops: float | None = None
    overhead: float = 5e-6
    link_latency: float = 2e-5
    link_bandwidth: float = 1e10
    devices_per_node: int | None = None
    node_latency: float | None = None
    node_bandwidth: float | None = None
    memory: int | None = None
    peak_flops: float | None = None
    attention_flops: float | None = None
    host_bandwidth: float = 2e10
    tile: tuple[int, int] = (1, 1)
    units: int = 1
    strides: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    shares_memory: bool = False

    def __post_init__(self) -> None:
        for name in _RATES:
            value = getattr(self, name)
            if not _is_number(name, value) or (value is not None and not value > 0):
                raise ConfigError(f"Hardware.{name}={shown(value)} must be a number above 0.")
        for name in ("overhead", "link_latency", "node_latency"):
            value = getattr(self, name)
            if not _is_number(name, value) or (value is not None and not value >= 0):
                raise ConfigError(
                    f"Hardware.{name}={shown(value)} is seconds, and must be a number of 0 or more."
                )
        if not isinstance(self.name, str):
            raise ConfigError(f"Hardware.name={shown(self.name)} must be a text.")
        tile: Any = self.tile
        if not (isinstance(tile, tuple) and len(tile) == 2 and all(map(_is_size, tile))):
            raise ConfigError(
                f"Hardware.tile={shown(tile)} must be two whole numbers above 0: (rows, columns)."
            )

    @property
    def peak(self) -> float:
        """FLOP/s that are sold."""
        return self.peak_flops or self.low_flops or self.flops

    def placed(self, strides: Mapping[str, int]) -> "Hardware":
        """The same for a mesh whose groups have these distances between their ranks."""
        return replace(self, strides=tuple(strides.items()))

    # ------------------------------------------------------------------------------ computing
    def compute_time(
        self,
        flops: int,
        nbytes: int,
        dtype: torch.dtype | None = None,
        *,
        attention: bool = False,
    ) -> float:
        """Seconds of one operator.

        Args:
            flops: that it computes.
            nbytes: that it reads and writes.
            dtype: that it computes in.
            attention: whether it is fused attention.
        """
        low = dtype in LOW
        rate = (self.low_flops if low else None) or self.flops
        if attention and low and self.attention_flops:
            rate = self.attention_flops
        return max(flops / rate, nbytes / self.memory_bandwidth) + self.overhead

    def waste(self, shape: Sequence[int]) -> float:
        """How much more a matrix product computes than it has to, for a result of this shape.

        >>> gpu = Hardware("gpu", 1e12, 1e11, tile=(128, 256), units=100)
        >>> gpu.waste((1280, 2560)), gpu.waste((1281, 2560)), gpu.waste((64, 2560))
        (1.0, 1.998..., 2.0)
        """
        if self.units == 1 or len(shape) < 2:
            return 1.0
        *batch, rows, columns = shape
        tiles = math.prod(batch)
        tiles *= math.ceil(rows / self.tile[0]) * math.ceil(columns / self.tile[1])
        # fewer tiles than units: the sum inside a product is split between several
        waves = math.ceil(tiles / self.units) * self.units if tiles > self.units else tiles
        return max(waves * self.tile[0] * self.tile[1] / max(math.prod(shape), 1), 1.0)

    def crossing(self, nbytes: int, way: str) -> Load:
        """What a copy between the device and its host's memory takes of that way of the link."""
        return Load(self.overhead, {way: nbytes / self.host_bandwidth})

    def crossing_time(self, nbytes: int) -> float:
        """Seconds of such a copy alone."""
        return self.crossing(nbytes, "").seconds

    # ---------------------------------------------------------------------------- communicating
    def nodes_of(self, sends: Sending) -> tuple[int, int]:
        """Over how many nodes a collective's ranks lie, and how many of them share one."""
        if self.devices_per_node is None:
            return 1, sends.world
        near = max(self.devices_per_node // dict(self.strides).get(sends.group, 1), 1)
        near = min(near, sends.world)
        return math.ceil(sends.world / near), near

    def sent(self, sends: Sending) -> Sent:
        """The bytes that each rank sends in one collective; they add up to `wire_bytes`."""
        nodes, near = self.nodes_of(sends)
        between = sends.wire_bytes // near if nodes > 1 else 0
        if sends.kind == EXCHANGE:  # no ring: each sends to each
            between = sends.wire_bytes * (sends.world - near) // (sends.world - 1)
        return Sent(sends.wire_bytes - between, between)

    def load(self, sends: Sending) -> Load:
        """What one collective takes of the links inside a node and between nodes."""
        nodes, _ = self.nodes_of(sends)
        inside, between = self.sent(sends)
        rounds = 2 if sends.kind == ALL_REDUCE else 1
        far = rounds * (nodes - 1)
        hops = rounds * (sends.world - 1) - far
        far_latency = self.link_latency if self.node_latency is None else self.node_latency
        latency = hops * self.link_latency + far * far_latency
        far_bandwidth = self.node_bandwidth or self.link_bandwidth
        return Load(
            latency, {"inside": inside / self.link_bandwidth, "between": between / far_bandwidth}
        )

    def send_time(self, sends: Sending) -> float:
        """Seconds of one collective alone."""
        return self.load(sends).seconds


def _is_number(field: str, value: object) -> bool:
    """Whether a field may hold this; None where that is its default."""
    if value is None:
        return getattr(Hardware, field, 0) is None
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_RATES = (
    *("flops", "low_flops", "memory_bandwidth", "link_bandwidth", "node_bandwidth", "peak_flops"),
    *("attention_flops", "host_bandwidth", "devices_per_node", "memory", "units"),
)

CPU = Hardware(
    "one core of a CPU, gloo on one machine",
    flops=6e10,
    memory_bandwidth=1e10,
    overhead=4e-6,
    link_latency=1e-4,
    link_bandwidth=1e9,
    shares_memory=True,
)
GPU = Hardware(
    "a GPU of a data centre",
    flops=1.6e13,
    low_flops=2.65e14,
    memory_bandwidth=1.7e12,
    overhead=4e-6,
)
"""What a plan for a GPU weighs work against copies to the host by: an A100's rates, see
`fzero.program.machines`. All ranks must plan the same, so it is not asked which GPU it is."""
