"""Parameters that are gathered when they are used: what an eagerly run model function is given.

[Note: lazy leaves] A `LazyLeaf` looks like the full leaf and holds no memory. Autograd takes it for
a leaf of its graph; below autograd, any operator that reads it gathers it. So whatever PyTorch can
do with a tensor works on it, old-style `autograd.Function`s and `torch.func` inside the model
function included, and its gradient is the full one, which `fzero.step.eager` reduces. `fzero.stage` goes
past it, to the shard: that is the second leaf of the graph, whose gradient arrives reduced.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fzero.distributed.batched import Announce, gather_leaves
from fzero.errors import FzeroError
from fzero.layout import Layout, LeafLayout
from fzero.zero import Axes


class LazyLeaf(Tensor):
    """A full leaf that is gathered by the first operator that reads it; see [Note: lazy leaves].

    Attributes:
        shard: this rank's part; it asks for a gradient if the leaf is trained.
        leaf: how the leaf is split.
        place: its place in the tree.
        source: whatever gathers it.
    """

    shard: Tensor
    leaf: LeafLayout
    place: int
    source: "Gathered"

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls, shard: Tensor, leaf: LeafLayout, place: int, source: "Gathered") -> "LazyLeaf":
        self: LazyLeaf = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls,
            leaf.shape,
            dtype=leaf.compute or leaf.dtype,
            device=shard.device,
            requires_grad=leaf.trainable,
        )
        self.shard = shard.detach().requires_grad_(leaf.trainable)
        self.leaf, self.place, self.source = leaf, place, source
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        if schema is not None and schema.is_mutable:
            _refuse_writes(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(LazyLeaf, _full, (args, kwargs))
        return func(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"LazyLeaf({self.leaf.name!r}, {tuple(self.shape)}, {self.dtype})"


class Gathered:
    """The full leaves that one micro-batch has gathered so far.

    Args:
        shards: this rank's part of every leaf.
        layout: of all leaves.
        axes: the mesh.
        limit: most bytes of full leaves in a bucket.
        order: leaves that are likely to be used in this order: they are gathered together. It
            changes when a leaf travels, never its values.
        announce: told of each bucket before it travels.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],
        layout: Layout,
        axes: Axes,
        limit: int,
        order: Sequence[int],
        announce: Announce,
    ) -> None:
        self.axes, self.limit, self.announce = axes, limit, announce
        self.order, self.turn = order, {place: turn for turn, place in enumerate(order)}
        self.leaves = [
            LazyLeaf(shard, leaf, i, self)
            for i, (shard, leaf) in enumerate(zip(shards, layout, strict=True))
        ]
        self.used: dict[int, None] = {}  # an ordered set
        self._full: dict[int, Tensor] = {}

    def full(self, place: int) -> Tensor:
        """The full leaf, gathered unless it is there."""
        if place not in self._full:
            places = self._together(place)
            for i, full in zip(places, self.gather([self.leaves[i] for i in places]), strict=True):
                self._full[i] = full
                self.used[i] = None
        return self._full[place]

    def gather(self, leaves: Sequence[LazyLeaf]) -> list[Tensor]:
        """Full leaves that nobody keeps but the caller."""
        found = [self._full.get(lazy.place) for lazy in leaves]
        missing = [lazy for lazy, full in zip(leaves, found, strict=True) if full is None]
        new = iter(
            gather_leaves(
                [lazy.shard for lazy in missing],
                [lazy.leaf for lazy in missing],
                self.axes,
                self.limit,
                self.announce,
            )
        )
        return [next(new) if full is None else full.detach() for full in found]

    def reshard(self) -> None:
        """Forget what is large: backward gathers again what it reads."""
        self._full = {i: full for i, full in self._full.items() if full.nbytes < _SMALL}

    def drop(self, place: int) -> None:
        """Forget a leaf."""
        self._full.pop(place, None)

    def close(self) -> None:
        """Forget every leaf, and the circle of leaf and source with it.

        Raises:
            FzeroError: a leaf was changed in place, through a view of it.
        """
        leaves, self.leaves, self._full = self.leaves, [], {}
        for lazy in leaves:
            if lazy._version:  # views share the count of what they view
                raise changed_in_place(lazy.leaf.name)

    def _together(self, place: int) -> list[int]:
        if place not in self.turn:
            return [place]
        places, nbytes = [], 0
        for i in self.order[self.turn[place] :]:
            nbytes += self.leaves[i].leaf.nbytes
            if places and nbytes > self.limit:
                break
            if i not in self._full:
                places.append(i)
        return places


_SMALL = 2**16  # bytes; biases and norms, whose second gather costs more than they do


def changed_in_place(name: str) -> FzeroError:
    """What to say of a parameter that the model function wrote to."""
    return FzeroError(
        f"the model function changed the parameter {name!r} in place. Parameters are inputs of a "
        "pure function: the change would be lost on some ranks and kept on others. Compute a new "
        "tensor (w * 2 instead of w.mul_(2)); return what must live on as model state, and change "
        "parameters between steps only."
    )


def _full(leaf: LazyLeaf) -> Tensor:
    return leaf.source.full(leaf.place)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for x in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(x, LazyLeaf):
                    raise changed_in_place(x.leaf.name)
