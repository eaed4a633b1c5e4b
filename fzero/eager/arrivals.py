"""Full gradients that are reduced in buckets as backward brings them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fzero.distributed.buckets import plan_buckets
from fzero.layout import LeafLayout

Reduce = Callable[[Sequence[Tensor], Sequence[LeafLayout]], list[Tensor]]


class Arrivals:
    """Full gradients, reduced in buckets as backward brings them.

    The buckets and their order are fixed, from the last leaf to the first, so that ranks whose
    backwards take different ways reduce the same things; a gradient that never comes is zero.

    Args:
        tensors: leaves of autograd's graph.
        leaves: how each is split.
        reduce: from full gradients to what each rank keeps.
        limit: most bytes in a bucket.
        done: told when a tensor's gradient has arrived.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        leaves: Sequence[LeafLayout],
        reduce: Reduce,
        limit: int,
        done: Callable[[int], None] = lambda i: None,
    ) -> None:
        self.tensors, self.leaves, self.reduce = tensors, leaves, reduce
        self.arrived: dict[int, Tensor] = {}
        self.reduced: dict[int, Tensor] = {}
        last_first = range(len(tensors))[::-1]
        self.waiting = plan_buckets([x.nbytes for x in tensors], last_first, limit)
        self.hooks = [x.register_hook(self._taker(i, done)) for i, x in enumerate(tensors)]

    def finish(self) -> list[Tensor]:
        """What `reduce` made of each gradient; those that have not come are zeros."""
        while self.waiting:
            for i in self.waiting[0]:
                if i not in self.arrived:
                    x = self.tensors[i]
                    self.arrived[i] = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            self._flush()
        for hook in self.hooks:  # they hold what holds them
            hook.remove()
        return [self.reduced.pop(i) for i in range(len(self.leaves))]

    def _taker(self, i: int, done: Callable[[int], None]) -> Callable[[Tensor], Tensor | None]:
        def take(grad: Tensor) -> Tensor | None:
            self.arrived[i] = dense(grad)
            done(i)
            while self.waiting and all(j in self.arrived for j in self.waiting[0]):
                self._flush()
            if grad.layout != torch.strided:  # sparse gradients may not be replaced
                return None
            return grad.new_zeros(()).expand(grad.shape)  # nothing for autograd to keep

        return take

    def _flush(self) -> None:
        indices = self.waiting.pop(0)
        grads = [self.arrived.pop(i) for i in indices]
        results = self.reduce(grads, [self.leaves[i] for i in indices])
        for i, result in zip(indices, results, strict=True):
            self.reduced[i] = result


def dense(grad: Tensor) -> Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()
