"""Norms, means and matrices of whole leaves, for optimizers that are given parts of them.

[Note: parts of an optimizer] An optimizer runs on what a rank has of each leaf: plain tensors in a
step, which says with `whole_leaves` what they are parts of; DTensors outside, which say it
themselves; whole tensors where nothing is sharded. `splits` tells which it is, leaf by leaf. A
statistic of a whole leaf is then a sum over ranks, and all leaves' statistics share one message
(`summed`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Private, and used as in `fzero.optim.whole`: a mesh is looked up outside of what is recorded.
from torch.utils._python_dispatch import _disable_current_modes

from fzero import tree
from fzero.distributed.collectives import all_reduce
from fzero.distributed.dtensor import from_local_like, local_tensor
from fzero.distributed.mesh import Axis, resolve_mesh
from fzero.distributed.ragged import rows_of
from fzero.errors import ShardError
from fzero.layout import LeafLayout
from fzero.optim.base import PyTree
from fzero.optim.whole import given_leaves


class Split(NamedTuple):
    """How one leaf that an optimizer was given lives.

    Attributes:
        leaf: its name, whole shape, dtype, and the dim along which ranks have parts of it; None:
            each has all of it.
        axis: the ranks that work on the leaf together.
        device_type: where collectives over them run.
    """

    leaf: LeafLayout
    axis: Axis
    device_type: str

    @property
    def is_split(self) -> bool:
        """Whether this rank has a part only."""
        return self.leaf.dim is not None and self.axis.size > 1

    @property
    def bounds(self) -> tuple[int, int]:
        """First and one-past-last row of this rank's part along `leaf.dim`."""
        return self.leaf.bounds(self.axis.rank)


def splits(values: PyTree, where: str) -> list[Split]:
    """How each leaf lives; see [Note: parts of an optimizer].

    Args:
        values: params or gradients as an optimizer is given them, or some leaves of them.
        where: who asks, for messages.

    Raises:
        ShardError: a leaf is no floating tensor, or a DTensor that is split in another way than
            along one dim over one axis.

    Examples:
        >>> (split,) = splits({"w": torch.ones(3, 2)}, "lamb")
        >>> split.leaf.name, split.leaf.shape, split.is_split
        ('w', (3, 2), False)
    """
    leaves, paths, names = tree.leaves(values), tree.paths(values), tree.names(values)
    given = given_leaves()
    found = []
    for x, path, name in zip(leaves, paths, names, strict=True):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ShardError(
                f"{where}: the leaf {path or 'given'} is {kind}, and an optimizer trains real "
                "floating tensors. Keep others out of the tree of params, or None in their place."
            )
        if isinstance(x, DTensor):
            found.append(_of_dtensor(x, name, f"{where}: the leaf {path or 'given'}"))
            continue
        if given is None or given.axis.size == 1:
            leaf = LeafLayout(name, tuple(x.shape), x.dtype)
            found.append(Split(leaf, Axis(), x.device.type))
            continue
        known = given.by_path.get(path)
        if known is None or tuple(x.shape) != known.part:
            raise ShardError(
                f"{where}: it was given {path or 'a leaf'} {tuple(x.shape)}, which is no part of "
                f"the step's parameters ({', '.join(list(given.by_path)[:5])}, ...), so nobody can "
                "tell what it is a part of. Pass on the trees of params and gradients in the "
                "structure that they came in."
            )
        size = given.axis.size
        leaf = LeafLayout(name, known.shape, x.dtype, known.dim, size, home=known.home)
        found.append(Split(leaf, given.axis, given.device_type or x.device.type))
    return found


def _of_dtensor(x: DTensor, name: str, where: str) -> Split:
    split = [i for i, placement in enumerate(x.placements) if not placement.is_replicate()]
    mesh, shape = x.device_mesh, tuple(x.shape)
    if not split:
        return Split(LeafLayout(name, shape, x.dtype), Axis(), mesh.device_type)
    known = rows_of(x) if split == [mesh.ndim - 1] else None
    if known is None:
        raise ShardError(
            f"{where} has the placements {x.placements}; an optimizer takes leaves that are split "
            "along one dim over the last axis of the mesh, or whole. Make them with fzero.shard."
        )
    with _disable_current_modes():
        axis = resolve_mesh(mesh, mesh.device_type).axes.shard
    dim, home = known
    leaf = LeafLayout(name, shape, x.dtype, dim, axis.size, home=home)
    return Split(leaf, axis, mesh.device_type)


def summed(shares: Sequence[Tensor], lie: Sequence[Split], name: str) -> list[Tensor]:
    """Each share summed over the ranks that its leaf is split over; of whole leaves as it is.

    Args:
        shares: of any shapes, the same on every rank; small, for they travel as float64.
        lie: how the leaf lives that each is a share of.
        name: of the statistic, for listings.

    Returns:
        float64, on the shares' devices. One all-reduce brings all of them.

    Examples:
        >>> lie = splits([torch.ones(2)], "lamb")
        >>> summed([torch.tensor(2.0)], lie, "norm")
        [tensor(2., dtype=torch.float64)]
    """
    found = [x.double() for x in shares]
    by_axis: dict[tuple[Axis, str], list[int]] = {}
    for i, split in enumerate(lie):
        if split.is_split:
            by_axis.setdefault((split.axis, split.device_type), []).append(i)
    for (axis, device_type), rows in by_axis.items():
        # masters may be in host memory, while the collectives run on a device
        flat = torch.cat([found[i].reshape(-1).to(device_type) for i in rows])
        parts = all_reduce(flat, axis, name).split([found[i].numel() for i in rows])
        for i, part in zip(rows, parts, strict=True):
            found[i] = part.view(found[i].shape).to(found[i].device)
    return found


def squares(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The sum of squares of what this rank has of each leaf: 0-d, float64.

    >>> squares([torch.tensor([3.0, 4.0]), torch.zeros(0)])
    [tensor(25., dtype=torch.float64), tensor(0., dtype=torch.float64)]
    """
    # squares of float32 have twice its exponents: in float64 none overflows or vanishes
    return [torch.linalg.vector_norm(local_tensor(x), dtype=torch.float64).square() for x in leaves]


def like_given(parts: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """This rank's parts of leaves, as DTensors where the leaves were given as such.

    >>> like_given([torch.ones(2)], [torch.zeros(2)])
    [tensor([1., 1.])]
    """
    return [from_local_like(x, other) for x, other in zip(parts, given, strict=True)]
