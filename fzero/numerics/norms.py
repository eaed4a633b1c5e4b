"""Sums of squares that neither overflow, vanish nor drift, as quick as their use allows.

In float64 a sum of squares of float32 is safe: squares have twice the exponents. But torch's
kernels for a CPU make a float64 copy of each leaf first, which takes longer than the sum itself. So
where the norm is only told, each row of 128 numbers is summed in float32, which is 1e-9 off, and
the rows in float64; leaves that lie side by side are rows of one table, and small ones that don't
are copied to one. What that can't represent is seen in the sum. Then, and where the norm scales an
update, rows are summed in float64 too, from copies of a few rows. Small leaves that are no whole
rows are copied to float64 in one call.
"""

# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fzero.layout.end_to_end import one_of, runs
from fzero.operators import define

_ROW = 128
# Up to so many numbers a leaf is small: a call of its own costs more than the copy.
_SMALL = 4096
# Rows that torch's kernels leave to one thread, at::internal::GRAIN_SIZE numbers; and rows from
# which several threads are quicker than one that takes so many at a time.
_GRAIN = 32768 // _ROW
_WORTH_WAKING = 8 * _GRAIN
# Rows that are copied to float64 at a time: half a megabyte; and the share of all numbers that such
# a copy, or that of a small leaf, may be. With the norms of rows that is less than a tenth of the
# leaves' bytes, which no prediction of memory has to know. Leaves of up to a row are joined, all of
# them: they are few bytes. Larger ones with them, up to so many numbers and that share.
_COPIED, _SHARE = 2 * _GRAIN, 32
_JOINED = 4 * _ROW
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
        return _in_double(xs)
    sizes = list(map(Tensor.numel, xs))
    limit = min(_SMALL, sum(sizes) // _SHARE)
    room = sum(sizes) // _SHARE
    least: list[Tensor] = []
    small: list[Tensor] = []
    large: list[Tensor] = []
    for x, size in zip(xs, sizes, strict=True):
        if size <= _ROW or size <= min(_JOINED, room):
            room -= size if size > _ROW else 0
            least.append(x if x.dim() == 1 else x.ravel())
        else:
            # rows need no copy, or one call copies many: see `_by_rows`
            (small if size <= limit and size % _ROW else large).append(x)
    parts = []
    if least:
        joined = torch.cat(least).double()
        parts.append(torch.dot(joined, joined))
    if small:
        parts.append(_in_double(small))
    if large:
        parts.append(_of_large(large, sum(sizes), exact=exact))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _in_double(xs: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(xs, 2, dtype=torch.float64)).square().sum()


def _of_large(xs: list[Tensor], numel: int, *, exact: bool) -> Tensor:
    """Of leaves of float32 on a CPU, among leaves of so many numbers."""
    xs = list(map(Tensor.contiguous, xs))
    most = min(_COPIED * _ROW, numel // _SHARE)
    if not exact:
        total = _by_rows(xs, None, most)
        if _SAFE[0] < float(total) < _SAFE[1]:  # neither is NaN; on a CPU this waits for nobody
            return total
    some = max(1, most // _ROW)
    return _by_rows(xs, torch.empty(some, _ROW, dtype=torch.float64, device="cpu"), most // 2)


def _by_rows(xs: list[Tensor], wide: Tensor | None, most: int) -> Tensor:
    """In float32 within each row, or as `wide` is, and over the rows in float64.

    Small leaves that lie each by itself are copied to one memory, up to `most` numbers at a time.
    """
    sizes = list(map(Tensor.numel, xs))
    tables: dict[int, list[Tensor]] = {}
    rest: dict[int, Tensor] = {}
    threads = torch.get_num_threads()
    # gradients come out of their buckets side by side, though in the order of backward
    for run, start in _with_starts(runs(xs, multiple=_ROW), xs, sizes, most):
        first, last = run[0], run[-1]
        norms = _norms_of_rows(start, sum(sizes[i] for i in run) // _ROW, wide, threads)
        if len(run) == 1:  # at world 1 each leaf is, and nothing is left to split
            tables[first] = norms
        else:
            parts = torch.cat(norms).split([sizes[i] // _ROW for i in run])
            tables.update(zip(run, ([part] for part in parts), strict=True))
        if more := sizes[last] % _ROW:
            rest[last] = xs[last].view(-1)[-more:]
    # in the order of the leaves, wherever they lie: the sum is the same to the last bit.
    # Norms of rows, not their squares: those have all the digits, and few numbers are left
    parts = [x for i in sorted(tables) for x in tables[i]]
    norms = torch.cat([*parts, *(rest[i] for i in sorted(rest))]).double()
    return torch.dot(norms, norms)


def _norms_of_rows(x: Tensor, count: int, wide: Tensor | None, threads: int) -> list[Tensor]:
    """The norms of `count` rows, one part after the other.

    Args:
        x: dense, at whose beginning they are.
        count: how many.
        wide: rows of float64 to copy to, and to sum there.
        threads: that torch has.
    """
    step = count
    if wide is not None:
        step = len(wide)
    elif _GRAIN < count <= _WORTH_WAKING and threads > 1:
        # torch's other threads may sleep, as OpenMP sees fit: to wake them takes 70 us for 512 rows
        # on two cores, in which this one sums them four times. Awake they would save it 13 us
        step = _GRAIN
    start = x.storage_offset()
    norms = []
    for i in range(0, count, step or 1):
        rows = x.as_strided((min(step, count - i), _ROW), (_ROW, 1), start + i * _ROW)
        if wide is not None:
            rows = wide[: len(rows)].copy_(rows)
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    return norms


def _with_starts(
    found: Sequence[list[int]], xs: Sequence[Tensor], sizes: Sequence[int], most: int
) -> Iterator[tuple[list[int], Tensor]]:
    """Each run, and its numbers as one tensor; small leaves that are alone make runs of copies, of
    up to `most` numbers."""
    alone: list[int] = []
    for run in found:
        (first, *more) = run
        if more or sizes[first] > _SMALL or sizes[first] % _ROW:
            yield run, one_of([xs[i] for i in run])
            continue
        if alone and sum(sizes[i] for i in alone) + sizes[first] > most:
            yield alone, _joined(xs, alone)
            alone = []
        alone.append(first)
    if alone:
        yield alone, _joined(xs, alone)


def _joined(xs: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    return torch.cat([xs[i].view(-1) for i in indices]) if len(indices) > 1 else xs[indices[0]]


def _fake(xs: list[Tensor], *, exact: bool = True) -> Tensor:
    return xs[0].new_empty((), dtype=torch.float64)


define("sum_of_squares(Tensor[] xs, *, bool exact=True) -> Tensor", _sum_of_squares, _fake)
