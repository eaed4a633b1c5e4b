"""Lists of leaves for torch's foreach and fused kernels.

One call handles every leaf of one device and dtype, so the cost in Python does not grow with
the number of leaves. What all transforms share sits here: grouping, bounded temporaries, tensor
factors, and leaves of one tree in the order of another.
"""

# torch.optim is built on torch._foreach_* and torch._fused_*, which have no public names.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.distributed.dtensor import from_local_like, local_tensor, settled, shard_like
from fzero.errors import ShardError
from fzero.optim.base import PyTree

Leaves = list[Tensor] | tuple[Tensor, ...]


def by_group(
    kernel: Callable[..., Any],
    *columns: Leaves,
    outputs: int = 0,
    max_bytes: Callable[[torch.device], int] | None = None,
    numbers: Sequence[Leaves] = (),
) -> tuple[list[Tensor], ...]:
    """Call `kernel` once per device and dtype of the first column's leaves.

    Kernels are elementwise and see this rank's parts: of DTensors the local tensors, every column
    brought to the placements of the first, in which the outputs come back; of complex tensors the
    pairs of real numbers, as in torch.optim.

    Args:
        kernel: Takes one list per column; returns a tuple of `outputs` lists as long as those.
        *columns: Lists of equal length, one tensor per leaf.
        outputs: How many lists the kernel returns; 0 for a kernel that works in place,
            whatever it returns. Such a one only reads its second column, and writes all others.
        max_bytes: Upper bound on the bytes of the first column's leaves in one call, by device;
            see `temporary_bytes`. A leaf larger than that goes alone.

    Returns:
        The kernel's lists, in the order of the columns.

    Raises:
        ShardError: What is written in place lives otherwise than the first column does.

    Examples:
        >>> leaves = [torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(2)]
        >>> by_group(lambda x: (torch._foreach_mul(x, 2.0),), leaves, outputs=1)
        ([tensor([2.]), tensor([2.], dtype=torch.float64), tensor([2., 2.])],)
    """
    like, *others = columns
    apart = any(isinstance(x, DTensor) for column in columns for x in column)
    if apart:
        if outputs:
            like = [settled(x) for x in like]
        for written in others[1:] if not outputs else ():
            _check_places(written, like)
        others = [
            [local_tensor(shard_like(x, ref)) for x, ref in zip(column, like, strict=True)]
            for column in others
        ]
        columns = (list(map(local_tensor, like)), *others)
    pairs_of = {row for row, x in enumerate(columns[0]) if x.is_complex()}
    if pairs_of:
        columns = tuple(
            [torch.view_as_real(x) if row in pairs_of else x for row, x in enumerate(column)]
            for column in columns
        )
    columns = (*columns, *numbers)
    results: tuple[list[Any], ...] = tuple([None] * len(columns[0]) for _ in range(outputs))
    for rows in _groups(columns[0], max_bytes):
        returned = kernel(*([column[row] for row in rows] for column in columns))
        if outputs:
            for result, values in zip(results, returned, strict=True):
                for row, value in zip(rows, values, strict=True):
                    value = torch.view_as_complex(value) if row in pairs_of else value
                    result[row] = from_local_like(value, like[row]) if apart else value
    return results


def _check_places(leaves: Leaves, like: Leaves) -> None:
    """What a kernel writes is no copy, as it would be of what has to be brought to the first's."""
    for x, ref in zip(leaves, like, strict=True):
        here, there = (y.placements if isinstance(y, DTensor) else None for y in (x, ref))
        if here != there:
            raise ShardError(
                f"a leaf of shape {tuple(ref.shape)} has the placements {there}, and the state "
                f"that an optimizer keeps of it {here} (None: a plain tensor). An update in place "
                "needs both alike: opt.init(params) of these params, or fzero.checkpoint.load."
            )


def temporary_bytes(device: torch.device) -> int:
    """How many bytes of leaves a kernel with temporaries should take at a time.

    A few MiB keep a CPU's temporaries in its cache: Lion over 64 MiB takes 17 ms instead of 27.
    GPUs need more in flight to hide the launches.
    """
    return (2 if device.type == "cpu" else 64) * 2**20


def leaves_like(spec: tree.Spec, other: PyTree, what: str) -> list[Tensor]:
    """The leaves of `other`, which has to have the leaves of `spec` at the same paths.

    Args:
        spec: The structure of the gradients.
        other: The params, or a part of the state.
        what: Its name, for the message.

    Raises:
        ShardError: The trees differ. The message names the first path.

    Examples:
        >>> leaves, spec = tree.flatten({"w": torch.ones(1)})
        >>> leaves_like(spec, {"v": torch.ones(1)}, "params")
        Traceback (most recent call last):
        fzero.errors.ShardError: params and gradients differ in structure: params['v'] has no \
gradient. Pass the params that the gradients and the optimizer's state were made from.
    """
    found = tree.leaves_at(spec, other)
    if found is not None:
        return found
    paths = tree.paths(tree.unflatten(spec, range(spec.num_leaves)))
    others = tree.paths(other)
    if extra := [path for path in others if path not in set(paths)]:
        difference = f"{what}{extra[0]} has no gradient"
    else:
        (missing, *_) = (path for path in paths if path not in set(others))
        difference = f"the gradient at {missing} has no partner in {what}"
    raise ShardError(
        f"{what} and gradients differ in structure: {difference}. Pass the params that the "
        "gradients and the optimizer's state were made from."
    )


def ordered_like(grads: PyTree, params: PyTree) -> PyTree:
    """The params in the structure of the gradients, so that leaves of both come in one order.

    Raises:
        ShardError: they have leaves at other paths.
    """
    spec = tree.flatten(grads)[1]
    return tree.unflatten(spec, leaves_like(spec, params, "params"))


def cast_like(leaves: Leaves, like: Leaves) -> list[Tensor]:
    """Each leaf in the dtype of its partner: the fused kernels take one dtype only."""
    pairs = zip(leaves, like, strict=True)
    return [leaf if leaf.dtype == ref.dtype else leaf.to(ref.dtype) for leaf, ref in pairs]


def scaled(leaves: Leaves, factor: float | Tensor) -> list[Tensor]:
    """New tensors `leaf * factor`, in the leaves' dtype. The leaves are of one group."""
    if not isinstance(factor, Tensor):
        return list(torch._foreach_mul(leaves, factor))
    dtype = leaves[0].dtype
    factor = _factor(factor, leaves[0])
    if factor.requires_grad:  # torch can't take the list's operator back to a tensor
        products = [leaf * factor for leaf in leaves]
    else:
        products = torch._foreach_mul(leaves, factor)
    # A 0-d leaf of lower precision is promoted by the factor's dtype, larger ones are not.
    return [value if value.dtype == dtype else value.to(dtype) for value in products]


def mixed(means: Leaves, leaves: Leaves, share: float | Tensor) -> list[Tensor]:
    """New tensors `share * mean + (1 - share) * leaf`, in the dtype of the means."""
    if not isinstance(share, Tensor):
        return list(torch._foreach_lerp(means, leaves, 1.0 - share))
    # a weight that is a tensor is lerp's only if it has the shape of its leaf
    return list(torch._foreach_add(scaled(means, share), scaled(leaves, 1.0 - share)))


def scaled_each(leaves: Leaves, factors: list[Tensor]) -> list[Tensor]:
    """New tensors `leaf * factor`, of its own or the one of all. The leaves are of one group."""
    if len(factors) == 1:
        return scaled(leaves, factors[0])
    return [scaled([leaf], factor)[0] for leaf, factor in zip(leaves, factors, strict=True)]


def scale_(leaves: Leaves, factor: float | Tensor) -> None:
    """`leaf *= factor`. The leaves are of one group."""
    if isinstance(factor, Tensor):
        torch._foreach_mul_(leaves, _factor(factor, leaves[0]))
    else:
        torch._foreach_mul_(leaves, factor)


def scale_each_(leaves: list[Tensor], factors: list[Tensor]) -> None:
    """`leaf *= factor`, of its own or the one of all. The leaves are of one group."""
    if len(factors) == 1:
        scale_(leaves, factors[0])
        return
    for leaf, factor in zip(leaves, factors, strict=True):
        scale_([leaf], factor)


def subtract_(leaves: Leaves, directions: Leaves, lr: float | Tensor) -> None:
    """`leaf -= lr * direction`. The leaves are of one group."""
    if isinstance(lr, Tensor):
        # alpha takes a number: a tensor's would have to be read, and waited for
        torch._foreach_sub_(leaves, scaled(directions, lr))
    else:
        torch._foreach_add_(leaves, directions, alpha=-lr)


def add_(leaves: Leaves, updates: Leaves) -> None:
    """`leaf += update`, leaves of any dtypes and devices."""
    by_group(torch._foreach_add_, leaves, updates)


def copy_(leaves: Leaves, values: Leaves) -> None:
    """`leaf[...] = value`, leaves of any dtypes and devices."""
    by_group(torch._foreach_copy_, leaves, values)


def zeros_like(params: PyTree) -> PyTree:
    """A tree of zeros with the shapes, dtypes and devices of `params`."""
    # Row-major whatever the params' strides are: the fused kernels walk memory in order.
    return tree.map(lambda p: torch.zeros_like(p, memory_format=torch.contiguous_format), params)


def zero_step(params: PyTree) -> Tensor:
    """A step of 0: 0-d float32 on the device of the first leaf."""
    first = next(iter(tree.leaves(params)), None)
    return torch.zeros((), dtype=torch.float32, device=None if first is None else first.device)


def _factor(factor: Tensor, leaf: Tensor) -> Tensor:
    """A 0-d factor as the kernels like it: on the leaf's device, never below float32."""
    wide = leaf.dtype if leaf.dtype in (torch.float32, torch.float64) else torch.float32
    return factor.to(device=leaf.device, dtype=wide)


def _groups(leaves: Leaves, max_bytes: Callable[[torch.device], int] | None) -> Iterator[list[int]]:
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for row, leaf in enumerate(leaves):
        groups.setdefault((leaf.device, leaf.dtype), []).append(row)
    for (device, _), rows in groups.items():
        if max_bytes is None:
            yield rows
            continue
        limit = max_bytes(device)
        part: list[int] = []
        size = 0
        for row in rows:
            # `part` first: a leaf beyond the limit goes alone, and no group is empty
            if part and size + leaves[row].nbytes > limit:
                yield part
                part, size = [], 0
            part.append(row)
            size += leaves[row].nbytes
        yield part
