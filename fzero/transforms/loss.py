"""What is asked of a loss, and room for its gradients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.errors import FzeroError
from fzero.layout import Layout, LeafLayout
from fzero.numerics.casts import widened


def check_loss(loss: Any) -> None:
    """Raise if `loss` is not a 0-d floating tensor."""
    if not isinstance(loss, Tensor):
        raise FzeroError(
            f"the model function returned a {type(loss).__name__} as its loss; it must be a 0-d "
            "floating tensor, the mean over this rank's batch."
        )
    if loss.dim() or not loss.is_floating_point():
        raise FzeroError(
            f"the loss has shape {tuple(loss.shape)} and dtype {loss.dtype}; it must be a 0-d "
            "floating tensor, the mean over this rank's batch. Reduce it with .mean()."
        )


def with_room(trained: Sequence[Tensor], layout: Layout) -> tuple[tuple[Tensor, ...], Layout]:
    """The trained shards in dtypes that hold their gradients as they are reduced, and the layout.

    Autograd gives a gradient in the dtype of what it is the gradient of: of a bfloat16 shard it
    would round what was just summed in float32. What is gathered stays the same.
    """

    def wide(leaf: LeafLayout) -> LeafLayout:
        if not leaf.trainable or leaf.reduce is None:
            return leaf
        dtype = torch.promote_types(leaf.dtype, leaf.reduce)
        same = dtype == leaf.dtype
        return leaf if same else replace(leaf, dtype=dtype, compute=leaf.compute or leaf.dtype)

    roomy = replace(layout, leaves=tuple(map(wide, layout)))
    pairs = zip(trained, roomy.trained, strict=True)
    return tuple(x.to(leaf.dtype) for x, leaf in pairs), roomy


def summable(grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in dtypes that lose nothing of many micro-batches: float32 at least."""
    return [widened(grad) for grad in grads]
