"""A save that is interrupted, as by Ctrl-C: the next ones work, and what is there is whole."""

import contextlib
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import fzero
from fzero.checkpoint import latest, load, save, wait
from fzero.checkpoint.format import disk
from tests.checkpoint.runs import names_in, tree_of, value_of
from tests.interrupts import AtLine

# A `with` of a lock and a call: Python lets no signal come between its block and its exit, and
# traces a line there.
UNINTERRUPTED = ("in_turn",)

pytestmark = pytest.mark.usefixtures("new_process")


def _interrupted(run: Path, asynchronous: bool) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        save(run, tree_of(1), step=1, asynchronous=asynchronous, timeout=1.0)


def _goes_on(run: Path) -> None:
    """What a program may do after it was interrupted, in this process, works."""
    wait()
    load(run, tree_of(0)) if latest(run) else None
    for step, asynchronous in ((2, False), (3, True)):
        # half of it for the folder's lock
        save(run, tree_of(step), step=step, asynchronous=asynchronous, timeout=1.0)
    wait()
    assert names_in(run)[-2:] == ["step-00000002", "step-00000003"]
    assert [value_of(run / name) for name in names_in(run)] in ([2, 3], [1, 2, 3])


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "nth"),
    [(fcntl, "flock", 0), (fcntl, "flock", 1), (threading.Thread, "start", 0)],
    ids=["lock", "unlock", "thread"],
)
def test_an_interrupt_around_a_call_stops_no_later_save(
    owner: Any,
    name: str,
    nth: int,
    after: bool,
    asynchronous: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, count, main = getattr(owner, name), itertools.count(), threading.current_thread()

    def call(*args: Any) -> Any:
        hit = threading.current_thread() is main and next(count) == nth
        if hit and not after:
            raise KeyboardInterrupt
        result = real(*args)
        if hit:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, call)
        _interrupted(tmp_path, asynchronous)
    _goes_on(tmp_path)


@pytest.mark.parametrize("stride", [67, pytest.param(1, marks=pytest.mark.slow, id="all")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_wherever_a_save_breaks_off_the_next_ones_work(
    asynchronous: bool, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no crash here, and hundreds of saves
    for hit, number in enumerate(range(1, 10**6, stride)):
        run, at = tmp_path / str(number), AtLine(fzero.checkpoint, number, UNINTERRUPTED)
        with at.interrupting():
            _interrupted(run, asynchronous)
        if not at.where:
            assert hit * stride > 100
            return
        run.mkdir(exist_ok=True)
        try:
            _goes_on(run)
        except Exception as error:
            raise AssertionError(at.where) from error


def test_a_lock_lets_go_once_it_is_collected(tmp_path: Path) -> None:
    first, second = disk.Lock(), disk.Lock()
    assert first.take(tmp_path)
    assert not second.take(tmp_path)
    del first
    assert second.take(tmp_path)


_KILLED_WHILE_SAVING = """
import os, pathlib, signal, sys, time
from fzero.checkpoint.format import disk
lock = disk.Lock()
taken = lock.take(pathlib.Path(sys.argv[1]))
child = os.fork()
if child == 0:  # a loader's worker, say
    time.sleep(60)
    os._exit(0)
print(taken, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_lives_on_holds_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED_WHILE_SAVING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        taken, child = trainer.stdout.readline().split()
        try:
            trainer.wait(60)
            lock = disk.Lock()
            assert taken == "True"
            assert lock.take(tmp_path)
            lock.let_go()
        finally:
            os.kill(int(child), signal.SIGKILL)
