"""A flat function, recorded once and compiled: what every staged-out function comes down to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fzero.functional.functionalize import calls_noted, refuse_hooks
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.collector import collector_paused
from fzero.program.graph import placeholders, tensors_of
from fzero.program.inductor import compile_stretches
from fzero.program.program import Pass
from fzero.transforms.notes import ONE_AT_A_TIME, Notes
from fzero.transforms.saved_notes import Gone

T = TypeVar("T", bound="Holds")
MAX_RECORDINGS = 8
"""Of one kind of call."""


class Recorded:
    """A Program, ready to run, and what it rests on: the gradients of a step, its update, a
    function of shards.

    Args:
        notes: takes down what the function reads from outside.
        record: records it.
        passes: make the Program fit to run.
        executor: "traced" runs it as generated code, "inductor" compiles its stretches.

    Raises:
        TraceError: the function can't be recorded.
    """

    def __init__(
        self,
        notes: Notes,
        record: Callable[[], Program],
        passes: Pass,
        executor: str = "traced",
    ) -> None:
        with ONE_AT_A_TIME, collector_paused(), calls_noted() as called:
            program = passes(notes.record(record))
        module_params = list({id(x): (name, x) for name, x in called}.values())
        self._take(program, notes, module_params, executor)

    @classmethod
    def resumed(
        cls,
        program: Program,
        notes: Notes,
        module_params: Sequence[tuple[str, Tensor]],
        executor: str = "traced",
    ) -> "Recorded":
        """What another process has recorded, whose notes hold here.

        Args:
            module_params: parameters of the modules that it called, with their names.
            executor: as of a new one.
        """
        made = cls.__new__(cls)
        made._take(program, notes, module_params, executor)
        return made

    def _take(
        self,
        program: Program,
        notes: Notes,
        module_params: Sequence[tuple[str, Tensor]],
        executor: str,
    ) -> None:
        self.program, self.notes, self.module_params = program, notes, module_params
        if executor == "inductor":
            self.run = compile_stretches(program, self._tell)
        else:
            self.run = compile_program(program)
        self.seeded = "key" in program.inputs

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
        return self.run(*flat, key()) if self.seeded else self.run(*flat)


class Holds(Protocol):
    """What rests on what functions read from outside."""

    def hold(self) -> bool:
        """Whether all of that is as it was."""
        ...


class Recordings(Generic[T]):
    """What one function was staged out as, by kind of call; of each kind the last used comes first.

    Examples:
        >>> class Made:
        ...     def __init__(self, holds): self.holds = holds
        ...     def hold(self): return self.holds
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

    def __len__(self) -> int:
        return sum(map(len, self._by_kind.values()))

    def __iter__(self) -> Iterator[tuple[Any, T]]:
        return ((kind, one) for kind, known in self._by_kind.items() for one in known)

    def of(self, kind: Any) -> Sequence[T]:
        """All of a kind."""
        return self._by_kind.get(kind, ())

    def find(self, kind: Any) -> T | None:
        """The one of a kind that holds, see [Note: stale]; None if there is none."""
        known = self._by_kind.get(kind, [])
        found = next((one for one in known if one.hold()), None)
        if found is not None and found is not known[0]:
            known.remove(found)
            known.insert(0, found)
        return found

    def add(self, kind: Any, one: T) -> None:
        """Keep one more; of too many the one of its kind that was used longest ago goes."""
        self._by_kind[kind] = [one, *self.of(kind)][:MAX_RECORDINGS]

    def clear(self) -> None:
        """Drop all."""
        self._by_kind = {}

    def forget(self, one: T) -> None:
        """Drop it."""
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
