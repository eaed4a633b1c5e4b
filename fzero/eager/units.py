"""Parameters of a module that are there only while something reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.distributed.transport import Handle, Transport
from fzero.eager.lazy import outside_inference
from fzero.layout import LeafLayout


class Units:
    """The full parameters that are there now.

    Args:
        leaves: of all parameters.
        plan: indices of the leaves that travel together.
        shards: this rank's part of each leaf.
        transport: what gathers.
        device: where they live.
        keep: keep what was gathered until the end of backward (reshard_after_forward=False).
        prefetch: how many units ahead gathers are launched.
    """

    def __init__(
        self,
        leaves: Sequence[LeafLayout],
        plan: Sequence[Sequence[int]],
        shards: Sequence[Tensor],
        transport: Transport,
        device: torch.device,
        *,
        keep: bool,
        prefetch: int,
    ) -> None:
        self.leaves, self.plan, self.shards = leaves, plan, shards
        self.transport, self.device, self.keep, self.prefetch = transport, device, keep, prefetch
        self.unit_of = {index: unit for unit, indices in enumerate(plan) for index in indices}
        self.here: dict[int, Tensor] = {}
        self.handles: dict[int, Handle] = {}
        self.pins: dict[str, dict[int, Tensor]] = {}  # by the module that pinned them
        self.order: list[int] = []  # of units, since the last update
        self.expected: list[int] = []  # the same, one update earlier

    def full(self, index: int) -> Tensor:
        """The full parameter, gathered unless it is there."""
        full = self.here.get(index)
        if full is None:
            with outside_inference():  # what is gathered may be read by a backward, too
                self._bring(self.unit_of[index])
            full = self.here[index]
        return full

    def reshard(self) -> None:
        """Free everything; what is under way and was not asked for, too."""
        # what is under way holds its memory until it is there
        for handle in self.handles.values():
            handle.wait()
        self.handles.clear()
        self.pins = {}
        self.here.clear()

    def pin(self, caller: str, units: Sequence[int]) -> None:
        """Gather these units and hold them while `caller`, a module, or modules inside it run."""
        around = {n: pinned for n, pinned in self.pins.items() if _is_around(n, caller)}
        self.pins = {**around, caller: {i: self.full(i) for u in units for i in self.plan[u]}}
        self.here.update(self.pinned)  # a later one may have displaced an earlier one

    def unpin(self, caller: str) -> None:
        """Hold what `caller` pinned no longer than anything else."""
        self.pins.pop(caller, None)

    @property
    def pinned(self) -> dict[int, Tensor]:
        """What is held by whatever module."""
        return {i: full for tensors in self.pins.values() for i, full in tensors.items()}

    def drop(self, indices: Sequence[int]) -> None:
        """Free these: nothing is likely to read them again soon."""
        for index in indices:
            if index not in self.pinned:
                self.here.pop(index, None)

    def turn(self) -> None:
        """An update begins: what is gathered from now on is new, in an order that is known."""
        self.reshard()
        self.expected, self.order = self.order, []

    def _bring(self, unit: int) -> None:
        # one unit at a time: what autograd saved is lazy, and gathers again
        if not self.keep:
            self.here.clear()
            self.here.update(self.pinned)
        handle = self.handles.pop(unit, None)
        if handle is None:
            handle = self._launch(unit)
        for index, full in zip(self.plan[unit], handle.wait(), strict=True):
            self.here[index] = full
        self.order.append(unit)
        at = len(self.order)
        # only while the order is that of the update before: a wrong guess would gather for nobody
        if self.expected[at - 1 : at] == [unit]:
            for ahead in self.expected[at : at + self.prefetch]:
                if ahead not in self.handles and self.plan[ahead][0] not in self.here:
                    self.handles[ahead] = self._launch(ahead)

    def _launch(self, unit: int) -> Handle:
        indices = self.plan[unit]
        return self.transport.gather(
            [self.shards[i] for i in indices], [self.leaves[i] for i in indices]
        )


def _is_around(outer: str, inner: str) -> bool:
    return outer == "" or inner == outer or inner.startswith(outer + ".")
