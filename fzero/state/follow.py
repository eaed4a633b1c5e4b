"""Masters follow their parameters: what was written into a parameter is what is trained.

[Note: masters follow] Between steps a parameter is its master's cast, bit for bit: the update that
wrote the master published it. An element of which that is not so was written by somebody else: a
checkpoint of parameters alone, `p.data.clamp_()`, an average that was swapped in. There the master
starts from the parameter, and everywhere else it keeps the digits that the parameter has no room
for. Nothing counts writes, so none goes unseen; and a master that alone was written is undone: the
parameter is what a model computes with, and so what counts.

On the host a comparison of bits decides whether there is anything to do. A device is not asked, for
the answer would have to be waited for: it selects element by element.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.optim.foreach import by_group, temporary_bytes


@torch.no_grad()
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
    pairs = [pair for both in zip(masters, parts, strict=True) for pair in _pieces(*both)]
    if pairs:
        mine, theirs = map(list, zip(*pairs, strict=True))
        by_group(_follow_, mine, theirs, max_bytes=temporary_bytes)


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
    return _selected(master, part) if bool(_differ([master], [part])) else master


def _follow_(masters: list[Tensor], parts: list[Tensor]) -> None:
    """`follow_` for a few MiB of masters of one device and dtype."""
    parts = [part.to(master.device) for master, part in zip(masters, parts, strict=True)]
    if masters[0].device.type == "cpu" and not _differ(masters, parts):
        return
    for master, part in zip(masters, parts, strict=True):
        master.copy_(_selected(master, part))


def _selected(master: Tensor, part: Tensor) -> Tensor:
    # it has all the digits, so it is the master, written or not
    if part.dtype == master.dtype:
        return part
    written = _bits(part) != _bits(master.to(part.dtype))
    return torch.where(written, part.to(master.dtype), master)


def _differ(masters: Sequence[Tensor], parts: Sequence[Tensor]) -> bool:
    """Whether any bit of `parts` is not that of the masters' casts; the host waits for it."""
    small: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for master, part in zip(masters, parts, strict=True):
        if part.numel() > _BLOCK:
            rows = zip(
                master.reshape(-1).split(_BLOCK), part.reshape(-1).split(_BLOCK), strict=True
            )
            if any(_differs(*row) for row in rows):
                return True
        elif part.numel() > _SMALL:
            if _differs(master, part):
                return True
        else:
            mine, theirs = small.setdefault(part.dtype, ([], []))
            mine.append(master.reshape(-1))
            theirs.append(part.reshape(-1))
    return any(_differs(torch.cat(mine), torch.cat(theirs)) for mine, theirs in small.values())


# elements: so many are compared while they are in the cache; fewer are put together first
_BLOCK, _SMALL = 2**18, 2**12


def _differs(master: Tensor, part: Tensor) -> bool:
    # A copy in any case: the xor writes into it.
    cast = master.to(part.dtype, copy=True)
    # both 0 where all bits are alike; a comparison would make a tensor of bools and then read it
    low, high = torch.aminmax(_bits(cast).bitwise_xor_(_bits(part)))
    return bool(low) or bool(high)


def _bits(x: Tensor) -> Tensor:
    # bits, not values: NaN differs from itself, and -0.0 equals 0.0
    return x.view(_INTEGERS[x.dtype.itemsize])


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _pieces(master: Tensor, part: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The two, in rows of a few MiB if they are larger; nothing of empty ones."""
    limit = temporary_bytes(master.device)
    if master.nbytes <= limit or master.shape[0] == 1:
        return [(master, part)] if master.numel() else []
    rows = max(1, limit * master.shape[0] // master.nbytes)
    return list(zip(master.split(rows), part.split(rows), strict=True))
