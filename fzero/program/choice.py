"""What ranks settle of a step's collectives before any runs: see `fzero.transforms.agreement`."""

import json
from collections.abc import Sequence
from typing import NamedTuple, Self

from fzero.program.passes.groups import Growth
from fzero.program.passes.schedule import Early
from fzero.program.program import Program


class Thrift(NamedTuple):
    """What of a plan for a memory limit decides which collectives run; see
    [Note: ranks under a limit].

    Args:
        number: of the plan, see `fzero.program.fitting`: the higher, the less it holds.
        regathered: leaves that backward gathers again.
        order: collectives of single leaves, as `passes.order` has them.
        recomputed: what the rank that made it computes again. Others need not do the same.
    """

    number: int
    regathered: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()


class Choice(NamedTuple):
    """How large buckets are, how early they go, and under a limit what else decides on them.

    Args:
        gradients: most bytes of full leaves in a bucket of the gradients' Program, or a function's.
        growth: how much larger its buckets may be.
        early: how early its gathers are launched.
        update: the same bytes of the update's.
        thrift: of the plan for a memory limit; None: there is no limit.
    """

    gradients: int
    growth: Growth = Growth()
    early: Early = Early()
    update: int = 0
    thrift: Thrift | None = None

    @classmethod
    def of(cls, program: Program) -> Self:
        """Of a whole step."""
        first, *rest = program.parts()
        thrift = Thrift(*first.thrift) if first.thrift else None
        update = sum(x.bucket_bytes for x in rest)
        growth, early = Growth(*first.growth), Early(*first.early)
        return cls(first.bucket_bytes, growth, early, update, thrift)

    def told(self) -> tuple[int, ...]:
        """As numbers of which the smallest suits all ranks, where there is no limit."""
        forward, backward, last, first = self.early
        return (
            *(self.gradients, self.update, *self.growth),
            *(forward, backward, _MOST - last, _MOST - first),
        )

    @classmethod
    def heard(cls, told: Sequence[int]) -> Self:
        """The inverse of `told`.

        >>> choice = Choice(9, Growth(20, 16, 8, 4), Early(4, 2, 1, 3), 8)
        >>> Choice.heard(choice.told()) == choice
        True
        """
        gradients, update, *growth, forward, backward, last, first = told
        early = Early(forward, backward, _MOST - last, _MOST - first)
        return cls(gradients, Growth(*growth), early, update)

    def encoded(self) -> str:
        """As a text: all of it."""
        return json.dumps(self)

    @classmethod
    def decoded(cls, text: str) -> Self:
        """The inverse of `encoded`.

        >>> choice = Choice(9, Growth(20), Early(1), 8, Thrift(3, ("w",), ("gather w",), ("mm",)))
        >>> Choice.decoded(choice.encoded()) == choice
        True
        """
        gradients, growth, early, update, thrift = json.loads(text)
        if thrift is not None:
            number, *names = thrift
            thrift = Thrift(number, *map(tuple, names))
        return cls(gradients, Growth(*growth), Early(*early), update, thrift)


_MOST = 2**31  # more than there are gathers
