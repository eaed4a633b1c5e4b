"""Every program has plain torch's gradients, at every stage and world."""

import pytest

from tests.engine.parity import STAGES, agrees
from tests.engine.programs import PROGRAMS
from tests.ranks import run_ranks


def run(name: str) -> None:
    case = PROGRAMS[name]
    agrees(case.make, case.program, case.configs(STAGES))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_gradients_are_those_of_plain_torch(world: int, name: str) -> None:
    if world == 1:
        run(name)
    else:
        run_ranks(world, run, name)
