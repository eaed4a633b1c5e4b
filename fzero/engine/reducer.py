"""The gradients of one step, as backward brings them: local, on their way, and reduced.

[Note: where a gradient is] One word a state. The state machine knows for which leaves there is one
(fields of `Task`, and of `BackwardState` with a star); the reducer has the tensors.

| term      | Task       | Reducer           | what it is                                       |
|-----------|------------|-------------------|--------------------------------------------------|
| deferred  | synced     | (`param.grad`)    | of a task that is not synced, read at its end    |
| early     | early*     | early             | of a backward inside a forward, for the task     |
|           |            |                   | that will reach the forward's output             |
| adopted   | adopted    | adopted, borrowed | was early, is the running task's; or again early |
| pending   | seen       | pending           | of the running task: arrived, not sent           |
| sent      | sent       | handles, landed   | of the running task: its bucket left, or is back |
| extra     | extra      | pending           | came after its bucket left; unreduced in the end |
| unreduced | unreduced* | unreduced         | of tasks before: full, and this rank's own       |
| used      | sent       | used              | was unreduced, sent by the running task          |
| reduced   |            | reduced           | summed over ranks; shards from stage 1 on        |

A raise makes what was adopted early, and what was used unreduced, again.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fzero.distributed.transport import Handle, Transport
from fzero.errors import BackwardError, FzeroError, RankMismatchError
from fzero.layout import LeafLayout, Together

# Reductions that are under way at once: each holds its bucket twice.
_UNDER_WAY = 1


@dataclass
class Held:
    """The gradients of a step between two tasks: dropped all at once, by one assignment.

    Attributes:
        unreduced: full, and this rank's own.
        reduced: summed over ranks.
        present: leaves that have a gradient of this rank.
        reductions: that are in `reduced`.
        dropped: a digest of what was taken out of them, in whatever order.
        changes: what is being done to them in place; whoever finds it set finds them half done.
    """

    unreduced: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    reduced: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    present: set[int] = field(default_factory=set[int])
    reductions: int = 0
    dropped: int = 0
    changes: str = ""


class Reducer:
    """What an engine holds of its trained leaves' gradients.

    Args:
        leaves: of all parameters; the trained ones get gradients.
        buckets: indices of those that are reduced together.
        transport: what reduces.
        scatter: whether only this rank's shards of the sums are kept.
        factors: on each gradient before, and on the sum after it is reduced.
        device: of the parameters.
        accumulates: whether sums of many micro-batches are expected: they are added up in place,
            in no less than float32.
        on_sent: told of the leaves whose gradients have been sent.
    """

    def __init__(
        self,
        leaves: Sequence[LeafLayout],
        buckets: Sequence[Sequence[int]],
        transport: Transport,
        *,
        scatter: bool,
        factors: tuple[float, float],
        device: torch.device,
        accumulates: bool,
        on_sent: Callable[[Sequence[int]], None],
    ) -> None:
        self.transport = transport
        self.group(leaves, buckets)
        self.scatter, self.factors, self.device, self.on_sent = scatter, factors, device, on_sent
        self.share = factors[0] * factors[1]  # of the mean, or the sum, in each gradient
        self.accumulates = accumulates
        # dtypes in which gradients come, travel and are summed
        come = [leaf.compute or leaf.dtype for leaf in leaves]
        self.travels = [leaf.reduce or dtype for leaf, dtype in zip(leaves, come, strict=True)]
        self.sums = [_summed_in(dtype) if accumulates else dtype for dtype in self.travels]
        self.wider = [i for i, dtype in enumerate(come) if self.sums[i] != dtype]
        self.pending: dict[int, Tensor] = {}  # see [Note: where a gradient is] for these
        self.early: dict[int, dict[int, Tensor]] = {}
        self.adopted: set[int] = set()  # forwards, by the running task
        self.borrowed: dict[int, list[tuple[Tensor, Tensor | float]]] = {}  # with their factors
        self.held = Held()
        self.used: set[int] = set()  # of the unreduced ones, by the running task
        self.handles: list[tuple[Sequence[int], Handle]] = []
        self.landed: dict[int, Tensor] = {}
        self.arrived: dict[int, None] = {}  # leaves of the running task, in order

    @property
    def unreduced(self) -> dict[int, Tensor]:
        """As `Held` has them."""
        return self.held.unreduced

    @property
    def reduced(self) -> dict[int, Tensor]:
        """As `Held` has them."""
        return self.held.reduced

    @property
    def present(self) -> set[int]:
        """As `Held` has them."""
        return self.held.present

    def group(self, leaves: Sequence[LeafLayout], buckets: Sequence[Sequence[int]]) -> None:
        """From now on reduce these together, as a constructor's arguments."""
        self.leaves, self.buckets = leaves, buckets
        self._together = [Together(leaves[i] for i in indices) for indices in buckets]

    def take(self, index: int, grad: Tensor) -> None:
        """A gradient for the running task."""
        total = self.pending.get(index)  # another task, nested or around it, has brought one
        self.arrived[index] = None
        self.pending[index] = grad if total is None else total.add_(grad)

    def take_all(self, grads: dict[int, Tensor]) -> None:
        """Gradients of many leaves for the running task."""
        self.arrived.update(dict.fromkeys(grads))
        self.pending = _sum(self.pending, grads, in_place=True)

    def take_early(self, index: int, forward: int, grad: Tensor) -> None:
        """A gradient for the task that will reach this forward."""
        mine = self.early.setdefault(forward, {})
        mine[index] = mine[index].add_(grad) if index in mine else grad

    def adopt(self, forward: int, factor: Tensor | float) -> None:
        """The running task has reached a forward: its early gradients are the task's."""
        self.adopted.add(forward)
        for index, grad in self.early[forward].items():
            self.arrived[index] = None
            self.borrowed.setdefault(index, []).append((grad, factor))

    def forget(self, forward: int) -> None:
        """Drop the early gradients of a forward, once the running task is over."""
        self.early.pop(forward, None)

    def launch(self, bucket: int) -> None:
        """Reduce a bucket: what is unreduced and what the task has; zeros where nothing is."""
        indices = self.buckets[bucket]
        self._land(_UNDER_WAY - 1)  # before the next takes memory
        handle = self._send(indices, self._together[bucket], [self._local(i) for i in indices])
        self.handles.append((indices, handle))
        self.on_sent(indices)  # its full parameters may be freed

    def commit(self) -> None:
        """The running task has ended well."""
        self._land(0)
        for index, grad in self.landed.items():
            if grad.dtype != self.sums[index]:
                self.landed[index] = grad.to(self.sums[index])
        held, before = self.held, self.held.changes
        held.changes = before or "a backward, which adds to them,"
        held.present |= self.arrived.keys()
        self.arrived.clear()
        for index in self.used:
            del self.unreduced[index]
        self.used.clear()
        landed, self.landed = self.landed, {}
        if landed:
            held.reductions += 1
        held.reduced = _sum(held.reduced, landed, in_place=True)  # our own: reductions made them
        # what is pending at the end is extra, or of a task that is not synced
        for index in [*self.borrowed]:
            self.pending[index] = self._brought(index)
        for forward in self.adopted:
            self.early.pop(forward, None)
        self.adopted.clear()
        for index in self.wider:
            if index in self.pending:
                self.pending[index] = self.pending[index].to(self.sums[index])
        pending, self.pending = self.pending, {}
        # where none were expected, these may be in memory that others hold, too
        held.unreduced = _sum(held.unreduced, pending, in_place=self.accumulates)
        held.changes = before  # what was half done is so still

    def discard(self) -> None:
        """The running task has raised: everything is as before it."""
        # a reduction that fails too is no news: what the task raised is on its way
        with contextlib.suppress(RuntimeError, FzeroError):
            self._land(0)
        self.handles.clear()
        self.landed.clear()
        self.pending.clear()
        self.borrowed.clear()
        self.adopted.clear()
        self.used.clear()
        self.arrived.clear()

    def flush(self) -> None:
        """Reduce all that is unreduced."""
        for bucket in range(len(self.buckets)):
            self.launch(bucket)
        self.commit()

    def clear(self) -> None:
        """No gradients."""
        self.held = Held()

    def refuse_half_done(self, what: str) -> None:
        """Raise if something broke off while it changed the gradients in place.

        Args:
            what: happened, as messages say it.

        Raises:
            BackwardError: something did; nothing has changed.
        """
        if self.held.changes:
            raise BackwardError(
                f"{what}, and {self.held.changes} broke off half-way (an interrupt, or out of "
                "memory): some gradients have changed and others haven't. Drop them on every rank "
                "with engine.zero_grad(), and run this step's forwards and backwards again."
            )

    def has(self, index: int) -> bool:
        """Whether a leaf has a gradient anywhere; see [Note: where a gradient is]."""
        states = (
            self.pending,
            self.borrowed,
            self.unreduced,
            self.landed,
            self.reduced,
            self.present,
        )
        return any(index in there for there in (*states, *self.early.values()))

    @property
    def is_empty(self) -> bool:
        """Whether no leaf has a gradient anywhere, between two tasks."""
        return not (self.present or self.unreduced or self.reduced or self.early or self.pending)

    def anywhere(self, *here: bool) -> list[bool]:
        """Whether any rank says so; all of them must ask."""
        flags = torch.tensor(here, dtype=torch.float32, device="cpu").to(self.device)
        return [flag > 0 for flag in self.transport.sum(flags).tolist()]

    def drop(self, index: int) -> None:
        """No gradient of this leaf."""
        if index in self.reduced:
            self.held.dropped += (index + 1) * (self.held.reductions + 1)
        self.replace(index, None)

    def replace(self, index: int, grad: Tensor | None, *, reduced: bool = False) -> None:
        """Another gradient of this leaf, or none; of this rank alone."""
        self.unreduced.pop(index, None)
        self.reduced.pop(index, None)
        self.present.discard(index)
        if grad is not None:
            (self.reduced if reduced else self.unreduced)[index] = grad
            self.present.add(index)

    @property
    def sums_held(self) -> int:
        """A number for the reductions that gradients are of, the same on all ranks."""
        return (self.held.reductions + 1009 * self.held.dropped) % 2**31

    def unscale(self, factor: Tensor) -> bool:
        """Multiply all that is held between two tasks by a 0-d tensor; all ranks must do so.

        Returns:
            Whether all of it was finite, on every rank. Until `unscaled()` is called it counts as
            half done.

        Raises:
            RankMismatchError: ranks have different factors; nothing has changed.
        """
        factor = factor.to(self.device)
        bad = torch.zeros((), dtype=torch.bool, device=self.device)
        for held in (self.reduced, self.unreduced):
            if grads := [grad for grad in held.values() if grad.numel()]:
                # one bad element makes its largest magnitude bad
                largest = torch._foreach_norm(grads, math.inf)
                bad = torch.stack([~torch.isfinite(x) for x in (*largest, bad)]).any()
        exact = factor.double()
        told = torch.stack([bad.double(), torch.ones_like(exact), exact, exact.square()])
        bad_ranks, ranks, total, squares = self.transport.sum(told).tolist()
        if not math.isclose(ranks * squares, total * total, rel_tol=1e-9):
            raise RankMismatchError(
                f"ranks' GradScalers have different scales (this one's is {1 / float(factor):g}), "
                "and gradients are added up over ranks. Make them with the same arguments, and "
                "load the same state into all of them. No gradient was changed."
            )
        self.held.changes = "a GradScaler, which divides them,"
        # those may be in memory that others hold, too, where no sums are expected
        for held, in_place in ((self.reduced, True), (self.unreduced, self.accumulates)):
            if held and in_place:
                torch._foreach_mul_(list(held.values()), factor)
            elif held:
                products = torch._foreach_mul(list(held.values()), factor)
                held.update(zip(list(held), products, strict=True))
        return bad_ranks == 0

    def unscaled(self) -> None:
        """What `unscale` did is noted."""
        self.held.changes = ""

    def zeros(self, index: int, *, full: bool) -> Tensor:
        """The sum of a leaf without a gradient."""
        leaf = self.leaves[index]
        shape = leaf.shape if full else leaf.shard_shape(self.transport.axes.shard.rank)
        return torch.zeros(shape, dtype=self.sums[index], device=self.device)

    def for_update(self, *, reduces: bool, in_place: bool) -> list[Tensor]:
        """What a step's update takes: of each trained leaf the mean, or this rank's part of it.

        Args:
            reduces: whether backwards reduced; else it is the update that will.
            in_place: whether what is held may be changed.
        """
        source = self.reduced if reduces else self.unreduced
        full = not (reduces and self.scatter)
        trained = [i for i, leaf in enumerate(self.leaves) if leaf.trainable]
        grads = [source[i] if i in source else self.zeros(i, full=full) for i in trained]
        if reduces or self.share == 1 or not grads:
            return grads
        if in_place:
            self.held.changes = "an update, which scales them,"
            torch._foreach_mul_(grads, self.share)
            return grads
        return list(torch._foreach_mul(grads, self.share))

    def full(self, index: int, *, reduces: bool) -> Tensor | None:
        """The mean of everything a leaf has, whole, on every rank; all of them must ask.

        Args:
            index: of the leaf.
            reduces: whether backwards reduce.

        Returns:
            None if no rank has anything.
        """
        present, unreduced = self.anywhere(index in self.present, index in self.unreduced)
        if not present:
            return None
        if not reduces:
            return self.transport.sum(self.local(index)) * self.share
        total, leaf = self.one(index, unreduced=unreduced), self.leaves[index]
        sharded = self.scatter and leaf.dim is not None
        # in memory of its own: whoever asked may write there
        return self.transport.whole(total, leaf) if sharded else total.clone()

    def one(self, index: int, *, unreduced: bool) -> Tensor:
        """The sum of everything a leaf has, reduced, as `reduced` holds it; changes nothing.

        Args:
            index: of the leaf.
            unreduced: whether some rank has an unreduced gradient of it.
        """
        total = self.reduced.get(index)
        if total is None:
            total = self.zeros(index, full=not self.scatter)
        return total + self._alone(index).wait()[0] if unreduced else total

    def local(self, index: int) -> Tensor:
        """A copy of what is unreduced of a leaf: full, and this rank's own."""
        unreduced = self.unreduced.get(index)
        return self.zeros(index, full=True) if unreduced is None else unreduced.clone()

    def _local(self, index: int) -> Tensor:
        grad, unreduced = self._brought(index), self.unreduced.get(index)
        if unreduced is None:
            return self.zeros(index, full=True) if grad is None else grad
        self.used.add(index)
        # what is unreduced stays as it is, should the task raise
        return unreduced.clone() if grad is None else unreduced + grad

    def _brought(self, index: int) -> Any:
        """What the task has of a leaf and no longer holds then, or None."""
        grad = self.pending.pop(index, None)
        for early, factor in self.borrowed.pop(index, ()):  # stays, should the task raise
            # not multiplied by 0: what counts for nothing may be infinite
            nothing = isinstance(factor, float) and factor == 0
            brought = torch.zeros_like(early) if nothing else early * factor
            grad = brought if grad is None else grad.add_(brought)
        return grad

    def _alone(self, index: int) -> Handle:
        return self._send([index], (self.leaves[index],), [self.local(index)])

    def _send(
        self, indices: Sequence[int], leaves: Sequence[LeafLayout], grads: list[Tensor]
    ) -> Handle:
        before, after = self.factors
        # the same on every rank, whoever has got what
        for at, index in enumerate(indices):
            if grads[at].dtype != self.travels[index]:
                grads[at] = grads[at].to(self.travels[index])
        return self.transport.reduce(
            grads, leaves, scatter=self.scatter, before=before, after=after
        )

    def _land(self, most: int) -> None:
        """Wait until at most so many reductions are under way."""
        while len(self.handles) > most:
            indices, handle = self.handles.pop(0)
            self.landed.update(zip(indices, handle.wait(), strict=True))


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _sum(total: dict[int, Tensor], more: dict[int, Tensor], *, in_place: bool) -> dict[int, Tensor]:
    """Both added up, in one of these dicts: of neither anything may be used again."""
    if not total:  # of a thousand small tensors to copy a dict is a hundredth of a backward
        return more
    if both := [index for index in more if index in total]:
        old, new = [total[i] for i in both], [more.pop(i) for i in both]
        if in_place:
            torch._foreach_add_(old, new)
        else:
            total.update(zip(both, torch._foreach_add(old, new), strict=True))
    total.update(more)
    return total
