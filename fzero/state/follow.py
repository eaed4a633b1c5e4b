"""Masters follow their parameters: what was written into a parameter is what is trained.

[Note: masters follow] Between steps a parameter is its master's cast, bit for bit: the update that
wrote the master published it. An element of which that is not so was written by somebody else: a
checkpoint of parameters alone, `p.data.clamp_()`, an average that was swapped in. There the master
starts from the parameter, and everywhere else it keeps the digits that the parameter has no room
for. Nothing counts writes, so none goes unseen; and a master that alone was written is undone: the
parameter is what a model computes with, and so what counts.

Reading a master here costs as much as it would inside of the update: in blocks, each compared just
before the fused kernel reads it, the two together take as long.

On the host a comparison of bits decides whether there is anything to do: a cast, a difference and
its largest byte, block by block in a core's cache. A device is not asked, for the answer would
have to be waited for: it selects element by element.
"""

# torch._foreach_* have no public names.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.numerics.bits import bits
from fzero.optim.foreach import by_group, temporary_bytes


def follow_(masters: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Overwrite `masters` where `parts` are not their casts.

    Args:
        masters: this rank's, one per trained leaf.
        parts: of the parameters, what the masters are of; in their dtypes, on their devices.

    Examples:
        >>> master = torch.tensor([1.001, 2.002])
        >>> part = master.bfloat16()
        >>> part[1] = 5.0
        >>> follow_([master], [part])
        >>> master
        tensor([1.0010, 5.0000])
    """
    Follower(masters, parts)(masters, parts)


@torch.no_grad()
def followed(master: Tensor, part: Tensor) -> Tensor:
    """The master as the next update will find it; `master` itself if that is what it is.

    Examples:
        >>> master = torch.tensor([1.001])
        >>> followed(master, master.bfloat16()) is master
        True
        >>> followed(master, torch.zeros(1, dtype=torch.bfloat16)), master
        (tensor([0.]), tensor([1.0010]))
    """
    part = part.to(master.device)
    follower = Follower([master], [part], compares=True)
    return _selected(master, part) if any(follower.differ([master], [part])) else master


class Follower:
    """`follow_` again and again for leaves that are each time like these.

    A step takes about a microsecond for each leaf and reads masters and parameters once; what can
    be made beforehand is kept. Threads may call one at once.

    Args:
        masters, parts: as `follow_` takes them; kept are their shapes, dtypes and devices.
        compares: whether to compare first; None: on the host.
    """

    def __init__(
        self, masters: Sequence[Tensor], parts: Sequence[Tensor], *, compares: bool | None = None
    ) -> None:
        compared: list[Piece] = []
        selected: list[Piece] = []
        for i, (master, part) in enumerate(zip(masters, parts, strict=True)):
            is_complex = master.is_complex()
            if is_complex:
                master, part = torch.view_as_real(master), torch.view_as_real(part)
            asks = master.device.type == "cpu" if compares is None else compares
            limit = _BLOCK if asks else temporary_bytes(master.device) // master.itemsize
            (compared if asks else selected).extend(_pieces(i, is_complex, master, part, limit))
        self._groups = [Group.of_pieces(pieces) for pieces in _groups(compared)]
        self._selected = Group.of_pieces(selected)
        self._free: list[list[_Room]] = []

    def __call__(self, masters: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Overwrite `masters` where `parts` are not their casts."""
        with torch.no_grad():
            for group, differs in zip(self._groups, self.differ(masters, parts), strict=True):
                if differs:
                    _select_(*group.of(masters, parts))
            if self._selected.pieces:
                mine, theirs = self._selected.of(masters, parts)
                by_group(_select_, mine, theirs, max_bytes=temporary_bytes)

    def differ(self, masters: Sequence[Tensor], parts: Sequence[Tensor]) -> Iterator[bool]:
        """Group by group, whether any bit of `parts` is not that of the masters' casts."""
        if not self._groups:
            return
        try:
            rooms = self._free.pop()
        except IndexError:
            rooms = _rooms(self._groups)
        for group, room in zip(self._groups, rooms, strict=True):
            yield _differs(*group.of(masters, parts), room)
        self._free.append(rooms)


class Piece(NamedTuple):
    """Some rows of a leaf: its number, the rows (None: the whole leaf), and what it is like."""

    leaf: int
    rows: tuple[int, int] | None
    complex: bool
    shape: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype]
    devices: tuple[torch.device, torch.device]

    def of(self, leaf: Tensor) -> Tensor:
        """These rows, in real numbers."""
        leaf = torch.view_as_real(leaf) if self.complex else leaf
        return leaf if self.rows is None else leaf.narrow(0, *self.rows)


class Group(NamedTuple):
    """Pieces that go through the kernels together.

    Args:
        pieces: all of them.
        leaves: their leaves' numbers.
        cut: which of the pieces are not a leaf as it is, but rows of one, or of complex numbers.
    """

    pieces: list[Piece]
    leaves: list[int]
    cut: list[int]

    @classmethod
    def of_pieces(cls, pieces: list[Piece]) -> "Group":
        cut = [i for i, piece in enumerate(pieces) if piece.rows or piece.complex]
        return cls(pieces, [piece.leaf for piece in pieces], cut)

    def of(
        self, masters: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The pieces of masters and parts, where the masters are."""
        mine, theirs = ([tensors[leaf] for leaf in self.leaves] for tensors in (masters, parts))
        for i in self.cut:
            mine[i], theirs[i] = self.pieces[i].of(mine[i]), self.pieces[i].of(theirs[i])
        there, here = self.pieces[0].devices
        return mine, [x.to(there) for x in theirs] if there != here else theirs


class _Room(NamedTuple):
    """Where the casts of a group's masters go: as they are compared, their bits, and all bytes."""

    casts: list[Tensor]
    bits: list[Tensor]
    together: Tensor


# elements: so many are compared while they are in a core's cache; fewer are put together first,
# since a call costs as much as their comparison
_BLOCK, _SMALL = 2**18, 2**12


def _pieces(i: int, is_complex: bool, master: Tensor, part: Tensor, limit: int) -> Iterator[Piece]:
    """A leaf in pieces of no more than `limit` elements, or of one row; nothing of an empty one."""
    rest = (master.dtype, part.dtype), (master.device, part.device)
    count = master.numel()
    if count and (count <= limit or master.shape[0] == 1):
        yield Piece(i, None, is_complex, master.shape, *rest)
    elif count:
        rows = max(1, limit * master.shape[0] // count)
        for start in range(0, master.shape[0], rows):
            length = min(rows, master.shape[0] - start)
            shape = torch.Size([length, *master.shape[1:]])
            yield Piece(i, (start, length), is_complex, shape, *rest)


def _groups(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces of the same dtypes and devices, of no more than a block together; small ones apart."""
    filling: dict[object, list[Piece]] = {}
    sizes: dict[object, int] = {}
    for piece in pieces:
        size = piece.shape.numel()
        key = piece.dtypes, piece.devices, size <= _SMALL
        if key in filling and sizes[key] + size > _BLOCK:
            yield filling.pop(key)
        sizes[key] = size + (sizes[key] if key in filling else 0)
        filling.setdefault(key, []).append(piece)
    yield from filling.values()


def _rooms(groups: Sequence[Group]) -> list[_Room]:
    """All in the same memory, for groups are compared one after the other."""
    sizes = [[piece.shape.numel() for piece in group.pieces] for group in groups]
    low = [group.pieces[0].dtypes[1] for group in groups]
    most = max(sum(counts) * dtype.itemsize for counts, dtype in zip(sizes, low, strict=True))
    memory = torch.empty(most, dtype=torch.uint8, device=groups[0].pieces[0].devices[0])
    rooms = []
    for group, counts, dtype in zip(groups, sizes, low, strict=True):
        together = memory[: sum(counts) * dtype.itemsize]
        casts = [together.view(dtype)]
        if counts[0] > _SMALL:
            flats = casts[0].split(counts)
            casts = [x.view(p.shape) for x, p in zip(flats, group.pieces, strict=True)]
        rooms.append(_Room(casts, [bits(x) for x in casts], together))
    return rooms


def _differs(masters: list[Tensor], parts: list[Tensor], room: _Room) -> bool:
    if masters[0].numel() <= _SMALL:
        masters, parts = [_end_to_end(masters)], [_end_to_end(parts)]
    torch._foreach_copy_(room.casts, masters)
    # zero where the bits are the same, whatever number they are
    torch._foreach_sub_(room.bits, [bits(x) for x in parts])
    # bytes have no sign: the largest alone tells, and is the cheapest thing to ask of them all
    return bool(torch.amax(room.together))


def _end_to_end(xs: Sequence[Tensor]) -> Tensor:
    # most small leaves are vectors already, and a view of each costs more than its comparison
    return torch.cat([x if x.dim() == 1 else x.reshape(-1) for x in xs])


def _select_(masters: list[Tensor], parts: list[Tensor]) -> None:
    for master, part in zip(masters, parts, strict=True):
        master.copy_(_selected(master, part))


def _selected(master: Tensor, part: Tensor) -> Tensor:
    if part.dtype == master.dtype:  # it has all the digits, so it is the master, written or not
        return part
    written = bits(part) != bits(master.to(part.dtype))
    return torch.where(written, part.to(master.dtype), master)
