"""The norm of a whole tree, and clipping by it."""

# torch.optim is built on torch._foreach_* and torch._fused_*, which have no public names.
# pyright: reportPrivateImportUsage=false

import math

import torch
from torch import Tensor

from fzero import tree
from fzero.distributed.dtensor import is_split, local_tensor, settled, sum_over_parts
from fzero.optim import check
from fzero.optim.base import GlobalNorm, Optimizer, Params, PyTree
from fzero.optim.foreach import by_group, scaled
from fzero.optim.inplace import EmptyState, in_place


def tree_global_norm(values: PyTree) -> Tensor:
    """The 2-norm of all numbers in a tree, as if they were one vector.

    Args:
        values: Tree of floating tensors of any shapes; of DTensors every rank must ask.

    Returns:
        0-d, float64 if any leaf is, float32 otherwise, on the device of the first leaf.

    Examples:
        >>> tree_global_norm({"w": torch.tensor([3.0]), "b": torch.tensor(4.0), "frozen": None})
        tensor(5.)
    """
    values = [settled(x) for x in tree.leaves(values)]
    if not values:
        return torch.zeros((), device="cpu")
    shards = [x for x in values if is_split(x)]
    leaves = [local_tensor(x) for x in values]

    def norms(group: list[Tensor]) -> tuple[list[Tensor]]:
        # squares of float32 have twice its exponents: in float64 none overflows or vanishes
        return (list(torch._foreach_norm(group, 2, dtype=torch.float64)),)

    leaves = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]
    (found,) = by_group(norms, leaves, outputs=1)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in leaves) else torch.float32
    same = [norm.to(leaves[0].device) for norm in found]
    if not shards:
        return torch.linalg.vector_norm(torch.stack(same)).to(dtype)
    squares = torch.stack(same).square()
    split = squares.new_tensor([is_split(x) for x in values])
    shares = sum_over_parts((squares * split).sum(), shards[0])
    return (shares + (squares * (1 - split)).sum()).sqrt().to(dtype)


def tree_norm(values: PyTree, p: float) -> Tensor:
    """The p-norm of all numbers in a tree, as if they were one vector.

    Args:
        values: Tree of floating tensors of any shapes.
        p: Above 0; `math.inf` for the largest magnitude.

    Returns:
        As `tree_global_norm` does; powers neither overflow nor vanish on the way, whatever p, but
        for squares of float64 beyond 1e154 or below 1e-162.

    Examples:
        >>> values = [torch.tensor([3.0, -4.0])]
        >>> tree_norm(values, math.inf), tree_norm(values, 1)
        (tensor(4.), tensor(7.))
    """
    # An empty shard has no largest number, and torch raises for it.
    leaves = [x for x in tree.leaves(values) if x.numel()]
    if p == 2 or not leaves:
        return tree_global_norm(leaves)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in leaves) else torch.float32
    device = leaves[0].device
    norms = torch.stack([_norm(x.to(dtype), p).to(device) for x in leaves])
    return _norm(norms, p)


def _norm(x: Tensor, p: float) -> Tensor:
    if p in (1, math.inf):
        return torch.linalg.vector_norm(x, p)
    largest = torch.linalg.vector_norm(x, math.inf)
    # Divided by the largest no power overflows; zeros alone would be divided by zero.
    unit = torch.where(largest > 0, largest, 1.0)
    return torch.linalg.vector_norm(x / unit, p) * largest


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scale all gradients down together so that their common norm is at most `max_norm`.

    The factor is `min(1, max_norm / (norm + 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`. The
    norm comes from the `global_norm` that `update` is given, so over shards it is that of the
    whole tree.

    Args:
        max_norm: In the gradients' unit.

    Raises:
        ConfigError: `max_norm` is not a positive number.

    Examples:
        >>> clip = clip_by_global_norm(1.0)
        >>> updates, _ = clip.update([torch.tensor([30.0, 40.0])], clip.init([]))
        >>> updates
        [tensor([0.6000, 0.8000])]

    References:
        Pascanu et al., arXiv:1211.5063, sec. 3.2.
    """
    check.positive("clip_by_global_norm", max_norm=max_norm)

    def update(
        grads: PyTree,
        state: EmptyState,
        params: Params | None = None,
        *,
        global_norm: GlobalNorm = tree_global_norm,
    ) -> tuple[PyTree, EmptyState]:
        leaves, spec = tree.flatten(grads)
        factor = (max_norm / (global_norm(grads) + 1e-6)).clamp(max=1.0)
        (clipped,) = by_group(lambda group: (scaled(group, factor),), leaves, outputs=1)
        return tree.unflatten(spec, clipped), state

    return Optimizer(EmptyState.of, update, in_place(update))
