"""Adafactor: of a matrix of mean squares, the means of its rows and columns are kept alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero import tree
from fzero.distributed.dtensor import local_tensor, shard_like
from fzero.errors import ConfigError, arguments_by_name
from fzero.inference import makes_normal
from fzero.optim import check
from fzero.optim.base import Optimizer, Params, PyTree, Rate, rate_at, rate_by_step
from fzero.optim.counts import increased
from fzero.optim.foreach import leaves_like, zero_step
from fzero.optim.inplace import in_place
from fzero.optim.shards import Split, like_given, splits, squares, summed


class FactoredState(NamedTuple):
    """Mean squares, of leaves of two dims or more in factors.

    Attributes:
        step: Updates so far; 0-d float32.
        row: Means over the last dim, of the whole leaf: (..., m) of one of (..., m, n). The same on
            every rank.
        col: Means over the dim before it: (..., n). The same on every rank.
        nu: Running mean squares of vectors and scalars, shaped as these.
        counts: Each leaf's own updates: see `AdamState`.
    """

    step: Tensor
    row: Params
    col: Params
    nu: Params
    counts: Params = None

    @property
    def counted(self) -> Params:
        """A tree with the leaves of the params."""
        return tree.either(self.row, self.nu)


@arguments_by_name
def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float | Tensor = 0.0,
) -> Optimizer:
    """Adafactor: Adam without a mean, its mean squares in factors; m + n numbers for m x n.

    Each leaf moves by a share of its own root mean square. Means and norms are those of whole
    leaves: of sharded ones all are summed over ranks, in two messages of a step.

    Args:
        lr: The largest share; a number, or a schedule of the step. Below `1 / sqrt(step)` it counts
            itself.
        beta2_decay: Exponent, at most 0: the mean squares' decay is `1 - step ** beta2_decay`.
        eps: Least mean square, as its root (None: the dtype's own); and the least root mean square
            of the params that the share is taken of.
        d: Largest root mean square of an update, in units of the share.
        weight_decay: Share of the params that goes per unit of learning rate.

    Returns:
        An optimizer whose state is a `FactoredState`.

    Raises:
        ConfigError: A value out of its range.
        ShardError: A leaf is no floating tensor.

    Examples:
        >>> opt = adafactor(0.1)
        >>> params = {"w": torch.ones(2, 3)}
        >>> state = opt.init(params)
        >>> state.row["w"].shape, state.col["w"].shape
        (torch.Size([2]), torch.Size([3]))
        >>> opt.update({"w": torch.ones(2, 3)}, state, params)[0]["w"][0]
        tensor([-0.1000, -0.1000, -0.1000])

    References:
        Shazeer and Stern, arXiv:1804.04235, algorithms 4 to 6, as torch.optim.Adafactor has them:
        factors of the last two dims, no mean of the gradients.
    """
    check.learning_rate("adafactor", lr)
    check.positive("adafactor", d=d)
    check.decay("adafactor", weight_decay)
    check.finite("adafactor", beta2_decay=beta2_decay)
    if beta2_decay > 0:
        raise ConfigError(f"adafactor: beta2_decay={beta2_decay!r}, but it must be at most 0.")
    least, floor = eps
    check.non_negative("adafactor", **{"eps[0]": least or 0.0, "eps[1]": floor})

    @makes_normal
    def init(params: Params) -> FactoredState:
        leaves, spec = tree.flatten(params)
        lie = splits(params, "adafactor")
        rows, cols, nus = [], [], []
        for x, split in zip(leaves, lie, strict=True):
            shape = split.leaf.shape
            factored = len(shape) > 1
            here = local_tensor(x)
            rows.append(here.new_zeros(shape[:-1]) if factored else None)
            cols.append(here.new_zeros((*shape[:-2], shape[-1])) if factored else None)
            nus.append(None if factored else torch.zeros_like(x))
        row, col, nu = (tree.unflatten(spec, column) for column in (rows, cols, nus))
        return FactoredState(zero_step(params), row, col, nu)

    def update(
        grads: PyTree, state: FactoredState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, FactoredState]:
        check.state("adafactor", state, FactoredState)
        if params is None:
            raise ConfigError(
                "adafactor: each leaf moves by a share of its own size, but update was called "
                "without the params. Call update(grads, state, params)."
            )
        leaves, spec = tree.flatten(grads)
        lie = splits(grads, "adafactor")
        given = leaves_like(spec, params, "params")
        own = [local_tensor(shard_like(p, g)) for p, g in zip(given, leaves, strict=True)]
        local = [local_tensor(g).to(p.dtype) for g, p in zip(leaves, own, strict=True)]
        factored = [i for i, split in enumerate(lie) if len(split.leaf.shape) > 1]
        step, counts, own_ages = increased(spec, state)
        ages = counts or [step] * len(leaves)
        share = [age.double() ** beta2_decay for age in counts or [step]]
        share = share if counts else share * len(leaves)
        rate = torch.as_tensor(rate_at(lr, state.step), dtype=torch.float64, device=step.device)

        # what all leaves need of all ranks, in one message
        wanted = [(square, lie[i]) for i, square in enumerate(squares(own))]
        for i in factored:
            wanted += [(_row_sums(local[i], lie[i]), lie[i]), (_col_sums(local[i], lie[i]), lie[i])]
        shares, ways = (
            (list(column) for column in zip(*wanted, strict=True)) if wanted else ([], [])
        )
        found = summed(shares, ways, "adafactor: rows, columns")
        norms, sums = found[: len(lie)], iter(found[len(lie) :])

        vectors = [i for i, split in enumerate(lie) if len(split.leaf.shape) <= 1]
        row_spec, nu_spec = (_some(spec, indices) for indices in (factored, vectors))
        rows, cols, nus = (
            leaves_like(some, part, "the optimizer's state")
            for some, part in ((row_spec, state.row), (row_spec, state.col), (nu_spec, state.nu))
        )
        factors = zip(factored, rows, cols, strict=True)
        new_rows, new_cols, new_nus, variances = [], [], [], {}
        for i, row, col in factors:
            m, n = lie[i].leaf.shape[-2:]
            new_rows.append(_mixed(row, next(sums) / max(n, 1), share[i]))
            new_cols.append(_mixed(col, next(sums) / max(m, 1), share[i]))
            variances[i] = _product(new_rows[-1], new_cols[-1], lie[i], _least(least, own[i]))
        for i, nu in zip(vectors, nus, strict=True):
            own_nu = local_tensor(shard_like(nu, leaves[i]))
            variances[i] = _mixed(own_nu, local[i].square(), share[i])
            new_nus.append(variances[i])

        updates = [
            g * variances[i].clamp(min=_least(least, own[i]) ** 2).rsqrt()
            for i, g in enumerate(local)
        ]
        lengths = summed(squares(updates), lie, "adafactor: norms")
        for i, (x, p, split) in enumerate(zip(updates, own, lie, strict=True)):
            root = max(split.leaf.numel, 1) ** 0.5
            alpha = (norms[i].sqrt() / root).clamp(min=floor) * _smaller(rate, ages[i])
            factor = -alpha / (lengths[i].sqrt() / (root * d)).clamp(min=1.0)
            x = (x * factor.to(x.device)).to(p.dtype)
            if isinstance(weight_decay, Tensor) or weight_decay:
                x = (x - (rate * weight_decay).to(x.device) * p).to(p.dtype)
            updates[i] = x.to(leaves[i].dtype)
        new = FactoredState(
            step,
            tree.unflatten(row_spec, new_rows),
            tree.unflatten(row_spec, new_cols),
            tree.unflatten(nu_spec, like_given(new_nus, [leaves[i] for i in vectors])),
            own_ages,
        )
        return tree.unflatten(spec, like_given(updates, leaves)), new

    return Optimizer(init, update, in_place(update), rates=rate_by_step(lr))


def _some(spec: tree.Spec, indices: Sequence[int]) -> tree.Spec:
    """The structure with these leaves alone, and None for the others."""
    chosen = {*indices}
    leaves = [i if i in chosen else None for i in range(spec.num_leaves)]
    return tree.flatten(tree.unflatten(spec, leaves))[1]


def _row_sums(g: Tensor, split: Split) -> Tensor:
    """This rank's share in the sums of squares over the last dim of the whole leaf."""
    sums = _norms(g, g.dim() - 1).square()
    return _placed(sums, split, lost=g.dim() - 1)


def _norms(g: Tensor, dim: int) -> Tensor:
    # counted from the front: of a negative dim of one element torch 2.11's fake kernel makes
    # another shape than the real one
    return torch.linalg.vector_norm(g, dim=dim, dtype=torch.float64)


def _col_sums(g: Tensor, split: Split) -> Tensor:
    """This rank's share in the sums of squares over the dim before the last."""
    sums = _norms(g, g.dim() - 2).square()
    return _placed(sums, split, lost=g.dim() - 2)


def _placed(sums: Tensor, split: Split, lost: int) -> Tensor:
    """Sums over the dim `lost` of a part, as long as those of the whole: zeros for other parts."""
    dim = split.leaf.dim
    if not split.is_split or dim is None or dim == lost:
        return sums
    at = dim if dim < lost else dim - 1
    start, stop = split.bounds
    ends = (start, split.leaf.shape[dim] - stop)
    return pad(sums, (*(0,) * (2 * (sums.dim() - 1 - at)), *ends))


def _mixed(old: Tensor, new: Tensor, share: Tensor) -> Tensor:
    share = share.to(old.device)
    return (old + (new - old) * share).to(old.dtype)


def _product(row: Tensor, col: Tensor, split: Split, least: float) -> Tensor:
    """The mean squares of this rank's part, from the factors of the whole leaf."""
    mean = row.mean(-1, keepdim=True).clamp(min=least)
    shape, dim = split.leaf.shape, split.leaf.dim
    if split.is_split and dim is not None:
        start, stop = split.bounds
        if dim != len(shape) - 1:
            row = row.narrow(dim, start, stop - start)
        if dim != len(shape) - 2:
            col = col.narrow(min(dim, len(shape) - 2), start, stop - start)
        if dim < len(shape) - 2:
            mean = mean.narrow(dim, start, stop - start)
    return row.unsqueeze(-1) * col.unsqueeze(-2) / mean.unsqueeze(-1)


def _least(least: float | None, like: Tensor) -> float:
    return torch.finfo(like.dtype).eps if least is None else least


def _smaller(rate: Tensor, step: Tensor) -> Tensor:
    return torch.minimum(rate, step.double().rsqrt())
