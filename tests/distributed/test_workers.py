"""A process ends when gloo's worker threads have let go of what they worked on."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fzero.distributed import whereabouts
from fzero.distributed.workers import rest, states
from tests.ranks import run_ranks


def _states() -> list[str]:
    dist.all_reduce(torch.ones(3))
    rest()
    return states()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system shows no threads")
def test_workers_are_found_by_their_name_and_come_to_rest() -> None:
    for found in run_ranks(2, _states):
        assert found
        assert set(found) == {"S"}


@pytest.mark.parametrize("circle", [None, SimpleNamespace(verdict="told already")])
@pytest.mark.parametrize("fork", [0, 1])
def test_a_process_that_ends_waits_for_them_and_a_fork_does_not(circle: Any, fork: int) -> None:
    with mock.patch.object(whereabouts, "rest") as waited:
        whereabouts._leave(lambda: circle, os.getpid() + fork)  # pyright: ignore
    assert waited.called == (not fork)


def _thread(tasks: Path, number: int, name: str, state: str) -> None:
    folder = tasks / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"{number} ({name}) {state} 1 1 0")


def test_who_is_at_work_is_waited_for(tmp_path: Path) -> None:
    _thread(tmp_path, 1, "python", "R")
    _thread(tmp_path, 2, "a ) name", "R")
    _thread(tmp_path, 3, "pt_gloo_runloop", "S")
    _thread(tmp_path, 4, "pt_gloo_runloop", "R")
    (tmp_path / "5").mkdir()  # one that ends
    assert sorted(states(tmp_path)) == ["R", "S"]
    waiting = threading.Thread(target=rest, args=(60.0, tmp_path))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    _thread(tmp_path, 4, "pt_gloo_runloop", "S")
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.parametrize("state", ["R", "S"])
def test_nobody_waits_for_ever(tmp_path: Path, state: str) -> None:
    _thread(tmp_path, 1, "pt_gloo_runloop", state)
    rest(0.02, tmp_path)
    rest(0.02, tmp_path / "nothing")
