"""A step that is saved again: by choice, at once, and by one save at a time."""

import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fzero
from fzero.checkpoint import latest, load, save, wait
from fzero.checkpoint.format import disk
from fzero.checkpoint.format.folders import steps
from fzero.checkpoint.format.manifest import read
from fzero.checkpoint.format.verify import problems
from tests.checkpoint.faults import full_disk, killer, watched
from tests.checkpoint.runs import names_in, tree_of, value_of
from tests.ranks import Ranks, RanksFailed, run_fresh, run_ranks

pytestmark = pytest.mark.usefixtures("new_process")


@pytest.fixture(params=[True, False], ids=["swapped", "in two renames"])
def swaps(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system can swap two names."""
    if not request.param:
        monkeypatch.setattr(disk, "exchange", lambda one, other: False)
    return request.param


@pytest.mark.parametrize("asynchronous", [False, True])
def test_overwrite_replaces(asynchronous: bool, swaps: bool, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, tree_of(step), {"lr": 0.1}, step=step)
    save(tmp_path, tree_of(7), {"lr": 0.1}, step=2, overwrite=True, asynchronous=asynchronous)
    wait()
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]
    assert value_of(latest(tmp_path)) == 7
    assert read(tmp_path / "step-00000002").lineage == (3, ((1, 1),))


def test_a_step_is_overwritten_by_choice_only(tmp_path: Path) -> None:
    save(tmp_path, tree_of(1), step=1)
    with pytest.raises(fzero.CheckpointError, match=r"there already.*overwrite=True"):
        save(tmp_path, tree_of(2), step=1)
    with pytest.raises(fzero.ConfigError, match="must be True or False"):
        save(tmp_path, tree_of(2), step=1, overwrite="yes")  # pyright: ignore
    assert value_of(tmp_path / "step-00000001") == 1


def _newer(step: Path) -> None:
    text = (save(step.parent, tree_of(1), step=5) / "manifest.json").read_text()
    (step / "manifest.json").write_text(text.replace('"version": 1', '"version": 2'))


def _noted(step: Path) -> None:
    _cut(step)
    (step / "eval.json").write_text("{}")


def _moved_from(step: Path) -> None:
    step.symlink_to(step.parent / "not mounted")


def _other_manifest(step: Path) -> None:
    step.mkdir()
    (step / "manifest.json").write_text('{"files": []}')


def _cut(step: Path) -> None:
    save(step.parent, tree_of(1), step=5)
    os.truncate(step / "rank-00000.safetensors", 10)


def _no_file(step: Path) -> None:
    (save(step.parent, tree_of(1), step=5) / "rank-00000.safetensors").unlink()


def _no_manifest(step: Path) -> None:
    (save(step.parent, tree_of(1), step=5) / "manifest.json").unlink()


def _torn_manifest(step: Path) -> None:
    os.truncate(save(step.parent, tree_of(1), step=5) / "manifest.json", 300)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "torch's": lambda step: dcp.save({"w": torch.ones(3)}, checkpoint_id=step, no_dist=True),
    "an export": lambda step: fzero.checkpoint.export_safetensors(step, tree_of(1)),
    "another manifest": _other_manifest,
    "a newer version": _newer,
    "damaged, with notes": _noted,
    "a file": lambda step: step.write_text("notes"),
    "a link": _moved_from,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_damaged_save_stays_unless_by_choice(kind: str, tmp_path: Path) -> None:
    there = tmp_path / "step-00000005"
    FOREIGN[kind](there)
    before = names_in(there) if there.is_dir() else [there.is_symlink()]
    with pytest.raises(fzero.CheckpointError, match=r"there already, and.*overwrite=True"):
        save(tmp_path, tree_of(2), step=5)
    save(tmp_path, tree_of(2), step=6, keep=1)
    assert before == (names_in(there) if there.is_dir() else [there.is_symlink()])
    save(tmp_path, tree_of(3), step=5, overwrite=True)
    assert value_of(there) == 3


@pytest.mark.parametrize("damage", [_cut, _no_file, _no_manifest, _torn_manifest, Path.mkdir])
def test_a_damaged_save_is_replaced_unasked(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    damage(tmp_path / "step-00000005")
    save(tmp_path, tree_of(2), step=5)
    assert value_of(tmp_path / "step-00000005") == 2
    assert names_in(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors"])
def test_what_cannot_be_read_just_now_stays(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = save(tmp_path, tree_of(1), step=5) / file

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if path == there:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing(os.open))
        patched.setattr(Path, "read_text", failing(Path.read_text))
        with pytest.raises(fzero.CheckpointError, match=r"cannot be told.*Input/output error"):
            save(tmp_path, tree_of(2), step=5)
    assert value_of(there.parent) == 1


def test_an_overwrite_after_going_back_leaves_the_other_branch_behind(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, tree_of(step), {"lr": 0.1}, step=step)
    load(tmp_path / "step-00000010", tree_of(0), {"lr": 0.1})
    save(tmp_path, tree_of(21), {"lr": 0.1}, step=20, overwrite=True, keep=2)
    assert value_of(latest(tmp_path)) == 21
    assert names_in(tmp_path) == ["step-00000010", "step-00000020"]


def test_the_old_one_is_there_until_the_new_one_is(swaps: bool, tmp_path: Path) -> None:
    """What `latest` finds before every call on the disk is one of the two, and whole."""
    save(tmp_path, tree_of(1), step=5)
    found: list[float] = []
    quiet = threading.local()

    def look(number: int, name: str, args: tuple[Any, ...]) -> None:
        if not getattr(quiet, "on", False):
            quiet.on = True
            newest = latest(tmp_path)
            assert newest is not None
            assert problems(newest) == []
            found.append(1 if read(newest).lineage.order == 1 else 2)
            quiet.on = False

    with watched(look):
        save(tmp_path, tree_of(2), step=5, overwrite=True, asynchronous=True)
        wait()
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert names_in(tmp_path) == ["step-00000005"]


def test_a_full_disk_leaves_the_old_one(swaps: bool, tmp_path: Path) -> None:
    save(tmp_path, tree_of(1), step=5)
    for at in (0, 1, 3, 5, 7):  # one of them is each of what takes room
        with watched(full_disk(at)), pytest.raises(fzero.CheckpointError, match="No space left"):
            save(tmp_path, tree_of(2), step=5, overwrite=True)
        assert names_in(tmp_path) == ["step-00000005"]
        assert value_of(tmp_path / "step-00000005") == 1


def _overwrite(run: Path, at: int, torn: bool, swaps: bool) -> list[str]:
    if not swaps:
        disk.exchange = lambda one, other: False
    save(run, tree_of(1), step=5)
    with watched(killer(at, torn)) as seen:
        save(run, tree_of(2), step=5, overwrite=True)
    return seen


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_kill_at_any_call_leaves_one_of_the_two(can_swap: bool, tmp_path: Path) -> None:
    (seen,) = run_fresh(1, _overwrite, tmp_path / "undisturbed", -1, False, can_swap)
    values = []
    for at, name in enumerate(seen):
        run = tmp_path / str(at)
        ranks = Ranks.start(1, {}, joined=False)
        try:
            with pytest.raises(RanksFailed, match="died with exit code -9"):
                ranks.call(_overwrite, (run, at, name == "append", can_swap), 60)
        finally:
            ranks.kill()
        values.append(value_of(latest(run)))
        save(run, tree_of(3), step=6)
        assert names_in(run) == ["step-00000005", "step-00000006"]
        assert value_of(run / "step-00000005") == values[-1]
    assert values == sorted(values)
    assert set(values) == {1, 2}


# ---- several at once
@pytest.mark.parametrize("asynchronous", [False, True])
def test_of_threads_that_save_one_step_one_wins(asynchronous: bool, tmp_path: Path) -> None:
    told: dict[int, str] = {}
    barrier = threading.Barrier(4)

    def one(value: int) -> None:
        barrier.wait()
        try:
            save(tmp_path, tree_of(value), step=5, asynchronous=asynchronous)
            told[value] = ""
        except fzero.CheckpointError as error:
            told[value] = str(error)

    threads = [threading.Thread(target=one, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait()
    (winner,) = [value for value, text in told.items() if not text]
    assert len(told) == 4
    assert all("there already" in text for text in told.values() if text)
    assert value_of(latest(tmp_path)) == winner
    assert names_in(tmp_path) == ["step-00000005"]


def test_threads_that_save_other_steps_all_win(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=save, args=(tmp_path, tree_of(value)), kwargs={"step": value})
        for value in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value_of(folder) for folder in steps(tmp_path)] == [0, 1, 2, 3]
    assert {read(folder).lineage.order for folder in steps(tmp_path)} == {1, 2, 3, 4}


_PROCESS = """
import sys, time, torch, fzero
run, value, locks = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "locks"
if not locks:
    fzero.checkpoint.format.disk.Lock.take = lambda self, folder: True
params = {"w": torch.full((200_000,), value)}
print("ready", flush=True)
sys.stdin.readline()
try:
    fzero.checkpoint.save(run, params, step=5)
except fzero.CheckpointError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize("locks", ["locks", pytest.param("no locks", marks=pytest.mark.slow)])
def test_of_processes_that_save_one_step_one_wins(locks: str, tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(tmp_path), str(value), locks],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for value in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    texts = [process.communicate(timeout=60)[0] for process in started]
    codes = [process.returncode for process in started]
    assert sorted(codes) == [0, 3], texts
    assert names_in(tmp_path) == ["step-00000005"]
    loaded, _ = load(tmp_path, {"w": torch.zeros(200_000)})
    assert (loaded["w"] == codes.index(0)).all()


def test_a_process_that_never_ends_its_save_is_told_of(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(fzero.CheckpointError, match="another process has been saving to"):
        save(tmp_path, tree_of(1), step=1, timeout=1.0)
    os.close(other)
    save(tmp_path, tree_of(1), step=1)


def test_a_save_within_a_save_is_refused(tmp_path: Path) -> None:
    """A signal's handler that saves may come while the program saves."""
    told = []

    def handler(*args: Any) -> None:
        try:
            save(tmp_path, tree_of(2), step=2)
        except fzero.CheckpointError as error:
            told.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        count = itertools.count()

        def act(number: int, name: str, args: tuple[Any, ...]) -> None:
            if name == "rename" and next(count) == 0:
                os.kill(os.getpid(), signal.SIGUSR1)

        with watched(act):
            save(tmp_path, tree_of(1), step=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "while this thread was in a save" in told[0]
    assert names_in(tmp_path) == ["step-00000001"]


def _overwrite_on_ranks(run: Path) -> tuple[list[str], float, str]:
    tree = fzero.shard({"w": torch.ones(5, 2)})
    save(run, tree, step=1)
    save(run, {"w": tree["w"] * 2}, step=1, overwrite=True)
    there = names_in(run)
    try:
        save(run, tree, step=1, overwrite=os.environ["RANK"] == "0")
    except fzero.CheckpointError as error:
        return there, float(load(run, tree)[0]["w"].full_tensor().sum()), str(error)
    raise AssertionError


def test_ranks_overwrite_together(tmp_path: Path) -> None:
    for there, total, said in run_ranks(2, _overwrite_on_ranks, tmp_path):
        assert there == ["step-00000001"]
        assert total == 20
        assert "overwrite: rank 0: True; rank 1: False" in said


def _refused_on_ranks(run: Path) -> list[str]:
    tree, said = fzero.shard({"w": torch.ones(4)}, fzero.Config(stage=3)), []
    save(run, tree, step=1)
    for refused in (lambda: save(run, tree, step=1), lambda: load(run / "none", tree)):
        with pytest.raises(fzero.CheckpointError) as error:
            refused()
        said.append(str(error.value))
    return said


def test_what_one_rank_finds_is_told_on_others_without_advice_of_another_kind(
    tmp_path: Path,
) -> None:
    for there, missing in run_ranks(2, _refused_on_ranks, tmp_path):
        assert "overwrite=True" in there
        assert "doesn't exist" in missing
        for text in (there, missing):
            assert not any(x in text for x in ("..", "disk has room", "hold parts", "same folder"))
