"""Sums of squares that neither overflow, vanish nor drift, at the speed of float32.

In float64 a sum of squares of float32 is safe: squares have twice the exponents. But torch's
kernels for a CPU make a float64 copy of each leaf first, which takes longer than the sum itself.
So there each row of 128 numbers is summed in float32, where little is lost, and the rows in
float64. What that can't represent is seen in the sum, and then computed from float64 copies.
"""

# pyright: reportPrivateImportUsage=false

from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 128
# A leaf with fewer rows is joined with others of its kind: a call costs more than the copy.
_FEW = 8
# Sums of squares of which float32 lost nothing that counts: squares vanish from 1e-38 down, and
# overflow from 3e38 on.
_SAFE = (1e-18, 1e30)


def sum_of_squares(leaves: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all numbers, for norms that nobody differentiates.

    Args:
        leaves: plain floating or complex tensors of any shapes, dtypes and devices.

    Returns:
        0-d float64 on the first leaf's device.

    Examples:
        >>> sum_of_squares([torch.tensor([3e30, 4e30]), torch.zeros(2, dtype=torch.bfloat16)])
        tensor(2.5000e+61, dtype=torch.float64)
    """
    if not leaves:
        return torch.zeros((), dtype=torch.float64)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in leaves:
        x = x.detach()
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        groups.setdefault((x.device, x.dtype), []).append(x)
    device = leaves[0].device
    parts = [torch.ops.fzero.sum_of_squares(group).to(device) for group in groups.values()]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _sum_of_squares(xs: list[Tensor]) -> Tensor:
    """Of leaves of one device and dtype."""
    if xs[0].device.type == "cpu" and xs[0].dtype == torch.float32:
        total = _by_rows(xs)
        if _SAFE[0] < float(total) < _SAFE[1]:  # neither is NaN; on a CPU this waits for nobody
            return total
    return torch.stack(torch._foreach_norm(xs, 2, dtype=torch.float64)).square().sum()


def _by_rows(xs: list[Tensor]) -> Tensor:
    sums, rest = [], []
    for x in xs:
        # what flattens without a copy need not be dense: a column, an expanded scalar
        flat = x.reshape(-1).contiguous()
        rows, more = divmod(flat.numel(), _ROW)
        if rows < _FEW:
            rest.append(flat)
            continue
        table = flat.as_strided((rows, _ROW), (_ROW, 1))
        sums.append(torch.linalg.vector_norm(table, dim=1))
        if more:
            rest.append(flat.narrow(0, rows * _ROW, more))
    # their norms, not their squares: those of rows have all the digits, and few numbers are left
    return torch.cat([*sums, *rest]).double().square().sum()


def _fake(xs: list[Tensor]) -> Tensor:
    return xs[0].new_empty((), dtype=torch.float64)


def _define() -> torch.library.Library:
    lib = torch.library.Library("fzero", "FRAGMENT")
    lib.define("sum_of_squares(Tensor[] xs) -> Tensor")
    lib.impl("sum_of_squares", _sum_of_squares, "CompositeExplicitAutograd")
    torch.library.register_fake("fzero::sum_of_squares", _fake, lib=lib)
    return lib


_LIBRARY = _define()  # operators live as long as this object
