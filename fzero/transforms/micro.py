"""A step's batch, cut into micro-batches."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero.errors import ShardError, users_line
from fzero.transforms.frames import take_apart
from fzero.tree import PyTree


def micro_batches(batch: PyTree, count: int) -> list[PyTree]:
    """`batch` cut into `count` parts along every leaf's leading dim; 0-d leaves go to all.

    Raises:
        ShardError: a leaf is not a tensor, its leading dim is not divisible by `count`, or it has
            other rows than another leaf: then cutting both may mean something else than is meant.

    Examples:
        >>> micro_batches({"x": torch.arange(4)}, 2)
        [{'x': tensor([0, 1])}, {'x': tensor([2, 3])}]
    """
    leaves, frame = take_apart(batch)
    for x, path in zip(leaves, frame.paths, strict=True):
        _check_leaf(x, path)
    if count == 1:
        return [batch]
    for x, path in zip(leaves, frame.paths, strict=True):
        if x.dim() and x.shape[0] % count:
            raise ShardError(
                f"batch{path} has {x.shape[0]} rows, which Config.accum_steps={count} does not "
                f"divide; every micro-batch must have the same rows. Pass {count} x n rows, or "
                "drop the last ones (drop_last=True in a DataLoader)."
            )
    _refuse_other_rows(leaves, frame.paths, count)
    frame = frame.of_inputs(leaves)
    columns = [x.chunk(count) if x.dim() else (x,) * count for x in leaves]
    return [frame.unflatten([column[i] for column in columns]) for i in range(count)]


def _refuse_other_rows(leaves: Sequence[Tensor], paths: Sequence[str], count: int) -> None:
    rows = {x.shape[0]: path for x, path in zip(leaves, paths, strict=True) if x.dim()}
    if len(rows) > 1:
        (first, where), (other, there), *_ = rows.items()
        raise ShardError(
            f"batch{where} has {first} rows and batch{there} has {other}, and "
            f"Config.accum_steps={count} cuts each leaf's rows into {count} parts. Give all leaves "
            "of the batch the rows of this rank's examples: what belongs to an example as a dim of "
            "its row ([rows, n]). What is the same for all (class weights, a mask, a table) has no "
            "rows: let the model function read it from outside, or pass numbers or 0-d tensors."
        )


def _check_leaf(x: Tensor, path: str) -> None:
    if isinstance(x, DTensor):
        raise ShardError(
            f"batch{path} is a DTensor, a parameter that is sharded over ranks; a batch is made of "
            "plain tensors. Pass fzero.unshard(...) of it, which every rank must call."
        )
    refuse_sparse(x, f"batch{path}")
    tell_of_graph(x, f"batch{path}")


def tell_of_graph(x: Tensor, what: str) -> None:
    """Warn of a tensor whose graph gets no gradient, since nothing leads back out of a function."""
    if x.grad_fn is not None:
        warnings.warn(
            f"{what} comes with a graph ({x.grad_fn.name()}), and no gradient goes back into that: "
            "what it was computed with is not trained by this. Compute it in the function, with "
            "its parameters among the function's; or pass x.detach(), if that is meant.",
            stacklevel=users_line(),
        )


def refuse_sparse(x: Tensor, what: str) -> None:
    """Raise if a tensor that a function is to be staged out for has no storage.

    Raises:
        ShardError: it is sparse, or nested.
    """
    if x.layout is torch.jagged:
        raise ShardError(
            f"{what} is a jagged nested tensor, which can't be staged out or cut. Pass its "
            "values() and offsets(). Under Config(executor='eager') the function can make it of "
            "them, torch.nested.nested_tensor_from_jagged(values, offsets)."
        )
    if x.layout is not torch.strided:
        raise ShardError(
            f"{what} is a sparse tensor ({x.layout}), which can't be staged out. Pass its "
            "indices() and values(), and make the sparse tensor in the function."
        )
