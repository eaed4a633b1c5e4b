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

import warnings
from collections.abc import Callable, Iterator, Sequence
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
from fzero.errors import FzeroError, TraceError
from fzero.program.passes.seed import generator_of, is_random, mix
from fzero.recording import START, Draw, Memory, Op, Place, Recording, digest, real, run
from fzero.stage import kept
from fzero.tree import PyTree


def record(builder: Callable[[], PyTree]) -> Recording:
    """Run `builder` on fake tensors.

    Args:
        builder: makes a pytree of tensors: any modules, initialisers and in-place fills. What it
            reads of their values is worked out for it.

    Raises:
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
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _Recorder(fakes)
    try:
        with fakes, recorder, warnings.catch_warnings():
            # deepcopy asks a fake tensor for its pointer to see if it has one
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            built = builder()
            leaves, spec = tree.flatten(built)
            places = {i: recorder.place(x) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        ends = recorder.ends()
    except FzeroError:
        raise
    except Exception as error:
        raise TraceError(
            f"the function that builds the parameters can't be run without memory: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}. Ways on: keep "
            "what reads or loads values out of it, or pass the built tree, step_fn.init(build()), "
            "which holds the whole model once."
        ) from error
    finally:
        recorder.restore()
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return Recording(
        spec,
        [
            torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
            for x in leaves
        ],
        tensors[0].device if tensors else torch.device("cpu"),
        places,
        recorder.ops,
        recorder.constants,
        recorder.starts(),
        ends,
    )


# They overwrite what they are given, and draw a number of times that does not depend on values.
_FILLS = frozenset([torch.ops.aten.uniform_, torch.ops.aten.normal_])


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
        described = pytree.tree_map_only(Tensor, self.place, given)
        reads = {self._key(x) for x in inputs}
        writes = {self._key(x) for x in _written(func, args, named)}
        try:
            result = func(*args, **named)
        except DataDependentOutputException:  # the builder reads a value
            return self._value(func, described)
        # `module.half()` refuses tensors that have weak references, and the memo holds some
        self.fakes.fake_tensor_converter.tensor_memo.clear()
        results = pytree.tree_leaves(result)
        made = [
            (i, self.place(x), x.untyped_storage().nbytes())
            for i, x in enumerate(results)
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.alive
        ]
        if made or writes:
            op = Op(func, described[0], described[1], made, reads, writes)
            if is_random(func, args, named):
                stream = self._stream(named.get("generator"), [*inputs, *results])
                op.random = stream.draw(sum(op.random is not None for op in self.ops))
                stream.pending.append((len(self.ops), op))
            self.ops.append(op)
        return result

    def place(self, x: Tensor) -> Place:
        """Where `x` lies."""
        x = self._fake(x)
        return Place(
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
        return storage._cdata

    def _fake(self, x: Tensor) -> Tensor:
        """`x`, or the fake tensor that stands for a real one."""
        if isinstance(x, FakeTensor):
            return x
        if id(x) not in self.imported:
            with _disable_current_modes():
                storage = x.untyped_storage()
            fake = self.fakes.from_tensor(x, static_shapes=True)
            self.constants.setdefault(self._key(fake), storage)
            self.imported[id(x)] = x, fake
        return self.imported[id(x)][1]

    def _value(self, func: Any, described: tuple[Any, Any]) -> Any:
        """The result of an operator that returns a number, which the builder decides by."""
        wanted = {x.storage for x in pytree.tree_leaves(described) if isinstance(x, Place)}
        generators = [stream.generator for stream in self.streams.values()]
        with _disable_current_modes(), torch.no_grad(), kept(generators):
            memory = self._evaluated(wanted, len(self.ops))
            args, kwargs = real(described, memory)
            return func(*args, **kwargs)

    def _evaluated(self, wanted: set[int], stop: int) -> Memory:
        """The wanted storages as they are after `stop` operators, and what they depend on."""
        wanted, needed = set(wanted), []
        for op in reversed(self.ops[:stop]):
            if wanted & {*op.writes, *[place.storage for _, place, _ in op.made]}:
                needed.append(op)
                wanted |= op.reads
        memory = {key: x.clone() for key, x in self.constants.items() if key in wanted}
        for op in reversed(needed):
            if op.random:
                state = self._state_before(op.random)
                op.random.generator.set_state(state)
            run(op, memory)
        return memory

    def _state_before(self, draw: Draw) -> Tensor:
        """The generator's state that an operator would find: those before it are run for it."""
        generator = draw.generator
        stream = self.streams[id(generator)]
        while draw.mark not in stream.found:
            turn, op = stream.pending.pop(0)
            assert op.random is not None
            state = stream.left[stream.last]
            if op.random.seed is not None:
                state = torch.Generator(generator.device).manual_seed(op.random.seed).get_state()
            elif op.random.back_to is not None:
                state = stream.left[op.random.back_to]
            stream.found[op.random.mark] = state
            fills = op.func.overloadpacket in _FILLS
            memory = {} if fills else self._evaluated(op.reads, turn)
            for key in op.reads if fills else ():
                memory[key] = torch.UntypedStorage(
                    self.alive[key].nbytes(), device=generator.device
                )
            generator.set_state(state)
            run(op, memory)
            stream.left[op.random.mark] = generator.get_state()
            stream.last = op.random.mark
        return stream.found[draw.mark]

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
        # for values that the builder reads: real states, by the mark of the operator
        self.pending: list[tuple[int, Op]] = []
        self.found: dict[int, Tensor] = {}
        self.left = {START: self.start}
        self.last = START

    def draw(self, mark: int) -> Draw:
        """A random operator comes."""
        draw = self.change() or Draw(self.generator, mark)
        with _disable_current_modes():
            self.generator.manual_seed(mix(0x5EED, mark))
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
