"""Eager evaluation of models that no rank can hold: leaves are there while something reads them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fzero import tree
from fzero.config import Config
from fzero.distributed.journal import EAGER, Journal
from fzero.distributed.mesh import Mesh
from fzero.distributed.transport import Transport
from fzero.eager.gathered import Gathered
from fzero.eager.lazy import LazyLeaf
from fzero.layout import Layout
from fzero.transforms.parts import Opened


class Lazily:
    """What gathers for one function, and what it has learned of the order.

    Args:
        cfg: its `bucket_mb` bounds what is kept.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self._transports: dict[Mesh, Transport] = {}
        self._order: list[int] = []  # in which leaves were used last time: they travel together

    def __call__(self, run: Callable[[Sequence[Any]], Any], params: Opened) -> Any:
        """`run` on leaves that are gathered at first use; it builds no graph of them.

        Python doesn't say which use is the last one. So only the leaves that were used last are
        kept, as many as one bucket holds: what is read again later is gathered again. All ranks
        read the same leaves in the same order, and so forget the same ones.
        """
        mesh = params.mesh
        if mesh not in self._transports:
            limit = int(self.cfg.bucket_mb * 2**20)
            journal = Journal(mesh, EAGER, active=True, limit=self.cfg.timeout)
            self._transports[mesh] = Transport(mesh, mesh.axes, journal, limit=limit)
        transport = self._transports[mesh]
        assert transport.journal is not None
        transport.journal.begin("evaluation")
        source = _LastUsed(params.values, params.layout, transport, self._order)
        try:
            # a leaf that is returned is gathered while it can be
            result = tree.map(_Outward(params.values), run(source.leaves))
            self._order = list(source.used)
            transport.journal.leave("result of evaluation")
        finally:
            source.close()
        return result


class _Outward:
    """What the function returned, in memory that no shard is in: its caller may write to it."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self.storages = {x.untyped_storage()._cdata for x in shards}

    def __call__(self, x: Any) -> Any:
        if isinstance(x, LazyLeaf):
            x = x.detach()
        shared = isinstance(x, Tensor) and x.untyped_storage()._cdata in self.storages
        return x.clone() if shared else x


class _LastUsed(Gathered):
    """Keeps the leaves that were used last, up to the transport's limit of bytes."""

    def __init__(
        self,
        shards: Sequence[Tensor],
        layout: Layout,
        transport: Transport,
        order: Sequence[int],
    ) -> None:
        untrained = tuple(replace(leaf, trainable=False) for leaf in layout)
        untrained = replace(layout, leaves=untrained)
        super().__init__([x.detach() for x in shards], untrained, transport, order)

    def full(self, index: int) -> Tensor:
        """The full leaf, gathered unless it is there."""
        full = super().full(index)
        self._full[index] = self._full.pop(index)  # the last one is the newest
        nbytes = sum(x.nbytes for x in self._full.values())
        if nbytes > self.limit:
            turn = self.turn.get(index, 0)
            others = [i for i in self._full if i != index]
            # of those that are there, what the order has behind it goes first: what travelled with
            # this leaf is wanted next; but a function may go back, and then the oldest goes
            for old in sorted(others, key=lambda i: self.turn.get(i, -1) >= turn):
                if nbytes <= self.limit:
                    break
                nbytes -= self._full[old].nbytes
                self.drop(old)
        return full
