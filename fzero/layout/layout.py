"""How each leaf of a tree is split over the ranks of one axis: plain data, used everywhere.

[Note: names of a tensor]
    full          the whole leaf, of `shape`
    shard         this rank's rows of it along `dim`: rows `start` to `stop` of `bounds(rank)`
    padded shard  a shard filled up to `padded_rows`, the same on every rank: what collectives carry

Rows are dealt out as `torch.chunk` and `DTensor`'s `Shard(dim)` do: `ceil(rows / world)` to each
rank until none are left, so the last ranks may get fewer, or none. A leaf that has a `home` lies
otherwise: see `fzero.layout.flats`, [Note: flats].
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.errors import ShardError


class Home(NamedTuple):
    """The place of a leaf in its flat; see `fzero.layout.flats`, [Note: flats].

    Args:
        flat: the flat's number in its layout.
        part: elements of the flat that each rank has.
        offset: of the leaf's first element in the flat.
    """

    flat: int
    part: int
    offset: int


@dataclass(frozen=True)
class LeafLayout:
    """Where the rows of one leaf live.

    Args:
        name: the leaf's dotted name, for messages, listings and globs.
        shape: of the full leaf.
        dtype: at rest, on the shard.
        dim: the dim it is split along; None keeps it whole on every rank.
        world: ranks that it is split over.
        trainable: False for frozen and for non-floating leaves: no gradient travels.
        compute: dtype it is gathered in; None means `dtype`.
        reduce: dtype its gradient is summed in; None means the gradient's own.
        home: its place in a flat; `dim` is 0 then. None: its rows are dealt out by themselves.

    Examples:
        >>> leaf = LeafLayout("w", (7, 3), torch.float32, dim=0, world=4)
        >>> [leaf.bounds(rank) for rank in range(4)], leaf.padded_rows
        ([(0, 2), (2, 4), (4, 6), (6, 7)], 2)
        >>> leaf = LeafLayout("w", (7, 3), torch.float32, dim=0, world=2, home=Home(0, 20, 5))
        >>> [leaf.bounds(rank) for rank in range(2)], leaf.padded_rows
        ([(0, 5), (5, 7)], 5)
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None
    world: int = 1
    trainable: bool = True
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    home: Home | None = None

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the full leaf."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the full leaf in the dtype it is gathered in."""
        return self.numel * (self.compute or self.dtype).itemsize

    @functools.cached_property
    def padded_rows(self) -> int:
        """Rows along `dim` of the padded shard."""
        assert self.dim is not None
        if self.home is not None:
            return max(stop - start for start, stop in map(self.bounds, range(self.world)))
        return -(-self.shape[self.dim] // self.world)

    @functools.cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the padded shard, with `dim` moved to the front."""
        assert self.dim is not None
        rest = self.shape[: self.dim] + self.shape[self.dim + 1 :]
        return (self.padded_rows, *rest)

    def bounds(self, rank: int) -> tuple[int, int]:
        """First and one-past-last row of `rank`'s shard."""
        if self.dim is None:
            raise ShardError(f"{self.name!r} is kept whole on every rank; it has no row bounds")
        rows = self.shape[self.dim]
        if self.home is not None:
            _, part, offset = self.home
            row = self.numel // rows
            # clamped first: only borders that fall into this leaf are between its rows
            ends = (min(max(border * part - offset, 0), self.numel) for border in (rank, rank + 1))
            start, stop = (end // row for end in ends)
            return start, stop
        return min(rank * self.padded_rows, rows), min((rank + 1) * self.padded_rows, rows)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of `rank`'s shard."""
        if self.dim is None:
            return self.shape
        start, stop = self.bounds(rank)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])

    def split(self, full: Tensor, rank: int) -> Tensor:
        """`rank`'s shard of `full`, as a view."""
        if self.dim is None:
            return full
        start, stop = self.bounds(rank)
        return full.narrow(self.dim, start, stop - start)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The full leaf from every rank's shard: the inverse of `split`.

        >>> leaf = LeafLayout("w", (7, 3), torch.float32, dim=0, world=4)
        >>> full = torch.randn(7, 3)
        >>> torch.equal(leaf.join([leaf.split(full, rank) for rank in range(4)]), full)
        True
        """
        return shards[0] if self.dim is None else torch.cat(list(shards), self.dim)


class Together(tuple[LeafLayout, ...]):
    """Leaves that travel together again and again: their hash, by which plans are found, is kept.

    >>> leaves = Together([LeafLayout("w", (7, 3), torch.float32)])
    >>> {leaves: "a plan"}[tuple(leaves)]
    'a plan'
    """

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Layout:
    """One `LeafLayout` per leaf, in the tree's order. Printable and comparable.

    >>> print(plan_layout(["b", "w"], [torch.zeros(()), torch.zeros(8, 3)], world=4))
    b   float32 ()      whole
    w   float32 (8, 3)  dim 0: 2 rows of 8 a rank
    """

    leaves: tuple[LeafLayout, ...]
    world: int

    def __iter__(self) -> Iterator[LeafLayout]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    @functools.cached_property
    def trained(self) -> list[LeafLayout]:
        """The leaves that get a gradient."""
        return [leaf for leaf in self.leaves if leaf.trainable]

    def divide(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """One value per leaf as (trained, frozen).

        >>> ab, leaves = ["a", "b"], [torch.ones(2)] * 2
        >>> layout = plan_layout(ab, leaves, 1, frozen=lambda name: name == "a")
        >>> layout.divide("xy"), layout.merge(*layout.divide("xy"))
        ((('y',), ('x',)), ('x', 'y'))
        """
        if len(values) != len(self.leaves):
            raise ValueError(f"{len(values)} values for {len(self.leaves)} leaves")
        trainable, frozen = self._chosen
        return tuple(compress(values, trainable)), tuple(compress(values, frozen))

    def merge(self, trained: Sequence[Any], frozen: Sequence[Any]) -> tuple[Any, ...]:
        """The inverse of `divide`."""
        if not frozen:
            return tuple(trained)
        ours, theirs = iter(trained), iter(frozen)
        return tuple(next(ours) if leaf.trainable else next(theirs) for leaf in self.leaves)

    @functools.cached_property
    def _chosen(self) -> tuple[list[bool], list[bool]]:
        """Which leaves are trained, and which are not."""
        trainable = [leaf.trainable for leaf in self.leaves]
        return trainable, [not chosen for chosen in trainable]

    def __str__(self) -> str:
        rows = [
            (leaf.name, f"{str(leaf.dtype).removeprefix('torch.')} {leaf.shape}", _where(leaf))
            for leaf in self.leaves
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        return "\n".join(f"{a:{widths[0]}}   {b:{widths[1]}}  {c}" for a, b, c in rows)


def plan_layout(
    names: Sequence[str],
    leaves: Sequence[Tensor],
    world: int,
    *,
    frozen: Callable[[str], bool] = lambda name: False,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
) -> Layout:
    """Decide how to split every leaf over `world` ranks.

    A leaf is split along its first dim that wastes less than a sixteenth in padding rows, or else
    along the one that wastes least; scalars and empty leaves stay whole.

    Args:
        names: one per leaf.
        leaves: tensors of any shape and dtype; only shape and dtype are read.
        world: ranks to split over.
        frozen: says of a name whether its leaf gets no gradient.
        compute, reduce: see `LeafLayout`; applied to trainable floating leaves, and `compute` to
            frozen floating ones.
    """

    def one(name: str, leaf: Tensor) -> LeafLayout:
        floating = leaf.is_floating_point() or leaf.is_complex()
        low = compute if leaf.is_floating_point() and compute != leaf.dtype else None
        return LeafLayout(
            name,
            tuple(leaf.shape),
            leaf.dtype,
            _choose_dim(tuple(leaf.shape), world),
            world,
            trainable=floating and not frozen(name),
            compute=low,
            reduce=reduce if leaf.is_floating_point() else None,
        )

    return Layout(tuple(map(one, names, leaves)), world)


def uneven_bytes(parts: Iterable[tuple[LeafLayout, int]], rank: int) -> int:
    """How many bytes more than `rank` the rank with the largest shards holds.

    Args:
        parts: leaves, and the bytes that are held for each element of a shard.

    >>> leaf = LeafLayout("w", (7, 3), torch.float32, dim=0, world=4)
    >>> [uneven_bytes([(leaf, 4)], rank) for rank in range(4)]
    [0, 0, 0, 12]
    """
    split = [(leaf, each) for leaf, each in parts if leaf.dim is not None]

    def held(rank: int) -> int:
        return sum(prod(leaf.shard_shape(rank)) * each for leaf, each in split)

    # rows that are dealt out give the first rank the most; in flats it may be any
    flat = max((leaf.world for leaf, _ in split if leaf.home is not None), default=1)
    return max(map(held, range(flat))) - held(rank)


def _choose_dim(shape: tuple[int, ...], world: int) -> int | None:
    if not shape or 0 in shape:
        return None
    # padded size over size; lower dims first, because dim 0 needs no transposition on the way
    waste = [-(-rows // world) * world / rows for rows in shape]
    good = [dim for dim, ratio in enumerate(waste) if ratio < 17 / 16]
    return good[0] if good else waste.index(min(waste))


def _where(leaf: LeafLayout) -> str:
    if leaf.dim is None:
        return "whole"
    text = f"dim {leaf.dim}: {leaf.padded_rows} rows of {leaf.shape[leaf.dim]} a rank"
    if leaf.home is not None:
        rows = ", ".join(str(stop - start) for start, stop in map(leaf.bounds, range(leaf.world)))
        text = f"flat {leaf.home.flat}: rows {rows}"
    return text if leaf.trainable else text + ", frozen"
