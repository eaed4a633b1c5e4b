"""Full gradients that are reduced in buckets as backward brings them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fzero.distributed.buckets import plan_buckets
from fzero.distributed.collectives import dense
from fzero.errors import FzeroError
from fzero.functional.differentiate import accumulated, added, no_gradient, reaching_all
from fzero.functional.tasks import current_task
from fzero.layout import LeafLayout

Reduce = Callable[[list[Tensor], Sequence[LeafLayout]], list[Tensor]]


class Arrivals:
    """Full gradients, reduced in buckets as backward brings them.

    The buckets and their order are fixed, from the last leaf to the first, so that ranks whose
    backwards take different ways reduce the same things; a gradient that never comes is zero, and
    so is one that a user's `autograd.Function` gives as None.

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
        self.waiting = plan_buckets(leaves, [x.nbytes for x in tensors], last_first, limit)
        self.task = -1  # of autograd's, in which they arrive
        self.hooks = [x.register_hook(self._taker(i, done)) for i, x in enumerate(tensors)]

    def differentiate(self, loss: Tensor, others: Sequence[Tensor] = ()) -> list[Tensor | None]:
        """Run backward; the gradients of `others`, which nothing is done to.

        Raises:
            FzeroError: the loss depends on none of them.
        """
        inputs = [*self.tensors, *others]
        if not inputs:
            return []
        if not loss.requires_grad:
            raise no_gradient()
        self.hooks.append(loss.register_hook(self._begin))
        found = reaching_all([loss], inputs)
        if all(grad is None and x.grad is None for grad, x in zip(found, inputs, strict=True)):
            raise no_gradient()
        return found[len(self.tensors) :]

    def finish(self) -> list[Tensor]:
        """What `reduce` made of each gradient; those that have not come are zeros.

        Raises:
            FzeroError: a part of one came after it was reduced.
        """
        while self.waiting:
            for i in self.waiting[0]:
                if i not in self.arrived and self.tensors[i].grad is None:
                    self.arrived[i] = self._zeros(i)
            self._flush()
        for x, leaf in zip(self.tensors, self.leaves, strict=True):
            if accumulated(x) is not None:
                raise _came_late(leaf.name)
        for hook in self.hooks:  # they hold what holds them
            hook.remove()
        return [self.reduced.pop(i) for i in range(len(self.leaves))]

    def _begin(self, grad: Tensor) -> None:
        if self.task == -1:
            self.task = current_task()

    def _taker(
        self, i: int, done: Callable[[int], None]
    ) -> Callable[[Tensor | None], Tensor | None]:
        # autograd calls a leaf's hook with None, too: its uses have come, and none had a gradient
        def take(grad: Tensor | None) -> Tensor | None:
            if current_task() != self.task:
                return None  # of a backward inside of backward, whose caller hands it on
            self.arrived[i] = self._zeros(i) if grad is None else dense(grad)
            done(i)
            while self.waiting and all(j in self.arrived for j in self.waiting[0]):
                self._flush()
            if grad is None or grad.layout != torch.strided:  # sparse ones may not be replaced
                return None
            return grad.new_zeros(()).expand(grad.shape)  # nothing for autograd to keep

        return take

    def _zeros(self, i: int) -> Tensor:
        x = self.tensors[i]  # at stage 3 a leaf without memory: not zeros_like
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    def _flush(self) -> None:
        indices = self.waiting.pop(0)
        # a backward inside of backward (of a user's checkpoint) left its part in `.grad`
        both = (added(self.arrived.pop(i, None), accumulated(self.tensors[i])) for i in indices)
        grads = [dense(x) for x in both if x is not None]
        assert len(grads) == len(indices)
        results = self.reduce(grads, [self.leaves[i] for i in indices])
        for i, result in zip(indices, results, strict=True):
            self.reduced[i] = result


def _came_late(name: str) -> FzeroError:
    return FzeroError(
        f"a part of the gradient of {name!r} came after the rest of it was reduced: backward of an "
        "autograd.Function called torch.autograd.backward, and what it checkpoints shares this "
        "parameter with other parts of the model. Use torch.utils.checkpoint or fzero.remat for "
        "it, return the gradient from the Function's backward, or use Config(executor='traced')."
    )
