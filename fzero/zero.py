"""The ZeRO stages, each a composition of transforms around one gradient.

    stage 0    all_reduce     . grad(loss)
    stage 1    reduce_scatter . accumulate . grad(loss)
    stage 2    accumulate . reduce_scatter . grad(loss)
    stage 3    accumulate . grad(loss . all_gather)          whose gradient is the reduce-scatter

A *loss function* here takes one tuple of leaves and returns `(loss, aux)`; a *gradient function*
takes the tuple of trained leaves, then the tuple of frozen ones, then what the loss takes, and
returns `(gradients, (loss, aux))`; aux is a tuple of tensors. All are ordinary functions:
`torch.func.jvp` of a gradient function is a Hessian-vector product, on shards.

References: Rajbhandari et al., ZeRO, arXiv:1910.02054, sec. 5; HSDP: Zhao et al., PyTorch FSDP,
arXiv:2304.11277, sec. 3.2.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fzero.distributed.collectives import (
    all_gather,
    all_reduce,
    boundary,
    dense,
    reduce_scatter,
    replicate,
)
from fzero.distributed.mesh import Axes
from fzero.functional.differentiate import differentiated, differentiating
from fzero.layout import Layout

Leaves = tuple[Tensor, ...]
LossFn = Callable[..., tuple[Tensor, Any]]
GradFn = Callable[..., tuple[Leaves, tuple[Tensor, Any]]]
Grad = Callable[[LossFn], GradFn]
Way = Callable[[LossFn, Layout, Axes, Grad], GradFn]


def grad(loss_fn: LossFn) -> GradFn:
    """`torch.func.grad_and_value` of the loss with respect to its first argument: the definition.

    >>> grads, (loss, aux) = grad(lambda p: ((p[0] ** 2).sum(), ()))((torch.tensor([3.0]),))
    >>> grads, loss
    ((tensor([6.]),), tensor(9.))
    """
    return torch.func.grad_and_value(loss_fn, has_aux=True)


def vjp(loss_fn: LossFn) -> GradFn:
    """The same operator with a backward that is outside of grad mode, as `loss.backward()` is.

    `torch.func.grad` prepares for a second derivative. Then eager mode keeps memory for it, and
    operators that choose by grad mode (silu, group_norm, ...) take a backward of many small steps
    that rounds differently. Its results have no derivative; a derivative inside the loss is fine.

    >>> grads, (loss, aux) = vjp(lambda p: ((p[0] ** 2).sum(), ()))((torch.tensor([3.0]),))
    >>> grads, loss
    ((tensor([6.]),), tensor(9.))
    """

    def fn(trained: Leaves, *args: Any) -> tuple[Leaves, tuple[Tensor, Any]]:
        def loss_of(trained: Leaves) -> tuple[Tensor, Any]:
            return loss_fn(trained, *args)

        loss, pull, aux = torch.func.vjp(loss_of, trained, has_aux=True)  # pyright: ignore
        with torch.no_grad():
            (grads,) = pull(torch.ones_like(loss), retain_graph=False)
        return tuple(map(dense, grads)), (loss, aux)

    return fn


def autograd(loss_fn: LossFn, *, must_depend: bool = False) -> GradFn:
    """The same operator through `torch.autograd.grad`, for functions that `torch.func` refuses.

    It stages out more, and does not compose: its results have no derivative. With `must_depend` it
    raises an FzeroError for a loss that depends on none of the leaves, whose gradients are zero.
    """

    def fn(trained: Leaves, *args: Any) -> tuple[Leaves, tuple[Tensor, Any]]:
        inputs = tuple(x.detach().requires_grad_() for x in trained)
        with differentiating():  # in backward, too, which may compute a part again
            with torch.enable_grad():
                loss, aux = loss_fn(inputs, *args)
            found = differentiated(loss, inputs, must_depend=must_depend)
        pairs = zip(found, inputs, strict=True)
        grads = tuple(torch.zeros_like(x) if g is None else dense(g) for g, x in pairs)
        return grads, (loss.detach(), pytree.tree_map(torch.Tensor.detach, aux))

    return fn


def zero3(loss_fn: LossFn, layout: Layout, axes: Axes, grad: Grad = grad) -> GradFn:
    """Parameters, gradients and optimizer state in shards: gather, differentiate, scatter back.

    Args:
        loss_fn: `(leaves, *args) -> (loss, aux)` on full leaves.
        layout: how each leaf is split over `axes.shard`.
        axes: the mesh.
        grad: the gradient operator; any with `torch.func.grad_and_value`'s meaning.

    Returns:
        `(trained_shards, frozen_shards, *args) -> (gradient_shards, (loss, aux))`. Gradients are
        summed over all ranks: scale the loss (`scaled`) for a mean.

    Examples:
        >>> from fzero.layout import plan_layout
        >>> w = torch.tensor([1.0, 2.0])
        >>> grads_of = zero3(lambda p: ((p[0] ** 3).sum(), ()), plan_layout(["w"], [w], 1), Axes())
        >>> grads_of((w,), ())[0]
        (tensor([ 3., 12.]),)
        >>> torch.func.jvp(lambda s: grads_of(s, ())[0], ((w,),), ((torch.ones(2),),))[1]
        (tensor([ 6., 12.]),)
    """

    def loss_of_shards(trained: Leaves, frozen: Leaves, *args: Any) -> tuple[Tensor, Any]:
        return loss_fn(gathered(layout.merge(trained, frozen), layout, axes), *args)

    return grad(loss_of_shards)


def gathered(shards: Sequence[Tensor], layout: Layout, axes: Axes) -> Leaves:
    """Full leaves from every rank's shards; their gradients are summed and scattered back.

    A leaf that is whole on every rank is one value that all ranks use: its gradients are summed.
    """
    return tuple(
        # in this order: backward then sums over the replicate axis what is scattered already
        all_gather(replicate(shard, axes.replicate, leaf.name), leaf, axes.shard)
        for shard, leaf in zip(shards, layout, strict=True)
    )


def zero2(loss_fn: LossFn, layout: Layout, axes: Axes, grad: Grad = grad) -> GradFn:
    """Full parameters in, gradient shards out: each gradient is scattered once it is there.

    Forward-mode derivatives of it are exact; for reverse over reverse take `zero3`, whose
    parameters are known to be one tree over all ranks. Here every rank has a copy of its own.
    """
    local = ddp_local(loss_fn, layout, axes, grad)

    def sharded(trained: Leaves, frozen: Leaves, *args: Any) -> tuple[Leaves, tuple[Tensor, Any]]:
        grads, value = local(trained, frozen, *args)
        return scatter(grads, layout, axes), value

    return sharded


def zero0(loss_fn: LossFn, layout: Layout, axes: Axes, grad: Grad = grad) -> GradFn:
    """Nothing sharded (DDP): full parameters in, full gradients out, summed over all ranks."""
    local = ddp_local(loss_fn, layout, axes, grad)

    def summed(trained: Leaves, frozen: Leaves, *args: Any) -> tuple[Leaves, tuple[Tensor, Any]]:
        grads, value = local(trained, frozen, *args)
        return all_sum(grads, layout, axes), value

    return summed


def ddp_local(loss_fn: LossFn, layout: Layout, axes: Axes, grad: Grad = grad) -> GradFn:
    """This rank's own full gradients; no collective. What stages 0 and 1 accumulate."""
    del axes

    def loss_of_full(trained: Leaves, frozen: Leaves, *args: Any) -> tuple[Tensor, Any]:
        leaves = layout.merge(trained, frozen)
        low = [
            p.to(leaf.compute) if leaf.compute else p
            for p, leaf in zip(leaves, layout, strict=True)
        ]
        return loss_fn(tuple(low), *args)

    return grad(loss_of_full)


def scatter(grads: Sequence[Tensor], layout: Layout, axes: Axes) -> Leaves:
    """Gradient shards, summed over all ranks, from every rank's full gradients."""
    return tuple(
        # scattered first: a shard, not a whole gradient, travels over the other axis
        all_reduce(reduce_scatter(grad, leaf, axes.shard), axes.replicate, leaf.name)
        for grad, leaf in zip(grads, layout.trained, strict=True)
    )


def all_sum(grads: Sequence[Tensor], layout: Layout, axes: Axes) -> Leaves:
    """Full gradients, summed over all ranks."""
    return tuple(
        all_reduce(
            all_reduce(grad.to(leaf.reduce or grad.dtype), axes.shard, leaf.name),
            axes.replicate,
            leaf.name,
        )
        for grad, leaf in zip(grads, layout.trained, strict=True)
    )


def scaled(loss_fn: LossFn, factor: float | Tensor) -> LossFn:
    """The loss times `factor`, with the plain loss kept in aux: `(factor * loss, (loss, aux))`.

    A mean over ranks and micro-batches costs one multiplication of a scalar here, instead of one
    of every gradient; a loss scale is the same thing.
    """

    def fn(leaves: Leaves, *args: Any) -> tuple[Tensor, tuple[Tensor, Any]]:
        loss, aux = loss_fn(leaves, *args)
        loss = boundary(loss)
        # a multiplication by one would be recorded, and run in every step
        unit = isinstance(factor, float) and factor == 1.0
        return (loss if unit else loss * factor), (loss, aux)

    return fn
