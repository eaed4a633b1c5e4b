"""What a simulated step costs, as plain data that prints as a table."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.config import Config
from fzero.distributed.buckets import ALL_REDUCE, EXCHANGE, Bucket
from fzero.distributed.mesh import Mesh
from fzero.errors import FzeroError
from fzero.program import Program
from fzero.program.caching import reserved_bytes
from fzero.program.categories import MASTERS, OPTIMIZER, RESULTS, TEMPORARIES
from fzero.program.cost import cost
from fzero.program.foreign import Sending, sending
from fzero.program.hardware import Hardware
from fzero.program.held import memory
from fzero.program.plot import plot
from fzero.program.text import count, seconds, size, table
from fzero.transforms.frames import take_apart
from fzero.tree import PyTree

ROOM = 0.9
"""Share of a device's memory that a step may fill: the rest is the driver's, the allocator's gaps,
and the buffers of the communication library."""


class Traffic(NamedTuple):
    """What a rank sends in a step by one kind of collective over one axis.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
        axis: "shard" or "replicate"; "other" of a model's own over another group.
        launches: how many.
        bytes: of the full sides, without padding.
        inside: bytes that a rank sends to devices of its node.
        between: bytes that a rank sends to other nodes.
        padding: bytes of the full sides' buffers that are padding.
    """

    kind: str
    axis: str
    launches: int
    bytes: int
    inside: int
    between: int
    padding: int

    @property
    def sent(self) -> int:
        """Bytes that a rank sends."""
        return self.inside + self.between


@dataclass(frozen=True)
class Report:
    """What one rank of a simulated step holds, sends and computes.

    Args:
        world_size: ranks.
        mesh: ranks along its axes: `(shard,)` or `(replicate, shard)`.
        stage: of ZeRO.
        accum_steps: micro-batches of a step.
        hardware: that times are estimated for.
        peak_bytes: most bytes that the device holds at once.
        categories: the same by category; see `fzero.program.categories`.
        reserved_bytes: that CUDA's caching allocator holds for it, gaps included; see
            `Program.reserved_bytes`. None: all layers have to be recorded for that, and few were.
        host_bytes: in the host's memory, with `Config.offload`; masters and optimizer state beside
            the activations that are there at the fullest moment.
        traffic: what a rank sends.
        flops: that a rank computes in a step, recomputation included.
        recomputed: of these, what backward computes again.
        seconds: estimated, of a step.
        exposed: of these, seconds in which a rank only waits for collectives.
        tokens: of a rank's batch: elements of its first leaf of integers, or rows if there is none.
        assumptions: what the times rest on, one sentence each.
        program: the step; of a report on many layers made from few, of the few; None: dropped, to
            send a report to another process.
    """

    world_size: int
    mesh: tuple[int, ...]
    stage: int
    accum_steps: int
    hardware: Hardware
    peak_bytes: int
    categories: Mapping[str, int]
    reserved_bytes: int | None
    host_bytes: int
    traffic: tuple[Traffic, ...]
    flops: int
    recomputed: int
    seconds: float
    exposed: float
    tokens: int
    assumptions: tuple[str, ...]
    program: Program | None = field(repr=False, compare=False)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(row.sent for row in self.traffic)

    @property
    def padding(self) -> int:
        """Bytes in the buffers of a step's collectives that are padding."""
        return sum(row.padding for row in self.traffic)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks together, per second."""
        return self.tokens * self.world_size / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float:
        """Share of the FLOP/s on the data sheet that the model's own FLOPs are: without what is
        computed again. Attention counts in full, causal or not.

        References: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
        """
        if not self.seconds:
            return 0.0
        return (self.flops - self.recomputed) / self.seconds / self.hardware.peak

    @property
    def fits(self) -> bool | None:
        """Whether the peak leaves room on the device; None: nobody said what it has."""
        has = self.hardware.memory
        return None if has is None else self.peak_bytes <= ROOM * has

    def to_json(self, **options: Any) -> str:
        """All but the Program as a JSON object, derived figures included.

        Args:
            options: of `json.dumps`.
        """
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "program"}
        found["hardware"] = {
            f.name: getattr(self.hardware, f.name)
            for f in fields(self.hardware)
            if f.name != "strides"
        }
        found["categories"] = dict(self.categories)
        found["traffic"] = [row._asdict() for row in self.traffic]
        for name in ("sent", "padding", "tokens_per_second", "mfu", "fits"):
            found[name] = getattr(self, name)
        return json.dumps(found, **options)

    def plot(self, path: str | Path) -> None:
        """Draw `program` on this hardware: see `Program.plot`.

        Raises:
            FzeroError: the Program was dropped, or matplotlib is not installed.
        """
        if self.program is None:
            raise FzeroError("this report came without its Program; simulate once more to draw it.")
        plot(self.program.parts(), path, self.hardware)

    def without_program(self) -> "Report":
        """The same as plain data that can be pickled."""
        plain = replace(self.hardware, strides=())
        return replace(self, program=None, hardware=plain, categories=dict(self.categories))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# --------------------------------------------------------------------------------- from a Program
def report_on(program: Program, cfg: Config, mesh: Mesh, hardware: Hardware, tokens: int) -> Report:
    """What a step's Program costs on a rank of `mesh`."""
    hardware = hardware.placed({mesh.shard_group: 1, mesh.replicate_group: mesh.shard_size})
    first, *rest = program.parts()
    host = replace(hardware, memory_bandwidth=hardware.host_bandwidth)
    costs = [cost([first], hardware)]
    costs += [cost([part], host if cfg.offloads_state else hardware) for part in rest]
    peak, categories, apart = _memory(program, cfg)
    moved = _crossing(program) / hardware.host_bandwidth if cfg.offloads_state else 0.0
    return Report(
        world_size=mesh.world_size,
        mesh=tuple(mesh.device_mesh.shape),
        stage=cfg.stage,
        accum_steps=cfg.accum_steps,
        hardware=hardware,
        peak_bytes=peak,
        categories=categories,
        reserved_bytes=_reserved(program, cfg),
        host_bytes=apart + program.host_bytes(),
        traffic=tuple(_traffic(program, mesh, hardware)),
        flops=sum(one.flops for one in costs),
        recomputed=sum(one.recomputed for one in costs),
        seconds=sum(one.seconds for one in costs) + moved,
        exposed=sum(one.exposed for one in costs),
        tokens=tokens,
        assumptions=tuple(_assumptions(hardware, cfg)),
        program=program,
    )


_HOST = (MASTERS, OPTIMIZER)


def _memory(program: Program, cfg: Config) -> tuple[int, Mapping[str, int], int]:
    """Bytes on the device, by category, and bytes on the host."""
    if not cfg.offloads_state:
        peak = program.peak()
        return peak.bytes, peak.by_category(), 0
    first, *_ = program.parts()
    apart, best = 0, MappingProxyType({})
    for moment in memory(program.parts()):
        without = away(cfg, first=moment.program == first.name)
        here = {name: n for name, n in moment.categories.items() if name not in without}
        apart = max(apart, moment.bytes - sum(here.values()))
        if sum(here.values()) > sum(best.values()):
            best = MappingProxyType(here)
    return sum(best.values()), best, apart


def _reserved(program: Program, cfg: Config) -> int:
    parts = list(program.parts())
    if cfg.offloads_state:  # the update runs on the host
        return reserved_bytes(parts[:1], away=_HOST)
    return reserved_bytes(parts)


def away(cfg: Config, *, first: bool) -> tuple[str, ...]:
    """Categories that are in the host's memory.

    Args:
        cfg: of the step.
        first: while gradients are computed; the update runs on the host.
    """
    if not cfg.offloads_state:
        return ()
    return _HOST if first else (*_HOST, TEMPORARIES, RESULTS)


def _crossing(program: Program) -> int:
    """Bytes of gradients that go down to the host, and of parameters that come up."""
    first, *_ = program.parts()
    sizes = dict.fromkeys(("parameters", "gradients"), 0)
    moments = [m for m in memory(program.parts()) if m.program != first.name]
    for name in sizes:
        sizes[name] = max((m.categories.get(name, 0) for m in moments), default=0)
    return sum(sizes.values())


def sent_by(program: Program) -> Iterator[tuple[Sending, int]]:
    """Each collective, and how often a step runs it."""
    for part in program.parts():
        for node in part.graph.nodes:
            if sent := sending(node):
                yield sent, part.times


def _traffic(program: Program, mesh: Mesh, hardware: Hardware) -> list[Traffic]:
    axes = {mesh.shard_group: "shard", mesh.replicate_group: "replicate"}
    rows: dict[tuple[str, str], Traffic] = {}
    for sent, times in sent_by(program):
        key = (sent.kind, axes.get(sent.group, "other"))
        inside, between = hardware.sent(sent)
        new = (1, sent.nbytes, inside, between, _padding(sent))
        old = rows.get(key, Traffic(*key, 0, 0, 0, 0, 0))
        rows[key] = Traffic(*key, *(a + times * b for a, b in zip(old[2:], new, strict=True)))
    return list(rows.values())


def _padding(sent: Sending) -> int:
    if not isinstance(sent, Bucket) or sent.kind in (ALL_REDUCE, EXCHANGE):
        return 0
    return sent.part * sent.world * sent.dtype.itemsize - sent.nbytes


def tokens_in(batch: PyTree) -> int:
    """Elements of the first leaf of integers, or rows of the first leaf."""
    leaves = [x for x in take_apart(batch)[0] if isinstance(x, Tensor) and x.dim()]
    whole = (torch.int64, torch.int32, torch.int16, torch.uint8)
    for x in leaves:
        if x.dtype in whole:
            return x.numel()
    return leaves[0].shape[0] if leaves else 0


# ------------------------------------------------------------------------------------------ as text
def _assumptions(hardware: Hardware, cfg: Config) -> Iterator[str]:
    low = hardware.low_flops or hardware.flops
    yield (
        f"products reach {count(low)}FLOP/s in bfloat16 ({low / hardware.peak:.0%} of what is "
        f"sold) and {count(hardware.flops)}FLOP/s in float32"
        + (
            f", less what tiles of {hardware.tile[0]} x {hardware.tile[1]} in waves of "
            f"{hardware.units} waste"
            if hardware.units > 1
            else ""
        )
    )
    if hardware.attention_flops:
        yield f"fused attention reaches {count(hardware.attention_flops)}FLOP/s, and skips the mask"
    yield (
        f"memory moves {size(hardware.memory_bandwidth)}/s; an operator takes the longer of both, "
        f"and {seconds(hardware.overhead)}; operators are not fused"
    )
    near = hardware.devices_per_node
    yield (
        f"a hop inside a node of {near or 'all'} takes {seconds(hardware.link_latency)}, at "
        f"{size(hardware.link_bandwidth)}/s"
    )
    if near:
        latency = hardware.node_latency or hardware.link_latency
        bandwidth = hardware.node_bandwidth or hardware.link_bandwidth
        yield (
            f"a hop between nodes takes {seconds(latency)}, at {size(bandwidth)}/s for each "
            "device, whose rings do not disturb other devices'"
        )
    yield (
        "gathers and reductions travel in two lanes, which share the links; what computes slows "
        "neither and is slowed by neither; no rank is late"
    )
    yield "no time for loading batches, logging, checkpoints"
    if cfg.offloads_state:
        yield (
            f"the update runs on the host, which moves {size(hardware.host_bandwidth)}/s for each "
            "device, and nothing runs beside it"
        )
    if cfg.offloads_activations:
        yield (
            f"activations go to the host and come back at {size(hardware.host_bandwidth)}/s, each "
            "way on a link that nobody shares"
        )


def _lines(report: Report) -> Iterator[str]:
    axes = " x ".join(map(str, report.mesh))
    yield (
        f"stage {report.stage} on {report.world_size} x {report.hardware.name}, mesh {axes}, "
        f"{report.accum_steps} micro-batch{'es' * (report.accum_steps > 1)}"
    )
    has = report.hardware.memory
    room = "" if has is None else f" of {size(has)}: {'fits' if report.fits else 'does not fit'}"
    yield f"peak {size(report.peak_bytes)}{room}"
    rows = [
        [size(n), f"{n / max(report.peak_bytes, 1):.1%}", name]
        for name, n in report.categories.items()
    ]
    yield from table(rows, "rrl")
    if report.reserved_bytes is not None:
        yield f"the caching allocator reserves {size(report.reserved_bytes)}"
    if report.host_bytes:
        yield f"host {size(report.host_bytes)}"
    yield f"sends {size(report.sent)} a step, {size(report.padding)} of padding in all buffers"
    head = ["collective", "axis", "launches", "full", "inside a node", "between nodes"]
    rows = [head] + [
        [
            row.kind,
            row.axis,
            str(row.launches),
            size(row.bytes),
            size(row.inside),
            size(row.between),
        ]
        for row in report.traffic
    ]
    yield from table(rows, "llrrrr")
    again = report.recomputed / report.flops if report.flops else 0.0
    yield f"computes {count(report.flops)}FLOP a step, {again:.1%} of it again"
    yield (
        f"takes {seconds(report.seconds)} a step, {seconds(report.exposed)} of it waiting for "
        "collectives"
    )
    each = report.tokens_per_second / report.world_size
    yield (
        f"{count(report.tokens_per_second)} tokens/s, {count(each)} a device, MFU {report.mfu:.1%}"
    )
    yield "estimated, assuming that"
    yield from (f"  - {line}" for line in report.assumptions)
