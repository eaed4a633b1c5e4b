"""What a save promises besides its values: order on the disk, a full disk, the background."""

import gc
import os
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fzero
from fzero.checkpoint import background, latest, load, save, wait
from fzero.checkpoint.format.folders import steps
from fzero.checkpoint.format.verify import problems
from fzero.checkpoint.save import Job as Saving
from tests.checkpoint.cases import Job, differing, full, make
from tests.checkpoint.faults import full_disk, watched
from tests.ranks import run_fresh, run_ranks


def _tree(step: int) -> dict[str, Any]:
    return fzero.shard({"w": torch.full((6, 2), float(step)), "b": torch.zeros(3)})


def _names(run: Path) -> list[str]:
    return sorted(entry.name for entry in run.iterdir())


# ---- folders
def test_keep_lets_only_old_ones_go(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, _tree(step), step=step, keep=2)
    assert _names(tmp_path) == ["step-00000003", "step-00000004"]
    save(tmp_path, _tree(5), step=5)
    assert len(steps(tmp_path)) == 3


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "1"])
def test_keep_is_checked(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(fzero.CheckpointError, match="int >= 1"):
        save(tmp_path, _tree(0), keep=keep)
    assert _names(tmp_path) == []


def test_a_state_without_its_star_is_refused(tmp_path: Path) -> None:
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(0.1))
    state = step_fn.init({"w": torch.ones(3)})
    with pytest.raises(fzero.CheckpointError, match=r"save\(path, \*engine.state\)"):
        save(tmp_path, state)
    with pytest.raises(fzero.CheckpointError, match=r"OptState, of step 0.*params, opt_state\)"):
        save(tmp_path, *reversed(state))
    for within in ({"g": state}, [state[1]]):
        with pytest.raises(fzero.CheckpointError, match=r"with an OptState in it.*g\.state\[1\]"):
            save(tmp_path, within, step=1)
    assert _names(tmp_path) == []
    save(tmp_path, *state)


def test_a_step_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, _tree(1), step=1)
    with pytest.raises(fzero.CheckpointError, match="there already"):
        save(tmp_path, _tree(2), step=1)
    assert problems(tmp_path / "step-00000001") == []


def test_a_step_that_is_damaged_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, _tree(1), step=1)
    os.truncate(tmp_path / "step-00000001" / "rank-00000.safetensors", 10)
    save(tmp_path, _tree(2), step=1)
    assert problems(tmp_path / "step-00000001") == []


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, _tree(0), step=step)
    assert latest(tmp_path) == tmp_path / "step-100000000"


def test_nothing_is_visible_before_it_is_on_the_disk(tmp_path: Path) -> None:
    """Every file is synced before the rename, and the rename before anything is removed."""
    for step in (1, 2):
        save(tmp_path, _tree(step), step=step)
    done: list[tuple[str, Any]] = []
    with (
        watched(lambda number, name, args: done.append((name, args[0]))),
        mock.patch.object(os, "fsync", wraps=os.fsync) as fsync,
    ):
        save(tmp_path, _tree(3), step=3, keep=1)
    names = [name for name, _ in done]
    assert fsync.call_count == sum(name.startswith("sync") for name in names)
    appear = names.index("rename")
    assert names[:appear].count("create") == names[:appear].count("sync") == 2
    created = done[names.index("create")][1].parent
    last_sync = max(i for i in range(appear) if names[i] == "sync")
    assert ("sync_folder", created) in done[last_sync:appear]
    assert done[appear + 1] == ("sync_folder", tmp_path)
    assert set(names[appear + 2 :]) == {"rename", "remove"}


# ---- a full disk
def _fill_the_disk(run: Path, at: int, rank: int) -> str:
    save(run, _tree(1), step=1)
    here = int(os.environ["RANK"])
    with watched(full_disk(at if here == rank else 10**9)):
        try:
            save(run, _tree(2), step=2)
        except fzero.CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_told_on_every_rank(rank: int, tmp_path: Path) -> None:
    for at in range(8):
        run = tmp_path / str(at)
        texts = run_ranks(2, _fill_the_disk, run, at, rank)
        if not any(texts):
            assert at > 3  # the save has fewer calls on this rank
            break
        assert texts[0] == texts[1]
        assert f"rank {rank}: [Errno 28] No space left on device" in texts[0]
        assert _names(run) == ["step-00000001"]  # what was begun gives its room back
        assert problems(run / "step-00000001") == []


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The same from the kernel: a limit on the size of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save(tmp_path, {"w": torch.zeros(10)}, step=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(fzero.CheckpointError, match="File too large"):
            save(tmp_path, {"w": torch.zeros(100_000)}, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _names(tmp_path) == ["step-00000001"]


# ---- ranks that differ
def _differ(run: Path, what: str) -> str:
    rank = int(os.environ["RANK"])
    tree: Any = {"w": torch.zeros(3)}
    state: Any = {"count": torch.tensor(1), "lr": 0.1}
    path, step = run, 1
    if rank == 1:
        if what == "shape":
            tree = {"w": torch.zeros(4)}
        elif what == "leaf":
            tree["extra"] = torch.zeros(1)
        elif what == "value":
            state["count"] = torch.tensor(2)
        elif what == "scalar":
            state["lr"] = 0.2
        elif what == "step":
            step = 2
        elif what == "path":
            path = run / "other"
    with pytest.raises(fzero.CheckpointError) as told:
        save(path, tree, state, step=step)
    return str(told.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", "params.w: rank 0: float32 (3,) whole; rank 1: float32 (4,) whole"),
        ("leaf", "params.extra: rank 0: None; rank 1: float32 (1,) whole"),
        ("value", "opt_state.count: rank 0: [1]; rank 1: [2]"),
        ("scalar", "opt_state.lr: rank 0: 0.1; rank 1: 0.2"),
        ("step", "step: rank 0: 1; rank 1: 2"),
        ("path", "path: rank 0: "),
    ],
)
def test_ranks_that_differ_are_told(what: str, said: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _differ, tmp_path, what)
    assert first == second
    assert said in first
    assert not latest(tmp_path)


def _paths(run: Path) -> list[str]:
    tree = {"w": torch.zeros(3)}
    for step in (1, 2):
        save(run, tree, step=step)
    mine = run / f"step-{dist.get_rank() + 1:08d}"
    told = []
    for read in (load, fzero.checkpoint.load_partial, fzero.checkpoint.import_deepspeed_universal):
        with pytest.raises(fzero.CheckpointError) as raised:
            read(mine, tree)
        told.append(str(raised.value))
    # one path from where each rank was started, however it is written
    os.chdir(run)
    load("step-00000001" if dist.get_rank() else run / "step-00000001", tree)
    return told


def test_ranks_that_load_other_paths_are_told(tmp_path: Path) -> None:
    for texts in run_ranks(2, _paths, tmp_path):
        for text in texts:
            assert text.startswith("ranks differ in what they load at path: rank 0: ")
            assert f"rank 1: {tmp_path / 'step-00000002'}. It must be the same on all." in text


# ---- in the background
class Gate:
    """Holds the background's writes until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.opened.wait(30)


def _change_while_writing(run: Path) -> tuple[list[str], bool]:
    params, opt_state, _ = make(Job(2, 3), 7)
    before = full(params, opt_state)
    gate = Gate()
    with watched(gate):
        where = save(run, params, opt_state, step=7, asynchronous=True)
        early = where.exists()
        for leaf in (*fzero.tree.leaves(params), *fzero.tree.leaves(opt_state)):
            fzero.distributed.dtensor.local_tensor(
                leaf
            ).zero_()  # training goes on, in the same memory
        gate.opened.set()
        wait()
    other, state, _ = make(Job(2, 3), 8)
    return differing(before, full(*load(run, other, state))), early


def test_training_may_go_on_at_once(tmp_path: Path) -> None:
    assert run_ranks(2, _change_while_writing, tmp_path) == [([], False)] * 2


def _two_at_once(run: Path) -> list[str]:
    save(run, _tree(1), step=1, asynchronous=True)
    save(run, _tree(2), step=2, asynchronous=True)
    there = _names(run)  # the second one has waited for the first
    wait()
    return there


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    for there in run_ranks(2, _two_at_once, tmp_path):
        assert "step-00000001" in there
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]


def _save_with_a_group_that_others_lack(run: Path) -> tuple[str, list[str], list[str]]:
    tree = _tree(1)
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        save(run, tree, step=1, asynchronous=True)
    there = _names(run)
    save(run, tree, step=2)
    return __file__, [w.filename for w in seen if "different numbers" in str(w.message)], there


def test_ranks_in_different_numbers_of_groups_save_at_once(tmp_path: Path) -> None:
    """In a group of its own they would wait for each other until the time limit."""
    found = run_fresh(2, _save_with_a_group_that_others_lack, tmp_path)
    for here, told, there in found:
        assert told == [here]
        assert there == ["step-00000001"]


def _fail_in_the_background(run: Path, how: str) -> str:
    with watched(full_disk(2 if os.environ["RANK"] == "1" else 10**9)):
        save(run, _tree(1), step=1, asynchronous=True)
        going = background._background.going
        assert going is not None
        going.join()
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: save(run, _tree(2), step=2),
        "load": lambda: load(run, _tree(0)),
        "wait": wait,
    }
    with pytest.raises(fzero.CheckpointError, match="No space left") as told:
        calls[how]()
    wait()  # told once
    save(run, _tree(3), step=3)
    return str(told.value)


@pytest.mark.parametrize("how", ["save", "load", "wait"])
def test_an_error_in_the_background_is_told_at_the_next_call(how: str, tmp_path: Path) -> None:
    texts = run_ranks(2, _fail_in_the_background, tmp_path, how)
    assert all("rank 1: [Errno 28]" in text for text in texts)
    assert _names(tmp_path) == ["step-00000003"]


def _destroy_while_saving(run: Path, how: str) -> tuple[list[str], list[str]]:
    """A save has not begun to write when its group is destroyed: what is there, what is told."""
    written = Saving._run

    def late(job: Saving, pool: Any) -> None:
        time.sleep(0.5)
        with watched(full_disk(2 if how == "full disk" else 10**9)):
            written(job, pool)

    told = []
    with (
        mock.patch.object(Saving, "_run", late),
        # as with a torch that says nothing before it destroys its groups
        mock.patch.object(background, "is_told", return_value=how != "untold"),
    ):
        tree = _tree(1)
        save(run, tree, step=1, asynchronous=True)
        dist.destroy_process_group()
        there = _names(run)
        for call in (wait, wait, lambda: save(run, tree, step=2)):
            try:
                call()
                told.append("")
            except fzero.FzeroError as error:
                told.append(f"{type(error).__name__}: {error}")
    return there, told


def test_a_save_is_finished_before_its_process_group_is_destroyed(tmp_path: Path) -> None:
    for there, (*told, after) in run_fresh(2, _destroy_while_saving, tmp_path, "well"):
        assert there == ["step-00000001"]
        assert told == ["", ""]
        assert after.startswith("ShardError: the process group")
    assert problems(tmp_path / "step-00000001") == []
    assert _names(tmp_path) == ["step-00000001"]


def test_an_error_before_the_group_is_destroyed_is_told_at_the_next_call(tmp_path: Path) -> None:
    for _, (told, again, after) in run_fresh(2, _destroy_while_saving, tmp_path, "full disk"):
        assert told.startswith("CheckpointError: the checkpoint was not written")
        assert "No space left" in told
        assert again == ""
        assert after.startswith("ShardError: the process group")


def test_a_save_whose_process_group_is_gone_says_so(tmp_path: Path) -> None:
    for _, (told, again, _) in run_fresh(2, _destroy_while_saving, tmp_path, "untold"):
        assert told.startswith("ShardError: the process group")
        assert again == ""
    assert latest(tmp_path) is None


def test_an_error_in_the_background_is_told_at_exit(tmp_path: Path) -> None:
    script = f"""
import torch, fzero
run, params = {str(tmp_path)!r}, {{"w": torch.ones(3)}}
fzero.checkpoint.save(run, params, step=1, asynchronous=True)
fzero.checkpoint.wait()
def fail(*args): raise OSError(28, "No space left on device")
fzero.checkpoint.format.disk.create = fail
fzero.checkpoint.save(run, params, step=2, asynchronous=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "fzero: the save of step 2" in done.stderr
    assert "No space left on device" in done.stderr
    assert _names(tmp_path) == ["step-00000001"]


def test_a_program_that_ends_finishes_its_save(tmp_path: Path) -> None:
    script = f"""
import torch, fzero
fzero.checkpoint.save({str(tmp_path)!r}, {{"w": torch.ones(10**6)}}, step=1, asynchronous=True)
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=60)
    assert problems(tmp_path / "step-00000001") == []


def test_a_save_in_an_exit_handler_is_written(tmp_path: Path) -> None:
    """The interpreter waits for no thread any more by then, and starts none for checksums."""
    script = f"""
import atexit, torch, fzero
params = {{"w": torch.ones(10**6)}}
for step, how in ((1, True), (2, False)):
    atexit.register(fzero.checkpoint.save, {str(tmp_path)!r}, params, step=step, asynchronous=how)
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=60)
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]
    assert [problems(step) for step in steps(tmp_path)] == [[], []]


def test_what_was_written_beside_training_is_not_kept(tmp_path: Path) -> None:
    def bytes_alive() -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
        return sum(x.nbytes for x in tensors if x.layout is torch.strided)

    params = {"w": torch.zeros(1_000_003)}
    before = bytes_alive()
    fzero.checkpoint.save(tmp_path, params, None, asynchronous=True)
    fzero.checkpoint.background._background.going.thread.join(60)  # pyright: ignore
    assert bytes_alive() < before + params["w"].nbytes
    fzero.checkpoint.wait()
