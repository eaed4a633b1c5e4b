"""A rank killed at every call that a save makes on the disk: nothing that was whole is lost."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import latest, save
from fzero.checkpoint.format.folders import steps
from fzero.checkpoint.format.verify import problems
from tests.checkpoint.faults import TORN, killer, watched
from tests.ranks import Ranks, RanksFailed, run_fresh

ROWS = {"w": 5, "b": 3}


def _tree(step: int) -> dict[str, Any]:
    full = {name: torch.full((rows, 2), float(step)) for name, rows in ROWS.items()}
    return fzero.shard(full)


def _two_saves_and_a_third(
    run: Path, at: int | None, rank: int, torn: bool, asynchronous: bool
) -> list[str]:
    """Steps 1 and 2 are saved; the save of step 3, with keep=2, is what is killed."""
    for step in (1, 2):
        save(run, _tree(step), step=step)
    left = run / ".step-00000009.saving"  # of an earlier kill
    if os.environ["RANK"] == "0":
        left.mkdir()
        (left / "rank-00000.safetensors").write_bytes(b"half")
    here = int(os.environ["RANK"])
    die = killer(-1 if at is None or rank != here else at, torn)
    with watched(die) as seen:
        try:
            save(run, _tree(3), step=3, keep=2, asynchronous=asynchronous, timeout=20.0)
            fzero.checkpoint.wait()
        except fzero.CheckpointError as error:
            (run / f"rank {here} saw").write_text(str(error))
            raise
    return seen


def _kill(run: Path, world: int, *args: Any) -> None:
    ranks = Ranks.start(world, {}, joined=world > 1)
    try:
        with pytest.raises(RanksFailed, match="died with exit code -9"):
            ranks.call(_two_saves_and_a_third, (run, *args), 60)
    finally:
        ranks.kill()


def _check(run: Path) -> None:
    """What is visible is whole and right, and the newest of it is no older than before the kill."""
    for folder in steps(run):
        assert problems(folder) == []
    newest = latest(run)
    assert newest is not None
    step = int(newest.name[5:])
    assert step in (2, 3)
    params, _ = fzero.checkpoint.load(run, _tree(0))
    for name, x in fzero.unshard(params).items():
        assert torch.equal(x, torch.full((ROWS[name], 2), float(step)))
    save(run, _tree(4), step=4, keep=2)  # the next save clears up and goes through
    assert latest(run) == run.absolute() / "step-00000004"
    assert not [entry for entry in run.iterdir() if entry.name.startswith(".")]
    assert [folder.name[-1] for folder in steps(run)] == [str(step), "4"]


def _points(run: Path, world: int) -> list[tuple[int, int, bool]]:
    """Every (call, rank, torn) of an undisturbed save."""
    by_rank = run_fresh(world, _two_saves_and_a_third, run, None, 0, False, False)
    points = []
    for rank, seen in enumerate(by_rank):
        for at, name in enumerate(seen):
            points.append((at, rank, False))
            if name in TORN:
                points.append((at, rank, True))
    return points


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.quick("1")
def test_a_kill_at_any_call_loses_nothing(world: int, tmp_path: Path) -> None:
    points = _points(tmp_path / "undisturbed", world)
    assert len(points) >= {1: 20, 2: 30}[world]  # at least 50 kills in all
    for number, point in enumerate(points):
        run = tmp_path / str(number)
        _kill(run, world, *point, False)
        rank = point[1]
        if world == 2:
            assert f"rank {rank} ended" in (run / f"rank {1 - rank} saw").read_text()
        _check(run)


def test_a_kill_in_the_background_loses_nothing(tmp_path: Path) -> None:
    for number, (at, rank) in enumerate([(1, 0), (2, 1), (5, 0), (7, 0)]):
        run = tmp_path / str(number)
        _kill(run, 2, at, rank, False, True)
        _check(run)
