"""What ranks settle under a memory limit: one plan that every rank holds, or one refusal for all.

The stand-in for a rank's executors is a table: which plans, by number, it can hold.
"""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fzero.distributed.mesh import resolve_mesh
from fzero.errors import ConfigError
from fzero.program.choice import Choice, Thrift
from fzero.program.fitting import NothingFits
from fzero.program.passes.groups import ALIKE
from fzero.program.passes.schedule import Early
from fzero.transforms.agreement import Agreement, Mine
from tests.ranks import run_ranks

LIMIT = 100


@dataclass(frozen=True)
class Rank:
    """What a rank can hold.

    Args:
        first: the plan that it finds when nothing is settled; -1: none is under its limit.
        holds: plans, also others', that are under it.
        least: the one that holds least here.
    """

    first: int
    holds: frozenset[int]
    least: int


class Refusal(NothingFits):
    def __init__(self, number: int) -> None:
        ConfigError.__init__(self, f"plan {number} holds least")
        first = SimpleNamespace(bucket_bytes=8, growth=ALIKE, early=Early(), thrift=Thrift(number))
        self.program: Any = SimpleNamespace(parts=lambda: [first], peak_bytes=lambda: LIMIT + 1)
        self.limit = LIMIT
        self._number = number

    @property
    def number(self) -> int:
        return self._number


def _made(number: int) -> Any:
    choice = Choice(8, thrift=Thrift(number))
    return SimpleNamespace(choice=choice, collectives=choice.encoded())


def _settled(tables: list[list[Rank]]) -> list[int | str]:
    """For each table the number of the plan that this rank goes on with, or the refusal."""
    mesh = resolve_mesh(None, "cpu")
    found: list[int | str] = []
    for ranks in tables:
        mine, agreement = ranks[dist.get_rank()], Agreement("function", None)

        def find(mine: Rank = mine, agreement: Agreement = agreement) -> Any:
            number = mine.first if agreement.choice is None else _number(agreement.choice)
            if number not in mine.holds:
                raise Refusal(mine.least)
            return _made(number)

        try:
            made = agreement.together(Mine(find, lambda: (), lambda made: None, lambda: None), mesh)
        except ConfigError as error:
            found.append(str(error))
        else:
            found.append(_number(made.choice))
    return found


def _number(choice: Choice) -> int:
    assert choice.thrift is not None
    return choice.thrift.number


def _expected(ranks: list[Rank]) -> int | None:
    """The plan of all: the most thrifty first one, else the least of who can't hold that."""
    if any(rank.first < 0 for rank in ranks):
        return None
    plan = max(rank.first for rank in ranks)
    for _ in range(2):
        unfit = [rank for rank in ranks if plan not in rank.holds]
        if not unfit:
            return plan
        plan = max(rank.least for rank in unfit)
    return None


def _rank(first: int, *others: int) -> Rank:
    holds = frozenset((first, *others)) - {-1}
    return Rank(first, holds, max(holds, default=-1))


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        ([_rank(1), _rank(1)], 1),
        ([_rank(1, 3), _rank(3)], 3),
        # the second can't hold the first's plan, but all can hold what is its own least
        ([_rank(3, 5), _rank(1, 5)], 5),
        ([_rank(3), _rank(1, 5)], None),
        ([_rank(-1), _rank(1)], None),
    ],
)
def test_ranks_go_on_with_one_plan_or_are_all_refused(ranks: list[Rank], plan: int | None) -> None:
    assert _expected(ranks) == plan
    _check([ranks])


@pytest.mark.parametrize("world", [2, 3])
def test_whatever_ranks_can_hold_they_end_alike(world: int) -> None:
    draw = random.Random(world)

    def rank() -> Rank:
        first = draw.choice((-1, *range(8), *range(8)))
        return _rank(first, *draw.sample(range(8), 4)) if first >= 0 else _rank(-1)

    _check([[rank() for _ in range(world)] for _ in range(40)])


def _check(tables: list[list[Rank]]) -> None:
    found = run_ranks(len(tables[0]), _settled, tables)
    for ranks, *ends in zip(tables, *found, strict=True):
        plan = _expected(ranks)
        if plan is not None:
            assert set(ends) == {plan}, ranks
        else:
            assert len(set(ends)) == 1, ranks
            assert "On rank" in ends[0], ranks
