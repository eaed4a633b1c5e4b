"""Muon: momentum of matrices, orthogonalised; each matrix by one rank.

[Note: rounds] A matrix has to be whole where it is orthogonalised. In a round each rank of the axis
gets one: every rank sends its part of each matrix to the rank that has it, and gets its part of the
result back. So no rank holds more than one whole matrix at a time, no work is done twice, and a
round moves two matrices' bytes a rank, whatever the number of ranks. Matrices of about as much work
share a round. At stage 0 all ranks have all matrices, and only results travel.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.distributed.collectives import all_gather, exchange
from fzero.distributed.dtensor import local_tensor
from fzero.distributed.mesh import Axis
from fzero.errors import ConfigError, arguments_by_name
from fzero.inference import makes_normal
from fzero.layout import LeafLayout
from fzero.optim import check
from fzero.optim.adam import adamw
from fzero.optim.base import Optimizer, Params, PyTree, Rate
from fzero.optim.compose import chain, multi_transform
from fzero.optim.foreach import by_group, cast_like, leaves_like, zero_step, zeros_like
from fzero.optim.inplace import in_place
from fzero.optim.shards import Split, like_given, splits
from fzero.optim.transforms import add_decayed_weights, scale_by_learning_rate

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Keller Jordan's: steep at zero; singular values end up around one."""


class MuonState(NamedTuple):
    """The momentum.

    Attributes:
        step: Updates so far; 0-d float32.
        mu: Running mean of the gradients, shaped as the params.
    """

    step: Tensor
    mu: Params


def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
) -> Tensor:
    """A matrix with the singular vectors of `x` and singular values around one.

    Args:
        x: (m, n), any floating dtype, in which it is computed.
        steps: of the iteration `x <- a x + (b A + c A A) x`, with `A = x x^T`.
        coefficients: a, b, c.
        eps: Least norm that `x` is divided by.

    Examples:
        >>> newton_schulz(torch.diag(torch.tensor([3.0, 1.0]))).diag().round(decimals=1)
        tensor([0.8000, 1.1000])

    References:
        Jordan et al., Muon, https://kellerjordan.github.io/posts/muon, 2024.
    """
    a, b, c = coefficients
    wide = x.shape[0] > x.shape[1]
    x = x.T if wide else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if wide else x


@arguments_by_name
def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    adjust: str = "match_rms_adamw",
) -> Optimizer:
    """Muon's direction: the momentum of each matrix, orthogonalised; see `muon`.

    Every leaf has two dims or more, and more count as columns; `multi_transform` or `masked` keep
    others away.

    Examples:
        >>> opt = scale_by_muon(adjust="original")
        >>> params = [torch.ones(2, 2)]
        >>> updates, _ = opt.update([torch.eye(2)], opt.init(params), params)
        >>> updates[0].round(decimals=1)
        tensor([[1.1000, 0.0000],
                [0.0000, 1.1000]])
    """
    where = "scale_by_muon"
    check.fraction(where, momentum=momentum)
    check.steps(where, steps=steps)
    check.positive(where, eps=eps)
    check.finite(where, **{f"coefficients[{i}]": c for i, c in enumerate(coefficients)})
    if adjust not in _FACTORS:
        raise ConfigError(f"{where}: adjust={adjust!r}; one of {', '.join(map(repr, _FACTORS))}.")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"{where}: dtype={dtype}, but it must be a floating dtype, or None.")

    @makes_normal
    def init(params: Params) -> MuonState:
        _check_matrices(splits(params, where), where)
        return MuonState(zero_step(params), zeros_like(params))

    def update(
        grads: PyTree, state: MuonState, params: Params | None = None, **_: Any
    ) -> tuple[PyTree, MuonState]:
        check.state(where, state, MuonState)
        leaves, spec = tree.flatten(grads)
        _check_matrices(splits(grads, where), where)

        def kernel(mu: list[Tensor], grads: list[Tensor]) -> Any:
            grads = cast_like(grads, mu)
            mu = list(torch._foreach_lerp(mu, grads, 1.0 - momentum))  # pyright: ignore
            return (torch._foreach_lerp(grads, mu, momentum) if nesterov else mu), mu  # pyright: ignore

        before = leaves_like(spec, state.mu, "the optimizer's state")
        directions, mu = by_group(kernel, before, leaves, outputs=2)
        lie = splits(tree.unflatten(spec, directions), where)  # as the state does
        parts = [local_tensor(x) for x in directions]
        low = [x.to(dtype or x.dtype) for x in parts]
        found = orthogonalised(low, lie, lambda x: newton_schulz(x, steps, coefficients, eps))
        scaled = [
            x.to(part.dtype) * _FACTORS[adjust](*_as_matrix(split.leaf.shape))
            for x, part, split in zip(found, parts, lie, strict=True)
        ]
        new = MuonState(state.step + 1, tree.unflatten(spec, mu))
        return tree.unflatten(spec, like_given(scaled, directions)), new

    return Optimizer(init, update, in_place(update))


@arguments_by_name
def muon(
    lr: Rate,
    momentum: float = 0.95,
    weight_decay: float | Tensor = 0.1,
    *,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    adjust: str = "match_rms_adamw",
    labels: PyTree | Callable[[PyTree], PyTree] | None = None,
    rest: Any = None,
) -> Optimizer:
    """Muon for matrices: `params -= lr * (orthogonalised momentum + weight_decay * params)`.

    Each matrix is orthogonalised once, by one rank, which holds no other one meanwhile.

    Args:
        lr: A number, or a schedule of the step; of the rest, too.
        momentum: Decay of the mean of the gradients, in [0, 1).
        weight_decay: Share of the params that goes per unit of learning rate.
        nesterov: Mix the gradient into the mean once more.
        steps: Of the Newton-Schulz iteration.
        coefficients: Its three.
        eps: Least norm that it divides by.
        dtype: It computes, and matrices travel, in this dtype, such as `torch.bfloat16`; None: the
            leaf's own.
        adjust: How the length of an update depends on the shape (m, n). "match_rms_adamw":
            `0.2 sqrt(max(m, n))`, that of AdamW, so that rates are as for it; "original":
            `sqrt(max(1, m / n))`, whose rates are about 0.02; "none".
        labels: Which leaves are "muon"'s, and which "rest": a tree, or a function, as
            `multi_transform` takes them. None: `muon_labels`.
        rest: The optimizer of the other leaves. None: `adamw(lr, b2=0.95)` with this decay.

    Returns:
        An optimizer whose state is a `MultiState` of a momentum and the state of the rest.

    Raises:
        ConfigError: A value out of its range; or a leaf of fewer than two dims is labelled "muon".

    Examples:
        >>> opt = muon(1e-3)
        >>> params = {"up.weight": torch.ones(2, 2), "up.bias": torch.ones(2)}
        >>> grads = {"up.weight": torch.eye(2), "up.bias": torch.ones(2)}
        >>> updates, state = opt.update(grads, opt.init(params), params)
        >>> sorted(state.inner)
        ['muon', 'rest']

    References:
        Jordan et al., Muon, https://kellerjordan.github.io/posts/muon, 2024; the numbers are those
        of torch.optim.Muon. "match_rms_adamw": Liu et al., arXiv:2502.16982, sec. 2.2.
    """
    check.learning_rate("muon", lr)
    check.decay("muon", weight_decay)
    direction = scale_by_muon(momentum, nesterov, steps, coefficients, eps, dtype, adjust)
    matrices = chain(direction, add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    others = adamw(lr, b2=0.95, weight_decay=weight_decay) if rest is None else rest
    return multi_transform({"muon": matrices, "rest": others}, labels or muon_labels)


def muon_labels(params: PyTree) -> PyTree:
    """Which leaves `muon` takes if nobody says otherwise: matrices but for embeddings and heads.

    Embeddings and heads are told by their names: one part of the dotted name contains "embed", or
    is "wte", "wpe", "head", "heads" or "lm_head".

    >>> muon_labels({"embed.weight": torch.ones(2, 2), "up.weight": torch.ones(2, 2)})
    {'embed.weight': 'rest', 'up.weight': 'muon'}
    """

    def label(name: str, x: Tensor) -> str:
        words = name.lower().split(".")
        edge = any("embed" in word or word in _EDGES for word in words)
        return "muon" if x.dim() == 2 and not edge else "rest"

    leaves, spec = tree.flatten(params)
    pairs = zip(tree.names(params), leaves, strict=True)
    return tree.unflatten(spec, [label(name, x) for name, x in pairs])


_EDGES = ("wte", "wpe", "head", "heads", "lm_head")
_FACTORS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "original": lambda m, n: max(1.0, m / max(n, 1)) ** 0.5,
    "none": lambda m, n: 1.0,
}


# ------------------------------------------------------------------------------ who does which
def orthogonalised(
    parts: Sequence[Tensor], lie: Sequence[Split], fn: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """This rank's parts of `fn` of each whole matrix, each called for on one rank.

    Args:
        parts: this rank's; they travel in their dtypes.
        lie: how each leaf lives.
        fn: from a matrix to one of the same shape and dtype. Leaves of more dims are passed as
            matrices of `shape[0]` rows.

    Examples:
        >>> orthogonalised([torch.ones(2, 2)], splits([torch.ones(2, 2)], "muon"), torch.neg)
        [tensor([[-1., -1.],
                [-1., -1.]])]
    """

    def whole(x: Tensor) -> Tensor:
        return fn(x.reshape(_as_matrix(tuple(x.shape)))).reshape(x.shape)

    found = list(parts)
    groups: dict[Any, list[int]] = {}
    for i, split in enumerate(lie):
        if split.leaf.numel == 0:
            continue
        if split.axis.size == 1:
            found[i] = whole(parts[i])
            continue
        key = (split.axis, split.device_type, split.is_split, parts[i].dtype)
        groups.setdefault(key, []).append(i)
    for (axis, device_type, is_split, _), rows in groups.items():
        for owned in rounds([_as_matrix(lie[i].leaf.shape) for i in rows], axis.size):
            mine = [rows[j] if j is not None else None for j in owned]
            given = [None if i is None else parts[i].to(device_type) for i in mine]
            leaves = [None if i is None else lie[i].leaf for i in mine]
            take = _by_exchange if is_split else _by_gather
            for i, x in zip(mine, take(given, leaves, axis, whole), strict=True):
                if i is not None and x is not None:
                    found[i] = x.to(parts[i].device)
    return found


def rounds(shapes: Sequence[tuple[int, int]], world: int) -> list[list[int | None]]:
    """Which matrix each rank has in each round: about equal work in a round, and in all of them.

    >>> rounds([(8, 8), (2, 2), (8, 8)], world=2)
    [[0, 2], [1, None]]
    """
    work = {i: _flops(*shape) for i, shape in enumerate(shapes)}
    order = sorted(work, key=lambda i: (-work[i], i))
    done = [0] * world
    table: list[list[int | None]] = []
    for start in range(0, len(order), world):
        row: list[int | None] = [None] * world
        # the most work of the round to who has had the least
        free = sorted(range(world), key=lambda rank: (done[rank], rank))
        for rank, i in zip(free, order[start : start + world], strict=False):
            row[rank] = i
            done[rank] += work[i]
        table.append(row)
    return table


def _flops(m: int, n: int) -> int:
    """Of a step of Newton-Schulz, up to a factor."""
    m, n = min(m, n), max(m, n)
    return 2 * m * m * n + m**3


def _by_exchange(
    parts: Sequence[Tensor | None],
    leaves: Sequence[LeafLayout | None],
    axis: Axis,
    fn: Callable[[Tensor], Tensor],
) -> list[Tensor | None]:
    """A round of matrices that are split: see [Note: rounds]."""
    ranks = range(axis.size)
    mine = leaves[axis.rank]
    present = [leaf for leaf in leaves if leaf is not None]
    told = [leaf.name for leaf in present], sum(leaf.numel for leaf in present)
    sends = [0 if x is None else x.numel() for x in parts]
    shapes = [mine.shard_shape(rank) for rank in ranks] if mine is not None else []
    receives = [torch.Size(shape).numel() for shape in shapes] or [0] * axis.size
    flat = torch.cat([x.reshape(-1) for x in parts if x is not None])
    came = exchange(flat, receives, sends, axis, *told)
    if mine is not None and mine.dim is not None:
        pairs = zip(came.split(receives), shapes, strict=True)
        full = fn(torch.cat([x.view(shape) for x, shape in pairs], mine.dim))
        came = torch.cat([mine.split(full, rank).reshape(-1) for rank in ranks])
    back = exchange(came, sends, receives, axis, *told).split(sends)
    return [None if x is None else y.view(x.shape) for x, y in zip(parts, back, strict=True)]


def _by_gather(
    given: Sequence[Tensor | None],
    leaves: Sequence[LeafLayout | None],
    axis: Axis,
    fn: Callable[[Tensor], Tensor],
) -> list[Tensor | None]:
    """A round of matrices that every rank has: the results are told to all."""
    present = [x for x in given if x is not None]
    length = max(x.numel() for x in present)
    own = given[axis.rank]
    flat = present[0].new_zeros(length) if own is None else fn(own).reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, length - flat.numel()))
    name = ", ".join(leaf.name for leaf in leaves if leaf is not None)
    shape = (axis.size * length,)
    rows = all_gather(flat, LeafLayout(name, shape, flat.dtype, 0, axis.size), axis)
    table = rows.view(axis.size, length)
    return [
        None if x is None else table[rank, : x.numel()].view(x.shape)
        for rank, x in enumerate(given)
    ]


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], torch.Size(shape[1:]).numel()


def _check_matrices(lie: Sequence[Split], where: str) -> None:
    for split in lie:
        if len(split.leaf.shape) < 2:
            raise ConfigError(
                f"{where}: {split.leaf.name or 'the leaf'} has shape {split.leaf.shape}, and only "
                "matrices can be orthogonalised. Label it 'rest' in muon(labels=...)."
            )
