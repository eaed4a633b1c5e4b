"""Parameters of a module that are there only while something reads them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.distributed.transport import Handle, Transport
from fzero.inference import outside_inference
from fzero.layout import LeafLayout, Together
from fzero.layout.modules import modules_around


class Order:
    """In which order units are gathered, pass by pass, and so what is likely to come next.

    >>> order = Order()
    >>> [order.after(unit, 1) for unit in (0, 1, 2)]
    [[], [], []]
    >>> order.turn()
    >>> [order.after(unit, 1) for unit in (0, 1, 0)]
    [[1], [2], []]
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.expected: list[int] = []  # what was seen in the pass before

    def turn(self) -> None:
        """A pass begins that is likely to be as the one before."""
        self.expected, self.seen = self.seen, []

    def after(self, unit: int, most: int) -> list[int]:
        """A unit has come: at most so many that will come next, if all goes as before."""
        self.seen.append(unit)
        at = len(self.seen)
        # only at the same place as before: a wrong guess would gather for nobody
        return self.expected[at : at + most] if self.expected[at - 1 : at] == [unit] else []


class Block(NamedTuple):
    """What a block holds.

    Args:
        full: full parameters by index.
        written: whether they may be written to: the block will see to it that it counts.
    """

    full: Mapping[int, Tensor]
    written: bool


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
        self._together = [Together(leaves[i] for i in indices) for indices in plan]
        self.unit_of = {index: unit for unit, indices in enumerate(plan) for index in indices}
        self.here: dict[int, Tensor] = {}
        self.handles: dict[int, Handle] = {}
        self.pins: dict[str, dict[int, Tensor]] = {}  # by the module that pinned them
        self.blocks: list[Block] = []  # innermost last
        # from one update to the next, and of one evaluation, whatever passes came between
        self.training, self.evaluation = Order(), Order()
        self.order = self.training

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
        self.here.update(self.in_blocks)

    def evaluate(self) -> None:
        """A pass begins that no backward follows: nothing is kept, and its order is its own."""
        self.order = self.evaluation
        self.order.turn()

    def train(self) -> None:
        """An evaluation is over."""
        self.order = self.training

    @contextlib.contextmanager
    def block(self, full: Mapping[int, Tensor], *, written: bool = False) -> Iterator[None]:
        """Have these parameters there until the block ends, whatever is freed meanwhile."""
        block = Block(full, written)
        self.blocks.append(block)
        self.here.update(full)
        try:
            yield
        finally:
            self.blocks = [other for other in self.blocks if other is not block]
            self.reshard()

    @property
    def in_blocks(self) -> dict[int, Tensor]:
        """What blocks keep; of what several keep the innermost one's."""
        return {i: full for block in self.blocks for i, full in block.full.items()}

    def is_writable(self, index: int) -> bool:
        """Whether what is written to the full parameter will count."""
        return any(block.written and index in block.full for block in self.blocks)

    def everything(self) -> dict[int, Tensor]:
        """All full parameters, gathered unit by unit; what blocks keep as it is."""
        kept = self.in_blocks
        full: dict[int, Tensor] = {}
        for unit, indices in enumerate(self.plan):
            if all(index in kept for index in indices):
                continue
            full.update(zip(indices, self._launch(unit).wait(), strict=True))
        return {**full, **kept}

    def pin(self, caller: str, units: Sequence[int]) -> None:
        """Gather these units and keep them while `caller`, a module, or modules inside it run."""
        around = {
            n: pinned for n, pinned in self.pins.items() if n in (caller, *modules_around(caller))
        }
        self.pins = {**around, caller: {i: self.full(i) for u in units for i in self.plan[u]}}
        self.here.update(self.pinned)  # a later one may have displaced an earlier one

    def unpin(self, caller: str) -> None:
        """Keep what `caller` pinned no longer than anything else."""
        self.pins.pop(caller, None)

    @property
    def pinned(self) -> dict[int, Tensor]:
        """What modules and blocks keep."""
        pins = {i: full for tensors in self.pins.values() for i, full in tensors.items()}
        return {**pins, **self.in_blocks} if self.blocks else pins

    def drop(self, indices: Sequence[int]) -> None:
        """Free these: nothing is likely to read them again soon."""
        pinned = self.pinned
        for index in indices:
            if index not in pinned:
                self.here.pop(index, None)

    def turn(self) -> None:
        """An update begins: what is gathered from now on is new, in an order that is known."""
        self.reshard()
        self.training.turn()

    def _bring(self, unit: int) -> None:
        # one unit at a time: what autograd saved is lazy, and gathers again
        if not self.keep or self.order is self.evaluation:
            self.here.clear()
            self.here.update(self.pinned)
        handle = self.handles.pop(unit, None)
        if handle is None:
            handle = self._launch(unit)
        for index, full in zip(self.plan[unit], handle.wait(), strict=True):
            self.here[index] = full
        if self.blocks:  # some of the unit may be there, and have been written to
            self.here.update(self.in_blocks)
        for ahead in self.order.after(unit, self.prefetch):
            if ahead not in self.handles and self.plan[ahead][0] not in self.here:
                self.handles[ahead] = self._launch(ahead)

    def _launch(self, unit: int) -> Handle:
        shards = [self.shards[i] for i in self.plan[unit]]
        return self.transport.gather(shards, self._together[unit])
