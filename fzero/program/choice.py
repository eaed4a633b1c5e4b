"""What ranks settle of a step's collectives before any runs: see `fzero.transforms.agreement`."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from fzero.program.passes.schedule import Early
from fzero.program.program import Program


class Choice(NamedTuple):
    """How large buckets are, and how early they go.

    Args:
        gradients: most bytes of full leaves in a bucket of the gradients' Program, or a function's.
        early: how early its gathers are launched.
        update: the same bytes of the update's.
    """

    gradients: int
    early: Early = Early()
    update: int = 0

    @classmethod
    def of(cls, program: Program) -> Self:
        """Of a whole step."""
        first, *rest = program.parts()
        return cls(first.bucket_bytes, Early(*first.early), sum(x.bucket_bytes for x in rest))

    def told(self) -> tuple[int, ...]:
        """As numbers of which the smallest suits all ranks."""
        forward, backward, last, first = self.early
        return (self.gradients, self.update, forward, backward, _MOST - last, _MOST - first)

    @classmethod
    def heard(cls, told: Sequence[int]) -> Self:
        """The inverse of `told`.

        >>> Choice.heard(Choice(9, Early(4, 2, 1, 3), 8).told())
        Choice(gradients=9, early=Early(forward=4, backward=2, last=1, first=3), update=8)
        """
        gradients, update, forward, backward, last, first = told
        return cls(gradients, Early(forward, backward, _MOST - last, _MOST - first), update)


_MOST = 2**31  # more than there are gathers
