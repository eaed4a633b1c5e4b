"""A builder's operators, recorded without memory, and their run on real tensors.

[Note: storages] Tensors are told apart by their storage, and described by where they lie in it.
Views, `detach`, `.data` and assignments to `.data` then need no bookkeeping: only operators that
make a storage or write to one are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fzero import tree
from fzero.tree import PyTree

Take = Callable[[int, Tensor], None]
Memory = dict[int, torch.UntypedStorage]
START = -1  # the mark of a generator's state at its first use


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a storage; see [Note: storages]."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conjugated: bool
    negated: bool


@dataclass
class Op:
    """One operator that made a storage or wrote to one.

    Args:
        func: the operator.
        args, kwargs: with a `Place` for each tensor.
        made: of its flat results, those on new storages, by index; with the storage's bytes.
        reads, writes: storages of its arguments; all of them, and those that change.
        random: what it does to a generator, if it draws.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, Place, int]]
    reads: set[int]
    writes: set[int]
    random: "Draw | None" = None


class Draw(NamedTuple):
    """What a random operator finds: the generator goes on, or is put somewhere first.

    Args:
        generator: the one that it draws from.
        mark: number of the state that it leaves behind.
        seed: `manual_seed` this first.
        back_to: go back to this mark first.
    """

    generator: torch.Generator
    mark: int
    seed: int | None = None
    back_to: int | None = None


@dataclass
class Recording:
    """A builder's operators, to be run once.

    Args:
        spec: structure of what it returned.
        leaves: of that, on the meta device; a leaf that is no tensor as it is.
        device: of the first leaf.
        places: of the leaves that are tensors, by index.
        ops: in order.
        constants: real tensors that the builder read or returned, by storage.
        starts: state of each generator at its first use.
        ends: what the builder did to generators after its last random operator.
    """

    spec: tree.Spec
    leaves: list[Any]
    device: torch.device
    places: dict[int, Place]
    ops: list[Op]
    constants: dict[int, torch.UntypedStorage]
    starts: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)
    ends: list[Draw] = field(default_factory=list)

    def tree(self) -> PyTree:
        """What the builder returned, on the meta device."""
        return tree.unflatten(self.spec, self.leaves)

    def replay(self, take: Take) -> None:
        """Run it; `take(i, leaf)` gets each leaf once, in the order in which they are done.

        Generators end up as after a plain call of the builder. The leaf's memory is the builder's:
        copy what is to stay.
        """
        waiting: dict[int, list[int]] = {}
        for i, place in self.places.items():
            waiting.setdefault(place.storage, []).append(i)
        last_use = dict.fromkeys(waiting, -1)
        for turn, op in enumerate(self.ops):
            last_use.update(dict.fromkeys((*op.reads, *[p.storage for _, p, _ in op.made]), turn))
        dies: dict[int, list[int]] = {}
        for key, turn in last_use.items():
            dies.setdefault(turn, []).append(key)
        memory = dict(self.constants)
        randomness = _Replayed(
            self.starts, [*(op.random for op in self.ops if op.random), *self.ends]
        )

        def finish(turn: int) -> None:
            for key in dies.get(turn, ()):
                for i in waiting.get(key, ()):
                    take(i, _tensor(self.places[i], memory))
                memory.pop(key, None)
                self.constants.pop(key, None)

        with torch.no_grad():
            finish(-1)
            for turn, op in enumerate(self.ops):
                randomness.before(op.random)
                run(op, memory)
                randomness.after(op.random)
                finish(turn)
            for draw in self.ends:
                randomness.before(draw)

    def fingerprint(self) -> list[tuple[str, str]]:
        """What must be the same on all ranks for their leaves to be: generators and constants."""
        items = [
            (f"the state of random generator {i}", digest(state))
            for i, (_, state) in enumerate(self.starts)
        ]
        for draw in (op.random for op in self.ops if op.random):
            if draw.seed is not None:
                items.append((f"the seed before random operator {draw.mark}", str(draw.seed)))
        for i, storage in enumerate(self.constants.values()):
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            items.append((f"constant {i}", digest(flat.cpu())))
        return items


class _Replayed:
    """The generators while a recording runs."""

    def __init__(
        self, starts: Sequence[tuple[torch.Generator, Tensor]], draws: Sequence[Draw]
    ) -> None:
        self.kept = {(id(g), draw.back_to) for draw in draws for g in [draw.generator]}
        self.states: dict[tuple[int, int], Tensor] = {}
        for generator, state in starts:
            generator.set_state(state)
            self.states[id(generator), START] = state

    def before(self, draw: Draw | None) -> None:
        """Put the generator where the operator found it."""
        if draw is not None and draw.seed is not None:
            draw.generator.manual_seed(draw.seed)
        if draw is not None and draw.back_to is not None:
            draw.generator.set_state(self.states[id(draw.generator), draw.back_to])

    def after(self, draw: Draw | None) -> None:
        """Keep the state if the builder goes back to it."""
        if draw is not None and (id(draw.generator), draw.mark) in self.kept:
            self.states[id(draw.generator), draw.mark] = draw.generator.get_state()


def run(op: Op, memory: Memory) -> None:
    """Run one operator on `memory`, and keep there what it makes."""
    args, kwargs = real((op.args, op.kwargs), memory)
    results = pytree.tree_leaves(op.func(*args, **kwargs))
    for i, place, nbytes in op.made:
        x: Tensor = results[i]
        if (x.stride(), x.storage_offset()) != (place.stride, place.offset):
            storage = torch.UntypedStorage(nbytes, device=x.device)  # as the fake one was laid out
            laid_out = _tensor(place, {place.storage: storage})
            x = laid_out.copy_(x)
        memory.setdefault(place.storage, x.untyped_storage())


def real(described: Any, memory: Memory) -> Any:
    """Arguments with tensors in place of descriptions."""
    return pytree.tree_map_only(Place, lambda place: _tensor(place, memory), described)


def _tensor(place: Place, memory: Memory) -> Tensor:
    x = torch.empty(0, dtype=place.dtype, device=place.device)
    x.set_(memory[place.storage], place.offset, place.shape, place.stride)  # pyright: ignore
    x = x.conj() if place.conjugated else x
    return torch._neg_view(x) if place.negated else x


def digest(state: Tensor) -> str:
    """A text that is the same for the same bytes."""
    with _disable_current_modes():
        return blake2b(state.numpy().tobytes(), digest_size=16).hexdigest()
