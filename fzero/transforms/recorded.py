"""A flat function, recorded once and compiled: what every staged-out function comes down to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fzero.config import Config
from fzero.functional.functionalize import calls_noted, refuse_hooks
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.collector import collector_paused, runs_kernels_alone
from fzero.program.cuda_graph import replayed
from fzero.program.dynamic import InputDim
from fzero.program.graph import placeholders, tensors_of
from fzero.program.inductor import compile_stretches
from fzero.program.program import Pass
from fzero.program.sites import KEY
from fzero.transforms.notes import ONE_AT_A_TIME, Notes
from fzero.transforms.saved_notes import Gone

T = TypeVar("T", bound="Holds")
MAX_RECORDINGS = 8
"""Of one kind of call."""
MAX_KINDS = 128
"""Of one function: batches of ever other lengths are not to take ever more memory."""


class Recorded:
    """A Program, ready to run, and what it rests on: the gradients of a step, its update, a
    function of shards.

    Args:
        notes: takes down what the function reads from outside.
        record: records it.
        passes: make the Program fit to run.
        executor: "traced" runs it as generated code, "inductor" compiles its stretches.
        cuda_graph: run it as a CUDA graph from its second run on.

    Raises:
        TraceError: the function can't be recorded.
    """

    def __init__(
        self,
        notes: Notes,
        record: Callable[[], Program],
        passes: Pass,
        executor: str = "traced",
        *,
        cuda_graph: bool = False,
    ) -> None:
        with ONE_AT_A_TIME, collector_paused(), calls_noted() as called:
            program = passes(notes.record(record))
        module_params = list({id(x): (name, x) for name, x in called}.values())
        self._take(program, notes, module_params, executor, cuda_graph)

    @classmethod
    def resumed(
        cls,
        program: Program,
        notes: Notes,
        module_params: Sequence[tuple[str, Tensor]],
        executor: str = "traced",
        *,
        cuda_graph: bool = False,
    ) -> "Recorded":
        """What another process has recorded, whose notes hold here.

        Args:
            module_params: parameters of the modules that it called, with their names.
            executor, cuda_graph: as of a new one.
        """
        made = cls.__new__(cls)
        made._take(program, notes, module_params, executor, cuda_graph)
        return made

    def _take(
        self,
        program: Program,
        notes: Notes,
        module_params: Sequence[tuple[str, Tensor]],
        executor: str,
        cuda_graph: bool,
    ) -> None:
        self.program, self.notes, self.module_params = program, notes, module_params
        self._ran = False
        if executor == "inductor":
            self.run = compile_stretches(program, self._tell)
        else:
            self.run = compile_program(program)
        if cuda_graph:
            self.run = replayed(program, self.run, self._tell)
        self.seeded = KEY in program.inputs
        self.quiet = runs_kernels_alone(program.graph)

    def _tell(self, line: str) -> None:
        """Say in the Program's log what became of it when it was compiled."""
        word = line.partition(":")[0]
        # one that was saved says what became of it then
        log = [old for old in self.program.log if old.partition(":")[0] != word]
        self.program = replace(self.program, log=(*log, line))

    def hold(self) -> bool:
        """Whether all that was read from outside while recording is as it was."""
        return self.notes.hold()

    def __call__(self, flat: Sequence[Any], key: Callable[[], int]) -> list[Any]:
        """Run it.

        Args:
            flat: the inputs.
            key: gives what random numbers are a function of; asked only if there are any.

        Raises:
            ShardError: a parameter of a functionalised module has got a hook since.
        """
        refuse_hooks(self.module_params)
        inputs = (*flat, key()) if self.seeded else flat
        with collector_paused() if self.quiet else nullcontext():  # see [Note: collector]
            results = self.run(*inputs)
        self._ran = True
        return results

    @property
    def is_dynamic(self) -> bool:
        """Whether it may serve inputs of other sizes: see [Note: dynamic dims]."""
        return self.program.dynamic is not None and self.program.dynamic.open

    def serves(self, sizes: Mapping[InputDim, int]) -> bool:
        """Whether it runs as well for inputs that have these sizes instead of those recorded.

        Args:
            sizes: of dims of inputs, that differ.
        """
        # the first run compares shapes, which has to be for those that were recorded
        dynamic = self.program.dynamic
        if dynamic is None or not self._ran or not sizes.keys() <= {*dynamic.dims}:
            return False
        return dynamic.admits(
            [sizes.get(dim, size) for dim, size in zip(dynamic.dims, dynamic.recorded, strict=True)]
        )


class Holds(Protocol):
    """What rests on what functions read from outside."""

    def hold(self) -> bool:
        """Whether all of that is as it was."""
        ...

    @property
    def is_dynamic(self) -> bool:
        """Whether it may serve leaves of other sizes than those it was made for."""
        ...

    def serves(self, sizes: Mapping[InputDim, int]) -> bool:
        """Whether it serves these: see `Recorded.serves`."""
        ...


def sizes_apart(a: Any, b: Any) -> dict[InputDim, int] | None:
    """The sizes of `b`, by (leaf, dim), that are other in `a`; None if more than sizes is.

    Args:
        a, b: kinds of calls: what is static, and (shape, layout, dtype, device) of each leaf.

    >>> import torch
    >>> row = torch.Size([2, 3]), None, torch.float32, torch.device("cpu")
    >>> sizes_apart(("static", row), ("static", (torch.Size([2, 5]), *row[1:])))
    {(0, 1): 5}
    """
    (static, *rows), (other, *others) = a, b
    if static != other or len(rows) != len(others):
        return None
    found: dict[InputDim, int] = {}
    for index, (row, one) in enumerate(zip(rows, others, strict=True)):
        if row == one:
            continue
        # of a leaf with a split of its own, or of other strides, more than a size is other
        if len(row) != 4 or row[1:] != one[1:] or row[1] is not None or len(row[0]) != len(one[0]):
            return None
        pairs = zip(row[0], one[0], strict=True)
        found |= {(index, dim): new for dim, (old, new) in enumerate(pairs) if old != new}
    return found


class Recordings(Generic[T]):
    """What one function was staged out as, by kind of call; of each kind the last used comes first.

    Examples:
        >>> class Made:
        ...     def __init__(self, holds): self.holds = holds
        ...     def hold(self): return self.holds
        ...     is_dynamic = False
        ...     def serves(self, sizes): return False
        >>> stale, fresh, known = Made(False), Made(True), Recordings()
        >>> known.add("kind", fresh), known.add("kind", stale), known.add("other", stale)
        (None, None, None)
        >>> known.find("kind") is fresh, known.of("kind") == [fresh, stale], len(known)
        (True, True, 3)
        >>> known.forget(stale), list(known) == [("kind", fresh)]
        (None, True)
    """

    def __init__(self) -> None:
        self._by_kind: dict[Any, list[T]] = {}
        self._served: dict[Any, T] = {}  # those that serve other kinds: see `find`
        self._tried: dict[frozenset[InputDim], T] = {}  # the last one that was to follow these dims

    def __len__(self) -> int:
        return sum(map(len, self._by_kind.values()))

    def __iter__(self) -> Iterator[tuple[Any, T]]:
        return ((kind, one) for kind, known in self._by_kind.items() for one in known)

    def of(self, kind: Any) -> Sequence[T]:
        """All of a kind."""
        return self._by_kind.get(kind, ())

    def find(self, kind: Any, *, exact: bool = True) -> T | None:
        """The one of a kind that holds, see [Note: stale]; None if there is none.

        Args:
            kind: of call.
            exact: else one of another kind, that differs in sizes alone and serves these, will do:
                see [Note: dynamic dims].
        """
        known = self._by_kind.get(kind, [])
        found = next((one for one in known if one.hold()), None)
        if found is not None and found is not known[0]:
            known.remove(found)
            known.insert(0, found)
        return found if exact or found is not None else self._serving(kind)

    def add(self, kind: Any, one: T, dynamic: frozenset[InputDim] = frozenset()) -> None:
        """Keep one more; of too many the one of its kind that was used longest ago goes.

        Of too many kinds that one goes which came first.

        Args:
            kind: of call.
            one: made for it.
            dynamic: the dims that it was to follow.
        """
        self._by_kind[kind] = [one, *self.of(kind)][:MAX_RECORDINGS]
        if dynamic:
            self._tried[dynamic] = one
        if len(self._by_kind) > MAX_KINDS:
            for gone in self._by_kind.pop(next(iter(self._by_kind))):
                self._drop(gone)

    def clear(self) -> None:
        """Drop all."""
        self._by_kind, self._served, self._tried = {}, {}, {}

    def _serving(self, kind: Any) -> T | None:
        found = self._served.get(kind)
        if found is not None and found.is_dynamic and found.hold():
            return found
        for other, known in self._by_kind.items():
            sizes = sizes_apart(other, kind) or {}
            for one in known if sizes else ():
                if one.serves(sizes) and one.hold():
                    if len(self._served) >= MAX_KINDS:
                        del self._served[next(iter(self._served))]
                    self._served[kind] = one
                    return one
        return None

    def dynamic(self, kind: Any, cfg: Config) -> frozenset[InputDim]:
        """The dims of leaves whose sizes are worth a recording that serves others, too.

        Those in which this kind differs from ones that are known, and that differ in no more.
        """
        if not cfg.dynamic:
            return frozenset()
        found = frozenset(
            dim
            for other in self._by_kind
            for dim, size in (sizes_apart(other, kind) or {}).items()
            if size > 1  # one row is another case than several, for torch as for most functions
        )
        tried = self._tried.get(found)
        return found if tried is None or tried.is_dynamic else frozenset()

    def _drop(self, one: T) -> None:
        """Drop what points to one that goes."""
        self._served = {k: x for k, x in self._served.items() if x is not one}
        self._tried = {dims: x for dims, x in self._tried.items() if x is not one}

    def forget(self, one: T) -> None:
        """Drop it."""
        self._served = {k: x for k, x in self._served.items() if x is not one}
        rest = {k: [x for x in known if x is not one] for k, known in self._by_kind.items()}
        self._by_kind = {k: known for k, known in rest.items() if known}


def check_inputs(program: Program, given: Sequence[Any]) -> None:
    """Raise `Gone` unless a Program was recorded for tensors like these."""
    wanted = [x for node in placeholders(program.graph) for x in tensors_of(node)]
    if len(wanted) != len(given):
        raise Gone([f"the number of inputs of {program.name} from {len(wanted)} to {len(given)}"])
    for name, x, y in zip(program.inputs, wanted, given, strict=False):
        if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            old, new = (f"{z.dtype} {tuple(z.shape)} on {z.device}" for z in (x, y))
            raise Gone([f"{name} from {old} to {new}"])
