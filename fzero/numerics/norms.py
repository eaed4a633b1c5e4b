"""Sums of squares that neither overflow, vanish nor drift, as quick as their use allows.

In float64 a sum of squares of float32 is safe: squares have twice the exponents. But torch's
kernels for a CPU make a float64 copy of each leaf first, which takes longer than the sum itself.
So there, where the norm is only told, each row of 128 numbers is summed in float32, which is 1e-9
off, and the rows in float64; leaves that lie side by side are rows of one table. What that can't
represent is seen in the sum. Then, and where the norm scales an update, rows are summed in float64
too, from copies of a few rows that stay in the processor's cache.
"""

# pyright: reportPrivateImportUsage=false

from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 128
# A leaf with fewer rows is joined with others of its kind: a call costs more than the copy.
_FEW = 8
# Rows that torch's kernels leave to one thread, at::internal::GRAIN_SIZE numbers; and rows from
# which several threads are quicker than one that takes so many at a time.
_GRAIN = 32768 // _ROW
_WORTH_WAKING = 8 * _GRAIN
# Rows that are copied to float64 at a time: half a megabyte, and of fewer leaves a sixteenth of
# their bytes, which no prediction of memory has to know.
_COPIED, _SHARE = 2 * _GRAIN, 32
# Sums of squares of which float32 lost nothing that counts: squares vanish from 1e-38 down, and
# overflow from 3e38 on.
_SAFE = (1e-18, 1e30)


def sum_of_squares(
    leaves: Sequence[Tensor], *, exact: bool, device: torch.device | str | None = None
) -> Tensor:
    """The sum of squares of all numbers, for norms that nobody differentiates.

    Args:
        leaves: plain floating or complex tensors of any shapes, dtypes and devices.
        exact: as if every number were squared and added in float64. False: 1e-6 of that are
            enough, on a CPU in half the time.
        device: of the result, of no leaves too: a zero of the host's would make it wait for the
            device. None: the first leaf's.

    Returns:
        0-d float64.

    Examples:
        >>> leaves = [torch.tensor([3e30, 4e30]), torch.zeros(2, dtype=torch.bfloat16)]
        >>> sum_of_squares(leaves, exact=True)
        tensor(2.5000e+61, dtype=torch.float64)
    """
    if not leaves:
        return torch.zeros((), dtype=torch.float64, device=device)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in leaves:
        x = x.detach() if x.requires_grad else x  # a Program has no node for it then
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        groups.setdefault((x.device, x.dtype), []).append(x)
    device = leaves[0].device if device is None else device
    sums = [torch.ops.fzero.sum_of_squares(group, exact=exact) for group in groups.values()]
    parts = [x.to(device) for x in sums]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _sum_of_squares(xs: list[Tensor], *, exact: bool = True) -> Tensor:
    """Of leaves of one device and dtype."""
    if xs[0].device.type != "cpu" or xs[0].dtype != torch.float32:
        return torch.stack(torch._foreach_norm(xs, 2, dtype=torch.float64)).square().sum()
    if not exact:
        total = _by_rows(xs, torch.float32)
        if _SAFE[0] < float(total) < _SAFE[1]:  # neither is NaN; on a CPU this waits for nobody
            return total
    return _by_rows(xs, torch.float64)


def _by_rows(xs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """In `dtype` within each row, and over the rows in float64."""
    flats = [(x if x.is_contiguous() else x.reshape(-1).contiguous()).view(-1) for x in xs]
    counts = [flat.numel() // _ROW for flat in flats]
    wide = None
    if dtype == torch.float64:
        some = max(1, min(_COPIED, sum(counts) // _SHARE))
        wide = torch.empty(some, _ROW, dtype=dtype, device="cpu")
    tables: dict[int, list[Tensor]] = {}
    rest = {i: flat for i, flat in enumerate(flats) if counts[i] < _FEW}
    for run in _runs(flats, [i for i, count in enumerate(counts) if count >= _FEW]):
        norms = _norms_of_rows(flats[run[0]], sum(counts[i] for i in run), wide)
        if len(run) == 1:  # at world 1 each leaf is, and nothing is left to split
            tables[run[0]] = norms
        else:
            parts = torch.cat(norms).split([counts[i] for i in run])
            tables.update(zip(run, ([part] for part in parts), strict=True))
        last = flats[run[-1]]
        if more := last.numel() % _ROW:
            rest[run[-1]] = last[-more:]
    # in the order of the leaves, wherever they lie: the sum is the same to the last bit.
    # Norms of rows, not their squares: those have all the digits, and few numbers are left
    parts = [x for i in sorted(tables) for x in tables[i]]
    return torch.cat([*parts, *(rest[i] for i in sorted(rest))]).double().square().sum()


def _norms_of_rows(flat: Tensor, count: int, wide: Tensor | None) -> list[Tensor]:
    """The norms of the first `count` rows, one part after the other.

    Args:
        flat: a dense leaf of one dim; those of its run may follow it in memory.
        count: how many.
        wide: rows of float64 to copy to, and to sum there.
    """
    step = count
    if wide is not None:
        step = len(wide)
    elif _GRAIN < count <= _WORTH_WAKING and torch.get_num_threads() > 1:
        # torch would wake its other threads for this, which takes longer than the sum: on two
        # cores 70 us for 512 rows, and 9 us for each half of them by this thread alone
        step = _GRAIN
    start = flat.storage_offset()
    norms = []
    for i in range(0, count, step):
        rows = flat.as_strided((min(step, count - i), _ROW), (_ROW, 1), start + i * _ROW)
        if wide is not None:
            rows = wide[: len(rows)].copy_(rows)
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    return norms


def _runs(flats: Sequence[Tensor], long: Sequence[int]) -> list[list[int]]:
    """Places of leaves that lie one after the other in memory, and can share rows: one call does.

    Gradients come out of their buckets like this, though in the order of backward.

    Args:
        flats: dense leaves of one dim.
        long: the places of those that are worth rows of their own.
    """
    at = {i: flats[i].data_ptr() for i in long}
    runs: list[list[int]] = []
    end = limit = 0
    for i in sorted(long, key=at.__getitem__):
        x, start = flats[i], at[i]
        if start == end and end + x.nbytes <= limit:
            runs[-1].append(i)
        else:
            runs.append([i])
            # beyond its storage is another's memory, though it may be next to it
            limit = x.untyped_storage().nbytes() + start - x.storage_offset() * x.itemsize
        end = start + x.nbytes if x.numel() % _ROW == 0 else -1
    return runs


def _fake(xs: list[Tensor], *, exact: bool = True) -> Tensor:
    return xs[0].new_empty((), dtype=torch.float64)


def _define() -> torch.library.Library:
    lib = torch.library.Library("fzero", "FRAGMENT")
    lib.define("sum_of_squares(Tensor[] xs, *, bool exact=True) -> Tensor")
    lib.impl("sum_of_squares", _sum_of_squares, "CompositeExplicitAutograd")
    torch.library.register_fake("fzero::sum_of_squares", _fake, lib=lib)
    return lib


_LIBRARY = _define()  # operators live as long as this object
