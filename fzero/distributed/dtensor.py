"""DTensors at a thousand leaves a step: the constructor without the checks.

`DTensor.from_local` checks and infers what a layout already knows, at 23 to 56 us a leaf; with a
spec made once per layout, wrapping costs 3 us. Inside a step tensors are plain: DTensors are only
what the user holds between steps.
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

# Private. The public alternative is `DTensor.from_local(local, mesh, placements, run_check=False,
# shape=shape, stride=stride)`; tests/distributed/test_dtensor.py holds the two against each other.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fzero.distributed.ragged import RaggedDTensor, Rows, check_rows, redistribute


def dtensor_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """What a DTensor is besides its local tensor. Make it once per leaf and keep it.

    Args:
        mesh: the mesh that the leaf is spread over.
        placements: one per axis of the mesh; at most one is `Rows`, beside copies.
        shape: of the full tensor.
        stride: of the full tensor, in elements.
        dtype: of the full tensor and of every shard.

    Raises:
        ShardError: `Rows` that do not fit the shape or the mesh.
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    check_rows(spec)
    return spec


def from_spec(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """`local` as this rank's part of the DTensor that `spec` describes; shares memory.

    Args:
        local: this rank's shard, outside of autograd; its shape must be what DTensor expects on
            this rank (`torch.chunk`'s, without padding; with `Rows`, the rows between its borders).
        spec: from `dtensor_spec`.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> mesh = resolve_mesh(None, "cpu")
    >>> spec = dtensor_spec(mesh.device_mesh, mesh.placements(0), (2, 3), (3, 1), torch.float32)
    >>> from_spec(torch.ones(2, 3), spec).full_tensor().shape
    torch.Size([2, 3])
    """
    return type_of(spec)(local, spec, requires_grad=False)


def type_of(spec: DTensorSpec) -> type[DTensor]:
    """The class of a DTensor that `spec` describes."""
    return RaggedDTensor if Rows in map(type, spec.placements) else DTensor


def from_local_like(local: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`local` as this rank's part of a DTensor that lies as `other` does; as it is if that is none.

    >>> from_local_like(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    if not isinstance(other, DTensor):
        return local
    spec = other._spec
    meta = dtensor_spec(spec.mesh, spec.placements, spec.shape, spec.stride, local.dtype)
    return from_spec(local, meta)


def shard_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor`, the same on every rank or a DTensor, placed as `other` is.

    A plain tensor is cut without communication. Where `other` is none, it is whole.

    >>> shard_like(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    if not isinstance(other, DTensor):
        return whole_tensor(tensor)
    if isinstance(tensor, DTensor):
        mesh, placements = other.device_mesh, other.placements
        if isinstance(other, RaggedDTensor):
            return redistribute(tensor, mesh, placements)
        return tensor if tensor.placements == placements else tensor.redistribute(mesh, placements)
    if tensor.shape != other.shape:  # a 0-d factor, or what broadcasts: every rank needs it whole
        return tensor
    local = tensor.detach()
    mesh = other.device_mesh
    # without a process group there is one rank, which has no coordinate
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    for axis, placement in enumerate(other.placements):
        if isinstance(placement, Rows):
            start, stop = placement.of(coordinate[axis])
            local = local[start:stop]
        elif isinstance(placement, Shard):
            size, rank = mesh.size(axis), coordinate[axis]
            rows = local.shape[placement.dim]
            step = -(-rows // size)
            start, stop = min(rank * step, rows), min((rank + 1) * step, rows)
            local = local.narrow(placement.dim, start, stop - start)
    # in memory of its own: a view would keep the whole tensor
    return from_local_like(local.clone(memory_format=torch.contiguous_format), other)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor, which every rank must ask for; any other as it is.

    >>> whole_tensor(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor whose open sums (maxima, norms) over ranks are made, which every rank must ask for;
    what has none as it is.

    >>> settled(torch.ones(2))
    tensor([1., 1.])
    """
    if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    closed = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=closed)


def beside(tensor: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """An operand placed as the DTensor of one row (column) that it is written into.

    Torch's rules take no dim of size 1 for split, so what is written would have to move, which
    they refuse. Nothing is sent but what is open or lies otherwise; of any other size they do it.

    Args:
        tensor: a DTensor whose shape broadcasts to that of `written`; anything else comes back.

    >>> beside(torch.ones(1), torch.zeros(1))
    tensor([1.])
    """
    if not isinstance(tensor, DTensor) or not isinstance(written, DTensor) or tensor is written:
        return tensor
    one = any(isinstance(p, Shard) and written.shape[p.dim] == 1 for p in written.placements)
    ahead = written.dim() - tensor.dim()
    if not one or ahead < 0:
        return tensor
    placements = [
        Shard(goal.dim - ahead)
        if type(goal) is Shard
        and goal.dim >= ahead
        and tensor.shape[goal.dim - ahead] == written.shape[goal.dim]
        else (own if own == goal else Replicate())
        for own, goal in zip(tensor.placements, written.placements, strict=True)
    ]
    return redistribute(tensor, tensor.device_mesh, placements)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor as it is.

    >>> local_tensor(torch.ones(2))
    tensor([1., 1.])
    """
    # `to_local` goes through autograd, 15 us; shards here have no graph.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sum_over_parts(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of `x` over the ranks that a DTensor is split over, one value on all of them.

    Args:
        x: this rank's share, made of its part of `other`.
        other: a DTensor; ranks that hold the same part of it have the same `x`.

    >>> sum_over_parts(torch.ones(()), torch.zeros(2))
    tensor(1.)
    """
    if not isinstance(other, DTensor) or not is_split(other):
        return x
    placements = [
        Partial() if isinstance(p, Shard | Rows) else Replicate() for p in other.placements
    ]
    return DTensor.from_local(x, other.device_mesh, placements, run_check=False).full_tensor()


def is_split(x: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor of which each rank has a part.

    >>> is_split(torch.ones(2))
    False
    """
    return isinstance(x, DTensor) and any(isinstance(p, Shard | Rows) for p in x.placements)
