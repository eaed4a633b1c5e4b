"""The leaves of one eager micro-batch: gathered at first use, in an order that is learned."""

from collections.abc import Sequence

from torch import Tensor

from fzero.distributed.transport import Transport
from fzero.eager.lazy import LazyLeaf, changed_in_place
from fzero.layout import Layout
from fzero.layout.flats import by_flat


class Gathered:
    """The full leaves that one micro-batch has gathered so far.

    Args:
        shards: this rank's part of every leaf.
        layout: of all leaves.
        transport: what gathers, with a limit for its buckets.
        order: leaves that are likely to be used in this order: they are gathered together. It
            changes when a leaf travels, never its values.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],
        layout: Layout,
        transport: Transport,
        order: Sequence[int],
    ) -> None:
        assert transport.limit is not None
        self.transport, self.limit = transport, transport.limit
        self.order, self.turn = order, {index: turn for turn, index in enumerate(order)}
        self.leaves = [
            LazyLeaf(shard, leaf, i, self)
            for i, (shard, leaf) in enumerate(zip(shards, layout, strict=True))
        ]
        parts = by_flat(layout.leaves, range(len(layout)))
        self.mates = {i: part for part in parts for i in part}  # of each leaf's flat, or itself
        self.used: dict[int, None] = {}  # an ordered set
        self._full: dict[int, Tensor] = {}

    def full(self, index: int) -> Tensor:
        """The full leaf, gathered unless it is there."""
        if index not in self._full:
            indices = self._together(index)
            for i, full in zip(
                indices, self.gather([self.leaves[i] for i in indices]), strict=True
            ):
                self._full[i] = full
                self.used[i] = None
        return self._full[index]

    def gather(self, leaves: Sequence[LazyLeaf]) -> list[Tensor]:
        """Full leaves that nobody keeps but the caller."""
        found = [self._full.get(lazy.leaf_index) for lazy in leaves]
        missing = [lazy for lazy, full in zip(leaves, found, strict=True) if full is None]
        handle = self.transport.gather(
            [lazy.shard for lazy in missing], [lazy.leaf for lazy in missing]
        )
        new = iter(handle.wait())
        return [next(new) if full is None else full.detach() for full in found]

    def reshard(self) -> None:
        """Forget what is large: backward gathers again what it reads."""
        small = {i: full for i, full in self._full.items() if full.nbytes < _SMALL}
        self._full = {i: _alone(full) for i, full in small.items()}

    def drop(self, index: int) -> None:
        """Forget a leaf."""
        self._full.pop(index, None)

    def close(self) -> None:
        """Forget every leaf, and the circle of leaf and source with it.

        Raises:
            FzeroError: a leaf was changed in place, through a view of it.
        """
        leaves, self.leaves, self._full = self.leaves, [], {}
        for lazy in leaves:
            if lazy._version:  # views share the count of what they view
                raise changed_in_place(lazy.leaf.name)

    def _together(self, index: int) -> list[int]:
        ahead = self.order[self.turn[index] :] if index in self.turn else [index]
        indices: dict[int, None] = {}
        nbytes = 0
        for i in ahead:
            if i in indices:
                continue
            # what comes with it, whether it is asked for or not
            more = [i] if i in self._full else [j for j in self.mates[i] if j not in self._full]
            nbytes += sum(self.leaves[j].leaf.nbytes for j in more)
            if indices and nbytes > self.limit:
                break
            if i not in self._full:
                indices.update(dict.fromkeys(more))
        return list(indices)


def _alone(full: Tensor) -> Tensor:
    """The same leaf; a copy of one that lies in a flat, all of which it would keep."""
    return full.clone() if full.untyped_storage().nbytes() > full.nbytes else full


_SMALL = 2**16  # bytes; biases and norms, whose second gather costs more than they do
