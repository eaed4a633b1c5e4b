"""A flat function, recorded once and compiled: what every staged-out function comes down to."""

from collections.abc import Callable, Sequence
from typing import Any

from fzero.functional.functionalize import calls_noted, refuse_hooks
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.program import Pass
from fzero.transforms.notes import ONE_AT_A_TIME, Notes


class Recorded:
    """A Program, ready to run, and what it rests on: the gradients of a step, its update, a
    function of shards.

    Args:
        notes: takes down what the function reads from outside.
        record: records it.
        passes: make the Program fit to run.

    Raises:
        TraceError: the function can't be recorded.
    """

    def __init__(self, notes: Notes, record: Callable[[], Program], passes: Pass) -> None:
        self.notes = notes
        with ONE_AT_A_TIME, calls_noted() as called:
            self.program = passes(notes.record(record))
            self.run = compile_program(self.program)
        self.seeded = "key" in self.program.inputs
        self._module_params = list({id(x): (name, x) for name, x in called}.values())

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
        refuse_hooks(self._module_params)
        return self.run(*flat, key()) if self.seeded else self.run(*flat)
