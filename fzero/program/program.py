"""A Program: one staged-out function as a graph, with what is known about it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from fzero.program.listing import Collective, collectives, listing
from fzero.program.memory import peak_bytes
from fzero.program.verify import verify


@dataclass(frozen=True)
class Program:
    """One staged-out function: an FX graph of aten operators and collectives. A value: passes make
    new Programs.

    Args:
        name: of the part of the step that it is ("gradients", "update").
        graph: a placeholder per input, in order; one output node with a flat tuple. Every node that
            holds tensors has a fake copy of them in `meta["val"]`.
        inputs: a name for each placeholder.
        outputs: a name for each output.
        constants: tensors that the traced function closed over, by `get_attr` target.
        log: one line per front end and pass: what it did.
        times: how often a step runs it (micro-batches).
        resident: bytes of a step's state that live beside this graph and aren't among its inputs.
        bucket_bytes: most bytes of full leaves that share a collective; 0 if there are none.
        next: what the step runs after it.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    log: tuple[str, ...] = ()
    times: int = 1
    resident: int = 0
    bucket_bytes: int = 0
    next: "Program | None" = None

    def parts(self) -> Iterator["Program"]:
        """This Program and those that follow it in the step."""
        part: Program | None = self
        while part is not None:
            yield part
            part = part.next

    def then(self, following: "Program") -> "Program":
        """The Program that goes on with `following`."""
        return replace(self, next=following)

    def logged(self, graph: fx.Graph, line: str) -> "Program":
        """The same Program with another graph and one more line in its log."""
        return replace(self, graph=graph, log=(*self.log, line))

    def collectives(self) -> list[Collective]:
        """Rows of (kind, leaves, bytes, phase): see `fzero.program.listing.Collective`."""
        return collectives(self.parts())

    def peak_bytes(self) -> int:
        """Most bytes of tensors alive at once on this rank, inputs included."""
        return max(peak_bytes(part) for part in self.parts())

    def verify(self) -> None:
        """Check that every value has the shape, dtype and strides that were recorded.

        Raises:
            TraceError: with the value, what was recorded, and what it is.
        """
        verify(self.parts())

    def __str__(self) -> str:
        return listing(self.parts())


Pass = Callable[[Program], Program]
