"""Collectives that are none of the library's: a model's own, or what a DTensor in it needs.

[Note: foreign collectives] Those of `torch.distributed._functional_collectives` are operators like
others, so a Program holds them where they were called. No plan puts them into buckets, moves them
or has them twice, but they are launched and awaited, send bytes and share links as the library's
do. What one sends is noted when it is recorded: to tell that takes its process group, which another
process that reads the Program from a file may not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fzero.distributed.buckets import ALL_REDUCE, EXCHANGE, GATHER, REDUCE_SCATTER, Bucket
from fzero.distributed.mesh import group_of, is_gloo
from fzero.program.graph import tensors_of

BROADCAST = "broadcast"


@dataclass(frozen=True)
class Foreign:
    """One of them.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
        nbytes: of the full side.
        wire_bytes: that each rank sends, bandwidth-optimally; of a broadcast, one that passes on.
        world: ranks of the group.
        group: name of the process group.
        dtype: of what is sent.
        gloo: whether gloo carries it.
    """

    kind: str
    nbytes: int
    wire_bytes: int
    world: int
    group: str
    dtype: torch.dtype
    gloo: bool

    @property
    def lane(self) -> str:
        """Name of what carries it."""
        return self.group


Sending = Bucket | Foreign
"""A collective, the library's or not."""
FOREIGN = "foreign"
"""Where a node says what it sends."""


def note_foreign(graph: fx.Graph) -> None:
    """Let each collective that is none of the library's say what it sends."""
    for node in graph.nodes:
        kind = _KINDS.get(_name(node))
        if kind is not None and "bucket" not in node.meta and FOREIGN not in node.meta:
            made = _foreign(node, kind)
            if made.world > 1:
                node.meta[FOREIGN] = made


def sending(node: fx.Node) -> Sending | None:
    """What a node sends to other ranks; None if it is no collective."""
    bucket: Bucket | None = node.meta.get("bucket")
    return node.meta.get(FOREIGN) if bucket is None else bucket


def _foreign(node: fx.Node, kind: str) -> Foreign:
    target: Any = node.target
    given = dict(zip((x.name for x in target._schema.arguments), node.args, strict=False))
    given |= node.kwargs
    named: Any = given["group_name"]
    group = group_of(named) if isinstance(named, str) else named
    world, name = group.size(), group.group_name
    operands: Any = node.args[0]
    tensors = [
        x
        for operand in (operands if isinstance(operands, (list, tuple)) else [operands])
        for x in tensors_of(operand)
    ]
    sent = sum(x.nbytes for x in tensors)
    nbytes = sent * world if kind == GATHER else sent
    # a ring's all-reduce is a reduce-scatter and then an all-gather
    wire = (2 if kind == ALL_REDUCE else 1) * nbytes * (world - 1) // world
    if kind == BROADCAST:
        wire = sent
    elif splits := [*given.get("input_split_sizes", ())]:  # pyright: ignore
        wire = sent * (sum(splits) - splits[dist.get_rank(group)]) // max(sum(splits), 1)
    return Foreign(kind, nbytes, wire, world, name, tensors[0].dtype, is_gloo(name))


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


_C10D = "_c10d_functional::"
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        f"{_C10D}{name}{more}": kind
        for name, kind in (
            ("all_reduce", ALL_REDUCE),
            ("all_gather_into_tensor", GATHER),
            ("reduce_scatter_tensor", REDUCE_SCATTER),
            ("all_to_all_single", EXCHANGE),
            (BROADCAST, BROADCAST),
        )
        for more in ("", "_", "_out", "_coalesced", "_coalesced_")
    }
    | {"_dtensor::shard_dim_alltoall": EXCHANGE}
)
"""What each of torch's operators does, by its name."""
