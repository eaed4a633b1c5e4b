"""A flat function, recorded once and compiled: what every staged-out function comes down to."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fzero.functional.functionalize import calls_noted, refuse_hooks
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.collector import collector_paused
from fzero.program.graph import placeholders, tensors_of
from fzero.program.program import Pass
from fzero.transforms.notes import ONE_AT_A_TIME, Notes
from fzero.transforms.saved_notes import Gone


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
        with ONE_AT_A_TIME, collector_paused(), calls_noted() as called:
            program = passes(notes.record(record))
        self._take(program, notes, list({id(x): (name, x) for name, x in called}.values()))

    @classmethod
    def resumed(
        cls, program: Program, notes: Notes, module_params: Sequence[tuple[str, Tensor]]
    ) -> "Recorded":
        """What another process has recorded, whose notes hold here.

        Args:
            module_params: parameters of the modules that it called, with their names.
        """
        made = cls.__new__(cls)
        made._take(program, notes, module_params)
        return made

    def _take(
        self, program: Program, notes: Notes, module_params: Sequence[tuple[str, Tensor]]
    ) -> None:
        self.program, self.notes, self.module_params = program, notes, module_params
        self.run = compile_program(program)
        self.seeded = "key" in program.inputs

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


def check_inputs(program: Program, given: Sequence[Any]) -> None:
    """Raise `Gone` unless a Program was recorded for tensors like these."""
    wanted = [x for node in placeholders(program.graph) for x in tensors_of(node)]
    if len(wanted) != len(given):
        raise Gone([f"the number of inputs of {program.name} from {len(wanted)} to {len(given)}"])
    for name, x, y in zip(program.inputs, wanted, given, strict=False):
        if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            old, new = (f"{z.dtype} {tuple(z.shape)} on {z.device}" for z in (x, y))
            raise Gone([f"{name} from {old} to {new}"])
