"""Leaves laid end to end, so that what travels together is used where it arrives.

[Note: flats] Where every leaf is cut into as many parts as there are ranks, what a gather brings
has the parts of each leaf in different places, and they have to be copied together. So leaves can
be laid end to end in a *flat* of some MiB, which is cut into equal parts, one a rank, whatever leaf
a border meets. A part is what a rank sends; what comes is the flat, and each leaf is a view of it.
A leaf is cut between rows only, so that a rank's part of it is rows of it, as everywhere: where a
border would fall into a row, the leaf begins a little later. The gaps travel, too: `plan_flats`
leaves as they were what would take a hundredth more than filling up rows does.

A flat is gathered as a whole, and is there until the last of its leaves is read. So its leaves are
used one after the other: a tree is cut into *sections*, between its blocks (`layers.3`), and what
travels alike in a section is a flat. Modules in no list may be used at any time (embeddings,
heads): what is large of them is a section of its own. Leaves that travel otherwise (in another
dtype, frozen, too large) have a share in the size of a section, and no flat reaches into two of
them: what gathers module by module gathers section by section. What is alive at a time is a few
flats, beside most else where forward turns into backward, and beside what is reduced where backward
ends. So sections are a tenth of the tree wherever they are, within bounds.

References:
    veScale-FSDP, arXiv:2602.22437 (RaggedShard), which cuts leaves at any row for the same reason;
    FSDP1's flat parameters, arXiv:2304.11277, which are cut at any element.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Any

from torch import Tensor

from fzero.layout.layout import Home, Layout, LeafLayout
from fzero.layout.modules import (
    block_of,
    is_numbered,
    module_of,
    module_within,
    natural_order,
    runs,
)


class Claims:
    """What of a flat is spoken for: leaves of two trees may ask for the same place of theirs.

    >>> import torch
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


def plan_flats(
    layout: Layout, most: int, least: int = 2**20, together: Sequence[str] = ()
) -> Layout:
    """The same leaves, those that are small in flats; see [Note: flats].

    Args:
        layout: from `plan_layout`.
        most: bytes of full leaves that a section is not to exceed by half a block; a leaf of as
            many stays as it is.
        least: bytes that a section may have of a tree however small.
        together: globs over modules that no flat is to reach out of: see `module_within`.

    >>> from fzero.layout import plan_layout
    >>> import torch
    >>> leaves = [torch.zeros(4, 4), torch.zeros(8, 4), torch.zeros(4, 4), torch.zeros(8)]
    >>> print(plan_flats(plan_layout("abcd", leaves, world=2), 2**20))
    a   float32 (4, 4)  flat 0: rows 4, 0
    b   float32 (8, 4)  flat 0: rows 5, 3
    c   float32 (4, 4)  flat 0: rows 0, 4
    d   float32 (8,)    flat 0: rows 0, 8
    """
    if layout.world == 1:
        return layout
    found = list(layout.leaves)
    sections = _sections(found, most, least, together)
    flats = (flat for section in sections for flat in _alike(found, section, most))
    for number, indices in enumerate(flats):
        leaves = [found[i] for i in indices]
        part, offsets = _end_to_end([leaf.shape for leaf in leaves], layout.world)
        # one that is cut evenly travels without a copy as it is
        if len(leaves) == 1 and leaves[0].shape[0] % layout.world == 0:
            continue
        # as they are, each would be filled up by itself
        if part > sum(prod(leaf.padded_shape) for leaf in leaves) * (1 + _WASTE):
            continue
        for i, offset in zip(indices, offsets, strict=True):
            found[i] = replace(found[i], dim=0, home=Home(number, part, offset))
    return replace(layout, leaves=tuple(found))


def are_many_and_small(leaves: Sequence[Tensor]) -> bool:
    """Whether copies of full leaves cost calls rather than bytes, and so many that it tells.

    >>> import torch
    >>> small, large = (torch.empty(n, n, device="meta") for n in (64, 256))
    >>> [are_many_and_small(x) for x in ([small] * 1000, [large] * 1000, [small] * 100)]
    [True, False, False]
    """
    total = sum(x.numel() for x in leaves)
    return _TELLS <= total <= _SMALL * len(leaves)


def by_flat(leaves: Sequence[LeafLayout], order: Sequence[int]) -> list[list[int]]:
    """Leaves in this order, one by one; those of a flat together, with the last of them.

    >>> import torch
    >>> homes = [Home(0, 8, 0), None, Home(0, 8, 8), None]
    >>> leaves = [LeafLayout("w", (8,), torch.float32, 0, 2, home=home) for home in homes]
    >>> by_flat(leaves, [0, 1, 2, 3])
    [[1], [0, 2], [3]]
    """
    parts: dict[Any, list[int]] = {}
    for index in order:
        home = leaves[index].home
        key = index if home is None else (home.flat, home.part)
        parts[key] = [*parts.pop(key, []), index]  # behind all that came before its last leaf
    return list(parts.values())


# Bytes of a module in no list that is a section of its own.
_APART = 2**21
# Mean elements of leaves that are small, and how many of all of them are worth the while.
_SMALL, _TELLS = 2**13, 2**20
# Share of a tree that a section has.
_SECTION = 1 / 10
# Share of a flat by which gaps may exceed what filling up takes without them.
_WASTE = 1 / 100


def _sections(
    leaves: Sequence[LeafLayout], most: int, least: int, together: Sequence[str]
) -> Iterator[list[int]]:
    """Indices of leaves in sections of about so many bytes; see [Note: flats]."""
    section: list[int] = []
    size = min(max(int(_SECTION * sum(leaf.nbytes for leaf in leaves)), least), most)
    room, kind = 0, None
    for part in _parts(leaves, most):
        nbytes = sum(leaves[i].nbytes for i in part)
        name = leaves[part[0]].name
        # a list's modules are used between those before and those behind it
        large = nbytes >= _APART and not is_numbered(name)
        new = part if large else is_numbered(name), module_within(name, together)
        # to the nearest: half of a part may be too much
        if section and (nbytes > 2 * room or new != kind):
            yield section
            section = []
        if not section:
            room, kind = size, new
        section += part
        room -= nbytes
    yield section


def _parts(leaves: Sequence[LeafLayout], most: int) -> Iterator[list[int]]:
    """Indices of leaves by block; by module or one by one where that is too large."""
    names = [leaf.name for leaf in leaves]

    def is_small(part: list[int]) -> bool:
        return sum(leaves[i].nbytes for i in part) <= most

    # a leaf of no module is a part
    for block in runs(natural_order(names), lambda i: block_of(names[i]) or names[i]):
        parts = [block] if is_small(block) else runs(block, lambda i: module_of(names[i]))
        for part in parts:
            yield from [part] if is_small(part) else [[i] for i in part]


def _alike(leaves: Sequence[LeafLayout], section: Sequence[int], most: int) -> list[list[int]]:
    """Those of a section that share a flat: small ones that travel alike."""
    flats: dict[Any, list[int]] = {}
    for i in section:
        leaf = leaves[i]
        if leaf.dim is not None and leaf.nbytes < most:
            kind = leaf.dtype, leaf.compute, leaf.reduce, leaf.trainable
            flats.setdefault(kind, []).append(i)
    return list(flats.values())


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
