"""Random programs, as `python -m benchmarks.fuzz` runs thousands of: none differs in silence.

A failure prints the program; `python -m benchmarks.fuzz --program` runs it again, alone.
"""

import pytest
import torch.distributed as dist

from benchmarks.fuzz import programs
from tests.ranks import run_ranks

BAD = ("differs", "raised")


def _bad(seeds: range) -> list[str]:
    """The programs of these seeds that differ, or end with an error that isn't the library's."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    outcomes = {seed: programs.run(programs.draw(seed), rank, world) for seed in seeds}
    return [
        f"{outcome.kind}: {outcome.why}\n    --program {str(programs.draw(seed))!r}"
        for seed, outcome in outcomes.items()
        if outcome.kind in BAD
    ]


@pytest.mark.quick("0")
@pytest.mark.parametrize("quarter", range(4))
def test_no_program_differs_from_plain_pytorch_in_silence(quarter: int) -> None:
    bad = _bad(range(10 * quarter, 10 * quarter + 10))
    assert not bad, "\n".join(bad)


@pytest.mark.quick("0")
@pytest.mark.parametrize("third", range(3))
def test_no_program_of_two_ranks_differs_from_plain_pytorch_in_silence(third: int) -> None:
    seeds = range(5 * third, 5 * third + 5)
    bad = [text for found in run_ranks(2, _bad, seeds) for text in found]
    assert not bad, "\n".join(bad)
