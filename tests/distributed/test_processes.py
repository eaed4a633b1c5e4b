"""A rank that dies or stops during a step: the others end, and say which it was."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fzero
from fzero.distributed.processes import is_of_collective
from fzero.distributed.whereabouts import Circle
from tests.ranks import Ranks, RanksFailed

TIMEOUT = 4  # seconds: what the process group is configured with


def _lose(out: Path, victim: int, how: int, cfg: dict[str, Any]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank = dist.get_rank()

    def model_fn(params: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return (batch @ params["w"]).tanh().square().mean()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.adamw(0.1), fzero.Config(**cfg))
    state = step_fn.init({"w": torch.ones(8, 8)})
    state = step_fn(*state, torch.ones(4, 8))
    if rank == victim:
        os.kill(os.getpid(), how)
    try:
        step_fn(*state, torch.ones(4, 8))
    except fzero.RankMismatchError as error:
        (out / str(rank)).write_text(str(error))
        raise


@pytest.mark.parametrize(
    ("victim", "how", "cfg"),
    [
        (1, signal.SIGKILL, {"stage": 3}),
        pytest.param(0, signal.SIGKILL, {"stage": 2}, marks=pytest.mark.slow),
        (2, signal.SIGKILL, {"stage": 0, "executor": "eager"}),
        pytest.param(2, signal.SIGSTOP, {"stage": 3}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_is_named(
    victim: int, how: int, cfg: dict[str, Any], tmp_path: Path
) -> None:
    ranks = Ranks.start(3, {}, joined=False)
    try:
        with pytest.raises(RanksFailed):
            # what the others say after the first has failed is the point: they get the time
            ranks.call(_lose, (tmp_path, victim, how, cfg), TIMEOUT + 20, grace=TIMEOUT + 20)
    finally:
        ranks.kill()
    what = "is stopped" if how == signal.SIGSTOP else "ended"
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    # the system wakes a stopped process whose group loses its session's leader: it may speak, too
    told.pop(str(victim), None)
    assert told.keys() == {"0", "1", "2"} - {str(victim)}
    for text in told.values():
        assert text.startswith(f"a collective failed: rank {victim} {what}.")


def test_other_errors_go_through() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), Circle((0,), 0).explained():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert is_of_collective(RuntimeError("Connection closed by peer"))
