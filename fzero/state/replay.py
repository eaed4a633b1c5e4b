"""Operators recorded without memory, and their run on real tensors.

[Note: storages] Tensors are told apart by their storage, and described by where they lie in it.
Views, `detach`, `.data` and assignments to `.data` then need no bookkeeping: only operators that
make a storage or write to one are kept.

[Note: running in order] Operators run in the order in which they were recorded, so that random
numbers are drawn in that order. Few storages are kept meanwhile: a model that is built and then
initialised anew, layer by layer, would otherwise be there as a whole in between. What was forgotten
and is read again is computed again, with the generators as they were.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

Memory = dict[int, torch.UntypedStorage]
START = -1  # the mark of a generator's state at its first use


@dataclass(frozen=True)
class StorageView:
    """A tensor as a view of a storage; see [Note: storages]."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conjugated: bool
    negated: bool

    def tensor(self, memory: Memory) -> Tensor:
        """The tensor on real memory."""
        x = torch.empty(0, dtype=self.dtype, device=self.device)
        x.set_(memory[self.storage], self.offset, self.shape, self.stride)  # pyright: ignore
        x = x.conj() if self.conjugated else x
        # Private. No public function makes such a view.
        return torch._neg_view(x) if self.negated else x


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
class Op:
    """One operator that made a storage or wrote to one.

    Args:
        func: the operator.
        args, kwargs: with a `StorageView` for each tensor.
        made: of its flat results, those on new storages, by index.
        reads: storages of its arguments, those that it writes to included.
        writes: storages of the arguments that it changes.
        covers: those that it overwrites as a whole, without reading them.
        random: what it does to a generator, if it draws.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, StorageView]]
    reads: set[int]
    writes: set[int]
    covers: set[int]
    random: Draw | None = None

    @property
    def makes(self) -> set[int]:
        """The storages that it makes."""
        return {view.storage for _, view in self.made}

    def run(self, memory: Memory, sizes: dict[int, int]) -> None:
        """Run it on `memory`, and keep there what it makes."""
        args, kwargs = real((self.args, self.kwargs), memory)
        results = pytree.tree_leaves(self.func(*args, **kwargs))
        for i, view in self.made:
            x: Tensor = results[i]
            # a kernel may choose another layout than its fake one, which views are recorded in
            if (x.stride(), x.storage_offset()) != (view.stride, view.offset):
                storage = torch.UntypedStorage(sizes[view.storage], device=x.device)
                x = view.tensor({view.storage: storage}).copy_(x)  # as it was recorded
            memory[view.storage] = x.untyped_storage()


class Player:
    """Runs recorded operators in order on real memory; see [Note: running in order].

    Args:
        ops: in order; more may be added at the end.
        constants: real storages that they read. They are never written to.
        sizes: bytes of every storage.
        starts: the first state of each generator.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        constants: Memory,
        sizes: dict[int, int],
        starts: Sequence[tuple[torch.Generator, Tensor]],
    ) -> None:
        self.ops, self.constants, self.sizes, self.starts = ops, constants, sizes, starts
        self.memory: Memory = {}  # the least recently used first
        self.done = 0
        self._writers: dict[int, list[int]] = {}
        self._found: dict[int, Tensor] = {}  # state of the generator before each random operator
        self._left: dict[tuple[int, int], Tensor] = {}  # by generator and mark
        self._last: dict[int, int] = {}

    def advance(self, stop: int, done: Callable[[int], None] = lambda turn: None) -> None:
        """Run the operators up to `stop`; `done` is told of each, while its operands are there."""
        while self.done < stop:
            turn, op = self.done, self.ops[self.done]
            self.fetch(op.reads - op.covers)
            if op.random:
                self._found[turn] = self.find(op.random)
            self._play(turn, self.memory)
            if op.random:
                self._leave(op.random)
            for key in op.writes | op.makes:
                self._writers.setdefault(key, []).append(turn)
            self.done += 1
            for key in op.reads | op.makes:
                # to the end of the dict, whose order says what was used last
                self.memory[key] = self.memory.pop(key)
            done(turn)
            self._forget(keep=op.reads | op.makes)

    def fetch(self, keys: Iterable[int]) -> None:
        """Have these storages in memory, as they are now."""
        missing = [key for key in keys if key not in self.memory]
        if not missing:
            return
        needed: set[int] = set()
        # apart: what is in memory is of now, and these run as of then
        scratch: Memory = {}
        todo = [(key, self.done) for key in missing]
        while todo:
            key, stop = todo.pop()
            writers = self._writers.get(key, [])
            before = bisect_left(writers, stop)
            if before == 0:
                # a clone: what runs may write into it, and constants are the builder's
                scratch[key] = self.constants[key].clone()
            elif (turn := writers[before - 1]) not in needed:
                needed.add(turn)
                op = self.ops[turn]
                todo += [(k, turn) for k in op.reads - op.covers]
        # in the order of the recording: generators aside, who writes later overwrites
        for turn in sorted(needed):
            self._play(turn, scratch)
        self.memory.update({key: scratch[key] for key in missing})

    def find(self, draw: Draw) -> Tensor:
        """The state that the next random operator finds its generator in."""
        generator = draw.generator
        if draw.seed is not None:
            return torch.Generator(generator.device).manual_seed(draw.seed).get_state()
        for known, state in self.starts:
            self._left.setdefault((id(known), START), state)
        mark = self._last.get(id(generator), START) if draw.back_to is None else draw.back_to
        return self._left[id(generator), mark]

    def _leave(self, draw: Draw) -> None:
        key = id(draw.generator)
        self._left[key, draw.mark] = draw.generator.get_state()
        self._last[key] = draw.mark

    def _play(self, turn: int, memory: Memory) -> None:
        op = self.ops[turn]
        for key in op.covers - memory.keys():
            device = next(p.device for p in pytree.tree_leaves(op.args) if _lies_in(p, key))
            memory[key] = torch.UntypedStorage(self.sizes[key], device=device)
        if op.random:
            op.random.generator.set_state(self._found[turn])
        op.run(memory, self.sizes)

    def _forget(self, keep: set[int]) -> None:
        """Drop what was not used for long, down to a few times the largest storage."""
        nbytes = sum(self.sizes[key] for key in self.memory)
        budget = _KEPT * max((self.sizes[key] for key in self.memory), default=0)
        for key in list(self.memory):
            if nbytes <= budget:
                return
            if key not in keep:
                nbytes -= self.sizes[key]
                del self.memory[key]


_KEPT = 2


def real(described: Any, memory: Memory) -> Any:
    """Arguments with tensors in place of descriptions."""
    return pytree.tree_map_only(StorageView, lambda view: view.tensor(memory), described)


def _lies_in(x: Any, key: int) -> bool:
    return isinstance(x, StorageView) and x.storage == key


def digest(state: Tensor) -> str:
    """A text that is the same for the same bytes."""
    with _disable_current_modes():
        return blake2b(state.numpy().tobytes(), digest_size=16).hexdigest()
