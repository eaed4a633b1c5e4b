"""How each leaf of a tree is split over the ranks of one axis: plain data, used everywhere.

[Note: names of a tensor]
    full          the whole leaf, of `shape`
    shard         this rank's rows of it along `dim`: rows `start` to `stop` of `bounds(rank)`
    padded shard  a shard filled up to `padded_rows`, the same on every rank: what collectives carry

Rows are dealt out as `torch.chunk` and `DTensor`'s `Shard(dim)` do: `ceil(rows / world)` to each
rank until none are left, so the last ranks may get fewer, or none. A leaf that has a `home` lies
otherwise: see [Note: flats].

[Note: flats] Where every leaf is cut into as many parts as there are ranks, what a gather brings
has the parts of each leaf in different places, and they have to be copied together. So leaves can
be laid end to end in a *flat* of some MiB, which is cut into equal parts, one a rank, whatever leaf
a border meets. A part is what a rank sends; what comes is the flat, and each leaf is a view of it.
A leaf is cut between rows only, so that a rank's part of it is rows of it, as everywhere: where a
border would fall into a row, the leaf begins a little later. The gaps travel, too: `plan_flats`
leaves as they were what would need too large ones.

A flat is gathered as a whole, and is there until the last of its leaves is read. Most else is alive
where forward turns into backward, at the last leaves, so flats become smaller towards there.

References:
    veScale-FSDP, arXiv:2602.22437 (RaggedShard), which cuts leaves at any row for the same reason;
    FSDP1's flat parameters, arXiv:2304.11277, which are cut at any element.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import lcm, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.errors import ShardError


class Home(NamedTuple):
    """The place of a leaf in its flat; see [Note: flats].

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


class Claims:
    """What of a flat is spoken for: leaves of two trees may ask for the same place of theirs.

    >>> claims = Claims()
    >>> a, b = (LeafLayout("w", (3,), torch.float32, 0, 2, home=Home(0, 4, at)) for at in (0, 2))
    >>> claims.claim(a), claims.claim(b)
    (True, False)
    """

    def __init__(self) -> None:
        self.ends: list[tuple[int, int]] = []

    def claim(self, leaf: LeafLayout) -> bool:
        """Whether a leaf's place was free; then it is its own. What has no home needs none."""
        if leaf.home is None:
            return True
        start, stop = leaf.home.offset, leaf.home.offset + leaf.numel
        at = bisect_left(self.ends, (start, stop))
        before = at > 0 and self.ends[at - 1][1] > start
        after = at < len(self.ends) and self.ends[at][0] < stop
        if not before and not after:
            self.ends.insert(at, (start, stop))
        return not before and not after


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


def plan_flats(layout: Layout, most: int, least: int = 2**20) -> Layout:
    """The same leaves, those that are small in flats; see [Note: flats].

    Args:
        layout: from `plan_layout`.
        most: bytes of full leaves in a flat at most; a leaf of as many stays as it is.
        least: bytes that a flat may have wherever it is.

    >>> leaves = [torch.zeros(4, 4), torch.zeros(8, 4), torch.zeros(4, 4), torch.zeros(5)]
    >>> print(plan_flats(plan_layout("abcd", leaves, world=2), 2**20))
    a   float32 (4, 4)  flat 0: rows 4, 0
    b   float32 (8, 4)  flat 0: rows 5, 3
    c   float32 (4, 4)  flat 0: rows 0, 4
    d   float32 (5,)    flat 0: rows 0, 5
    """
    if layout.world == 1:
        return layout
    found = list(layout.leaves)
    for number, indices in enumerate(_alike(layout, most, least)):
        leaves = [found[i] for i in indices]
        part, offsets = _end_to_end([leaf.shape for leaf in leaves], layout.world)
        # as they are, each would be filled up by itself
        if part > sum(prod(leaf.padded_shape) for leaf in leaves) * (1 + _WASTE):
            continue
        for i, offset in zip(indices, offsets, strict=True):
            found[i] = replace(found[i], dim=0, home=Home(number, part, offset))
    return replace(layout, leaves=tuple(found))


# Share of a flat by which gaps may exceed what filling up takes without them.
_WASTE = 1 / 16


def _alike(layout: Layout, most: int, least: int) -> Iterator[list[int]]:
    """Indices of leaves that share a flat: small ones that travel alike, in their order."""
    open_: dict[Any, list[int]] = {}
    room: dict[Any, int] = {}
    left = sum(leaf.nbytes for leaf in layout)
    for i, leaf in enumerate(layout):
        if leaf.dim is not None and leaf.nbytes < most:
            key = leaf.dtype, leaf.compute, leaf.reduce, leaf.trainable
            if key in open_ and leaf.nbytes > room[key]:
                yield open_.pop(key)
            if key not in open_:
                # a quarter of what is left: see [Note: flats]
                open_[key], room[key] = [], min(max(left // 4, least), most)
            open_[key].append(i)
            room[key] -= leaf.nbytes
        left -= leaf.nbytes
    yield from open_.values()


def _end_to_end(shapes: Sequence[tuple[int, ...]], world: int) -> tuple[int, list[int]]:
    """Elements of a rank's part of a flat, and where each leaf begins in it.

    >>> _end_to_end([(4, 4), (8, 4), (5,)], world=2)
    (28, [0, 16, 48])
    """
    sizes = [prod(shape) for shape in shapes]
    share = -(-sum(sizes) // world)
    rows = [size // shape[0] for size, shape in zip(sizes, shapes, strict=True)]
    # a leaf that more than one border meets has rows between any two
    step = lcm(*(row for row, size in zip(rows, sizes, strict=True) if size > share))
    part = -(-share // step) * step
    while True:
        offsets = list(_placed(rows, sizes, part))
        if offsets[-1] + sizes[-1] <= world * part:
            return part, offsets
        part += step


def _placed(rows: Sequence[int], sizes: Sequence[int], part: int) -> Iterator[int]:
    """Where leaves begin, each as soon after the one before as borders between rows allow."""
    end = 0
    for row, size in zip(rows, sizes, strict=True):
        border = -(-(end + 1) // part) * part
        if end + size > border:
            end = border - (border - end) // row * row
        yield end
        end += size


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
