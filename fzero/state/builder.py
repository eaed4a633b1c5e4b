"""Building parameters without ever holding them all: record the builder, then run it leaf by leaf.

A builder runs once on fake tensors, which have shapes and no memory. The operators that it ran are
kept in their order, and replayed on real tensors; a tensor is freed after its last use, and a leaf
is handed over to be cut as soon as no operator will touch it again. Operators, their order and so
the random numbers are those of a plain call: so is every value, bit for bit.

[Note: generators] Recording draws no numbers, so a generator would stand still between random
operators, and a state that the builder reads and later restores (`fork_rng`) would be the wrong
one. After each random operator the recorder therefore puts its generator into a state of its own, a
*mark*. A state that is neither the last mark nor an earlier one was set by `manual_seed`, or is
refused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fzero import tree
from fzero.errors import FzeroError, ShardError, TraceError, first_line
from fzero.functional.owners import noted_like
from fzero.functional.warned import warned_here
from fzero.numerics.rng import generator_of, is_random, mix, preserved
from fzero.state.replay import START, Draw, Memory, Op, Player, StorageView, digest, real
from fzero.tree import PyTree

Take = Callable[[int, Tensor], None]


@dataclass
class Recording:
    """A builder's operators.

    Args:
        spec: structure of what it returned.
        leaves: of that, on the meta device; a leaf that is no tensor as it is.
        device: of the first leaf.
        views: of the leaves that are tensors, by index.
        ops: in order.
        constants: real storages that the builder read or returned.
        sizes: bytes of every storage.
        starts: state of each generator at its first use.
        ends: what the builder did to generators after its last random operator.
    """

    spec: tree.Spec
    leaves: list[Any]
    device: torch.device
    views: dict[int, StorageView]
    ops: list[Op]
    constants: Memory
    sizes: dict[int, int]
    starts: list[tuple[torch.Generator, Tensor]]
    ends: list[Draw]

    def tree(self) -> PyTree:
        """What the builder returned, on the meta device."""
        return tree.unflatten(self.spec, self.leaves)

    def replay(self, take: Take) -> None:
        """Run it; `take(i, leaf)` gets each leaf once, in the order in which they are done.

        Generators end up as after a plain call of the builder. The leaf's memory is the builder's:
        copy what is to stay.
        """
        waiting: dict[int, list[int]] = {}
        for i, view in self.views.items():
            waiting.setdefault(view.storage, []).append(i)
        last_use: dict[int, int] = {}
        for turn, op in enumerate(self.ops):
            last_use.update(dict.fromkeys(op.reads | op.makes, turn))
        # after its last use a storage is what it will be: the leaves on it can be cut, and it can
        # go
        dies: dict[int, list[int]] = {}
        for key, turn in last_use.items():
            dies.setdefault(turn, []).append(key)
        player = Player(self.ops, self.constants, self.sizes, self.starts)

        def done(turn: int) -> None:
            for key in dies.get(turn, ()):
                for i in waiting.pop(key, ()):
                    take(i, self.views[i].tensor(player.memory))
                del player.memory[key]

        # initialisers write into leaves that ask for a gradient, which autograd refuses
        with torch.no_grad():
            player.advance(len(self.ops), done)
            for indices in waiting.values():  # constants that no operator has touched
                for i in indices:
                    take(i, self.views[i].tensor(self.constants))
            # as the last random operator left them; then what the builder did after that
            for generator, state in self.starts:
                generator.set_state(player.find(Draw(generator, START)) if self.ops else state)
            for draw in self.ends:
                draw.generator.set_state(player.find(draw))

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


def record(builder: Callable[[], PyTree], whole: str = "tree, step_fn.init(build())") -> Recording:
    """Run `builder` on fake tensors.

    Args:
        builder: makes a pytree of tensors: any modules, initialisers and in-place fills. What it
            reads of their values is worked out for it.
        whole: what else the user can pass, as messages name it.

    Raises:
        ShardError: it builds on the meta device.
        TraceError: it needs memory (`.numpy()`, `.tolist()`, a library that knows no fake tensors),
            or sets a generator in a way that can't be replayed.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> recording = record(lambda: dict(torch.nn.Linear(2, 3).named_parameters()))
        >>> leaves = {}
        >>> recording.replay(leaves.__setitem__)
        >>> _ = torch.manual_seed(0)
        >>> torch.equal(leaves[1], torch.nn.Linear(2, 3).weight)
        True
    """
    # a builder may read real tensors: they are its constants
    fakes = _Fakes(allow_non_fake_inputs=True)
    recorder = _Recorder(fakes)
    try:
        # deepcopy asks a fake tensor for its pointer to see if it has one
        told = warned_here("ignore", "Accessing the data pointer of FakeTensor")
        with fakes, recorder, told:
            built = builder()
            leaves, spec = tree.flatten(built)
            views = {i: recorder.view(x) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        ends = recorder.ends()
    except FzeroError:
        raise
    except Exception as error:
        raise TraceError(
            f"the function that builds the parameters can't be run without memory: "
            f"{type(error).__name__}: {first_line(error)}. It is called without arguments: "
            "lambda: build(size). Ways on: keep what reads or loads values out of it, or pass the "
            f"built {whole}, which holds the whole model once."
        ) from error
    finally:
        recorder.restore()
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    for path, x in zip(tree.paths(built), leaves, strict=True):
        if isinstance(x, Tensor) and x.device.type == "meta":
            raise ShardError(
                f"params{path} is on the meta device and has no values. The function that builds "
                "the parameters is run without memory in any case: build them on a real device."
            )
    return Recording(
        spec,
        [
            noted_like(torch.empty(x.shape, dtype=x.dtype, device="meta"), x)
            if isinstance(x, Tensor)
            else x
            for x in leaves
        ],
        tensors[0].device if tensors else torch.device("cpu"),
        views,
        recorder.ops,
        recorder.constants,
        recorder.sizes,
        recorder.starts(),
        ends,
    )


# They overwrite what they are given without reading it.
_FILLS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_")
)


class _Fakes(FakeTensorMode):
    """A mode whose tensors stay its own when they are deep-copied, attributes and all."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Fakes":
        return self


class _Recorder(TorchDispatchMode):
    """Keeps the operators that run below it on fake tensors."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.ops: list[Op] = []
        self.constants: dict[int, torch.UntypedStorage] = {}
        self.alive: dict[int, Any] = {}  # fake storages: their addresses must stay theirs
        self.imported: dict[int, tuple[Tensor, Tensor]] = {}
        self.streams: dict[int, _Stream] = {}
        self.sizes: dict[int, int] = {}
        self.player = Player(self.ops, self.constants, self.sizes, [])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            Tensor, self._fake, (args, kwargs or {})
        )
        args, named = given
        inputs = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
        described = pytree.tree_map_only(Tensor, self.view, given)
        reads = {self._key(x) for x in inputs}
        written = list(_written(func, args, named))
        try:
            result = func(*args, **named)
        except DataDependentOutputException:  # the builder reads a value
            return self._value(func, described)
        # `module.half()` refuses tensors that have weak references, and the memo holds some
        self.fakes.fake_tensor_converter.tensor_memo.clear()
        results = pytree.tree_leaves(result)
        made = [
            (i, self.view(x))
            for i, x in enumerate(results)
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.alive
        ]
        if made or written:
            covered = self._covered(func, described[0], written)
            writes = {self._key(x) for x in written}
            op = Op(func, described[0], described[1], made, reads, writes, covered)
            if is_random(func, args, named):
                stream = self._stream(named.get("generator"), [*inputs, *results])
                op.random = stream.draw(sum(op.random is not None for op in self.ops))
            self.ops.append(op)
        return result

    def _covered(self, func: Any, args: tuple[Any, ...], written: Sequence[Tensor]) -> set[int]:
        """The storages that an operator overwrites as a whole."""
        if func.overloadpacket not in _FILLS:
            return set()
        (x,) = written
        key = self._key(x)
        others = [p.storage for p in args[1:] if isinstance(p, StorageView)]
        # a fill of a view leaves the rest of the storage; `x.copy_(x.T)` reads what it overwrites
        whole = x.numel() * x.itemsize == self.sizes[key]
        return {key} if whole and key not in others else set()

    def view(self, x: Tensor) -> StorageView:
        """Where `x` lies."""
        x = self._fake(x)
        return StorageView(
            self._key(x),
            tuple(x.shape),
            x.stride(),
            x.storage_offset(),  # pyright: ignore
            x.dtype,
            x.device,
            x.is_conj(),
            x.is_neg(),
        )

    def _key(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        self.alive[storage._cdata] = storage
        self.sizes[storage._cdata] = storage.nbytes()
        return storage._cdata

    def _fake(self, x: Tensor) -> Tensor:
        """`x`, or the fake tensor that stands for a real one."""
        if isinstance(x, FakeTensor):
            assert x.fake_mode is self.fakes
            return x
        if id(x) not in self.imported:
            with _disable_current_modes():
                storage = x.untyped_storage()
            # sizes as numbers: a builder loops over them, and each has one value here
            fake = self.fakes.from_tensor(x, static_shapes=True)
            self.constants.setdefault(self._key(fake), storage)
            self.imported[id(x)] = x, fake
        return self.imported[id(x)][1]

    def _value(self, func: Any, described: tuple[Any, Any]) -> Any:
        """The result of an operator that returns a number, which the builder decides by."""
        wanted = {x.storage for x in pytree.tree_leaves(described) if isinstance(x, StorageView)}
        player = self.player
        # random operators since the last value may have brought new generators
        player.starts = self.starts()
        generators = [generator for generator, _ in player.starts]
        # Preserved: the replay draws, and the recording has to find its marks again.
        with _disable_current_modes(), torch.no_grad(), preserved(generators):
            player.advance(len(self.ops))
            player.fetch(wanted)
            args, kwargs = real(described, player.memory)
            return func(*args, **kwargs)

    # --- generators
    def _stream(self, generator: torch.Generator | None, tensors: Sequence[Any]) -> "_Stream":
        if generator is None:
            devices = (x.device for x in tensors if isinstance(x, Tensor))
            generator = generator_of(next(devices, torch.device("cpu")))
        if id(generator) not in self.streams:
            self.streams[id(generator)] = _Stream(generator)
        return self.streams[id(generator)]

    def starts(self) -> list[tuple[torch.Generator, Tensor]]:
        """The state of each generator at its first use."""
        return [(stream.generator, stream.start) for stream in self.streams.values()]

    def ends(self) -> list[Draw]:
        """What was done to generators after their last random operators."""
        found = [stream.change() for stream in self.streams.values()]
        return [draw for draw in found if draw is not None]

    def restore(self) -> None:
        """Generators as they were at their first use."""
        for stream in self.streams.values():
            stream.generator.set_state(stream.start)


class _Stream:
    """One generator while a builder is recorded; see [Note: generators]."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.start = generator.get_state()
        self.expected = digest(self.start)
        self.marks = {self.expected: START}

    def draw(self, mark: int) -> Draw:
        """A random operator comes."""
        draw = self.change() or Draw(self.generator, mark)
        with _disable_current_modes():
            self.generator.manual_seed(mix(0x5EED, mark))
            # a number drawn makes it a state that no manual_seed leaves behind
            torch.rand(1, generator=self.generator, device=self.generator.device)
        self.expected = digest(self.generator.get_state())
        self.marks[self.expected] = mark
        return draw._replace(mark=mark)

    def change(self) -> Draw | None:
        """What the builder has done to the generator since the last random operator."""
        now = digest(self.generator.get_state())
        if now == self.expected:
            return None
        if now in self.marks:
            return Draw(self.generator, START, back_to=self.marks[now])
        seed = self.generator.initial_seed()
        with _disable_current_modes():
            fresh = torch.Generator(self.generator.device).manual_seed(seed)
        # a seed leads to one state; from any other the seed can't be read
        if digest(fresh.get_state()) != now:
            raise TraceError(
                "the function that builds the parameters sets the state of a random generator to "
                "one that it did not have while it ran; that can't be replayed. Use "
                "torch.manual_seed, or set the state before step_fn.init."
            )
        return Draw(self.generator, START, seed=seed)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensor arguments that an operator writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))
