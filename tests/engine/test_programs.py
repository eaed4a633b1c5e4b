"""Every program has plain torch's gradients, at every stage and world."""

import pytest

from tests.engine.parity import STAGES, agrees
from tests.engine.programs import PROGRAMS
from tests.ranks import run_ranks


def run(name: str, world: int) -> None:
    case = PROGRAMS[name]
    configs = case.configs(STAGES)
    if world != 2:  # the least that there is to see: once at each stage, beyond two ranks one step
        configs = [fields for fields in configs if fields["accum_steps"] == case.accum[-1]]
    agrees(case.make, case.program, configs, steps=1 if world > 2 else 2)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_gradients_are_those_of_plain_torch(world: int, name: str) -> None:
    if world == 1:
        run(name, world)
    else:
        run_ranks(world, run, name, world)
