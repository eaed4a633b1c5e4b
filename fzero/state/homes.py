"""Parameters that are whole on every rank, laid end to end as the flats in which they travel.

[Note: at home] At stages 1 and 2 an update writes this rank's part of a parameter, and the rest
comes from the other ranks. With `Config(layout="flat")` leaves travel in flats. Where the leaves of
a flat lie in memory as the flat does, what comes is received where it belongs, and nothing is
copied: see `program.passes.over`. It is a matter of where parameters are, not of their values.
Leaves that are elsewhere, of a checkpoint or a user's own tree, are copied there by the first step
that gets them; and a gather that does find them elsewhere brings a buffer, over the same wire.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fzero.distributed.buckets import Places, flat_of
from fzero.functional.owners import noted_like
from fzero.layout import LeafLayout
from fzero.state.masters import copied


class Homes:
    """The flats of leaves that are whole on every rank.

    Args:
        leaves: of which those with a home are in flats.

    Examples:
        >>> from fzero.layout.flats import plan_flats
        >>> from fzero.layout import plan_layout
        >>> params = [torch.arange(8.0).view(4, 2), torch.ones(4)]
        >>> homes = Homes(plan_flats(plan_layout("ab", params, world=2), 2**20).leaves)
        >>> moved = homes.settled(params)
        >>> moved[1].storage_offset(), all(map(torch.equal, moved, params)), homes.gaps
        (8, True, 0)
        >>> homes.settled(moved) is moved, homes.copies(moved)[1].storage_offset()
        (True, 8)
    """

    def __init__(self, leaves: Sequence[LeafLayout]) -> None:
        members: dict[int, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if leaf.home is not None:
                members.setdefault(leaf.home.flat, []).append(i)
        self.flats = [_Flat.of(number, indices, leaves) for number, indices in members.items()]

    @property
    def members(self) -> Mapping[int, int]:
        """How many leaves each flat has, by its number."""
        return {flat.number: len(flat.indices) for flat in self.flats}

    @property
    def gaps(self) -> int:
        """Bytes of the flats between leaves."""
        return sum(flat.gap for flat in self.flats)

    def settled(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The leaves, those of each flat at home in it: they are copied if they are elsewhere."""
        found: list[Tensor] | None = None
        for flat in self.flats:
            mine = list(map(tensors.__getitem__, flat.indices))
            if flat_of(mine, flat.places.starts, flat.numel) is None:
                found = list(tensors) if found is None else found
                for i, x in zip(flat.indices, flat.filled(mine), strict=True):
                    found[i] = x
        return tensors if found is None else found

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the leaves, those of each flat at home in it."""
        found: list[Tensor | None] = [None] * len(tensors)
        for flat in self.flats:
            mine = flat.filled([tensors[i] for i in flat.indices])
            for i, x in zip(flat.indices, mine, strict=True):
                found[i] = x
        return [copied(x) if new is None else new for x, new in zip(tensors, found, strict=True)]

    def stand_ins(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a step is staged out for, wherever the leaves are: each dense and by itself.

        Leaves of one memory would seem to write over each other.
        """
        found = list(tensors)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for i in (i for flat in self.flats for i in flat.indices):
                x = tensors[i]
                found[i] = noted_like(torch.empty(x.shape, dtype=x.dtype, device=x.device), x)
        return found


class _Flat(NamedTuple):
    """One of them.

    Args:
        number: in its layout.
        indices: of its leaves, among all.
        places: where they lie in it.
        numel: its elements.
        gap: bytes between them.
    """

    number: int
    indices: list[int]
    places: Places
    numel: int
    gap: int

    @classmethod
    def of(cls, number: int, indices: list[int], leaves: Sequence[LeafLayout]) -> "_Flat":
        mine = [leaves[i] for i in indices]
        homes = [leaf.home for leaf in mine if leaf.home is not None]
        numel = homes[0].part * mine[0].world
        places = Places.of([leaf.shape for leaf in mine]).at(home.offset for home in homes)
        gap = numel - sum(leaf.numel for leaf in mine)
        return cls(number, indices, places, numel, gap * mine[0].dtype.itemsize)

    @torch.no_grad()
    def filled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """These leaves in a flat of their own."""
        views = self.places.views(tensors[0].new_zeros(self.numel))
        torch._foreach_copy_(views, list(tensors))
        pairs = zip(views, tensors, strict=True)
        return [noted_like(view, x).requires_grad_(x.requires_grad) for view, x in pairs]
