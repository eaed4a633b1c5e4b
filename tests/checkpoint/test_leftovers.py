"""What cannot be removed, and a disk that fails once a checkpoint is there: no save is lost."""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import background, latest, load, save, wait
from fzero.checkpoint.format import disk
from fzero.checkpoint.format.folders import steps
from fzero.checkpoint.format.manifest import read
from fzero.checkpoint.lineage import Heads
from tests.checkpoint.faults import TORN, watched
from tests.checkpoint.runs import names_in, tree_of, value_of
from tests.ranks import run_fresh, run_ranks

pytestmark = pytest.mark.usefixtures("new_process")

UNREMOVED = "the checkpoint is there, but some of what should go could not be removed: "


def _value(folder: Path | None) -> float:
    value = value_of(folder)
    background.heads._resumed.clear()  # a look is no resumption here
    return value


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    """What the block warns of, and that it is said of this file's lines."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in seen]
    assert all(w.filename == __file__ for w in seen)


def busy(
    where: Callable[[Path], bool], calls: tuple[str, ...], torn: bool = False
) -> Callable[[int, str, tuple[Any, ...]], None]:
    """These calls fail on such paths, as where NFS has a file open; torn: with something done."""

    def act(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name in calls and where(args[0]):
            if torn and name == "remove":
                (args[0] / "rank-00000.safetensors").unlink(missing_ok=True)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(args[0]))

    return act


# ---- what a killed save may leave, and what somebody may have put in its place
def _put(kind: str, at: Path, elsewhere: Path) -> None:
    """A folder, file or link; what links point to is `elsewhere`."""
    if kind == "file":
        at.write_text("plain")
    elif kind == "dangling":
        at.symlink_to(elsewhere / "none")
    elif kind == "link to file":
        at.symlink_to(elsewhere / "manifest.json")
    else:
        shutil.copytree(elsewhere, at) if kind == "folder" else at.symlink_to(elsewhere)


KINDS = ("folder", "file", "link", "link to file", "dangling")


@pytest.mark.parametrize("why", ["saving", "removing", "replaced"])
@pytest.mark.parametrize("kind", KINDS)
def test_leftovers_of_every_kind_go(kind: str, why: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    elsewhere = save(tmp_path / "other", tree_of(9), step=9)
    save(run, tree_of(1), step=1)
    _put(kind, run / f".step-00000001.0123abcd.{why}", elsewhere)
    with _told() as said:
        save(run, tree_of(2), step=2, keep=1)
    assert said == []
    assert names_in(run) == ["step-00000002"]
    assert _value(elsewhere) == 9


@pytest.mark.parametrize("why", ["saving", "removing", "replaced"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", [("remove",), ("remove", "rename")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_leftover_that_stays_stops_no_save(
    asynchronous: bool, calls: tuple[str, ...], kind: str, why: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    elsewhere = save(tmp_path / "other", tree_of(9), step=9)
    # damaged, or it would be put back by what was put aside for it
    (run / "step-00000008").mkdir(parents=True)
    _put(kind, run / f".step-00000008.0123abcd.{why}", elsewhere)
    for step in (10, 11, 12):
        with (
            _told() as said,
            watched(busy(lambda path: path.name.startswith(".step-00000008"), calls)),
        ):
            save(run, tree_of(step), step=step, keep=1, asynchronous=asynchronous)
            wait()
        (stays,) = [entry for entry in run.iterdir() if entry.name.startswith(".")]
        assert len(said) == 1
        assert said[0].startswith(UNREMOVED)
        assert f"{stays} (Device or resource busy)" in said[0]
        assert _value(latest(run)) == step
        assert [folder.name for folder in steps(run)] == ["step-00000008", f"step-{step:08d}"]
    with _told() as said:
        save(run, tree_of(13), step=13, keep=1)
    assert said == []
    assert names_in(run) == ["step-00000008", "step-00000013"]
    assert _value(elsewhere) == 9


def test_what_was_put_aside_and_cannot_go_back_is_still_its_step(tmp_path: Path) -> None:
    save(tmp_path, tree_of(1), step=1)
    aside = tmp_path / ".step-00000001.0123abcd.replaced"
    (tmp_path / "step-00000001").rename(aside)
    with watched(busy(lambda path: path == aside, ("rename",))):
        with pytest.raises(fzero.CheckpointError, match=r"replaced is there already"):
            save(tmp_path, tree_of(2), step=1)
        with pytest.warns(UserWarning, match=f"{aside.name} .Device"):
            save(tmp_path, tree_of(2), step=2)
    assert _value(aside) == 1
    save(tmp_path, tree_of(3), step=3)
    assert names_in(tmp_path) == [f"step-0000000{step}" for step in (1, 2, 3)]


# ---- a checkpoint that `keep` lets go
@pytest.mark.parametrize(
    ("how", "kind"),
    [*itertools.product(["rename", "remove"], ["folder", "link"]), ("torn", "folder")],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_that_cannot_go_is_whole_or_not_seen(
    asynchronous: bool, how: str, kind: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = save(run, tree_of(1), step=1)
    elsewhere = shutil.copytree(first, tmp_path / "elsewhere")
    if kind == "link":
        shutil.rmtree(first)
        first.symlink_to(elsewhere)
    calls = ("rename",) if how == "rename" else ("remove",)
    for step in (2, 3, 4):
        with (
            _told() as said,
            watched(busy(lambda path: path.match("*step-00000001*"), calls, how == "torn")),
        ):
            save(run, tree_of(step), step=step, keep=1, asynchronous=asynchronous)
            wait()
        (stays,) = set(run.iterdir()) - {run / f"step-{step:08d}"}
        if how == "torn":
            assert re.fullmatch(r"\.step-00000001\.[0-9a-f]{8}\.removing", stays.name)
        else:
            assert stays == first
            assert _value(first) == 1
        assert said == [
            f"{UNREMOVED}{stays} (Device or resource busy). Each save tries again; remove by hand "
            "what stays."
        ]
        assert _value(latest(run)) == step
    save(run, tree_of(5), step=5, keep=1)
    assert names_in(run) == ["step-00000005"]
    assert _value(elsewhere) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("can_swap", [True, False])
def test_an_overwrite_replaces_whatever_has_the_name(
    can_swap: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_swap:
        monkeypatch.setattr(disk, "exchange", lambda one, other: False)
    run = tmp_path / "run"
    elsewhere = save(tmp_path / "other", tree_of(9), step=9)
    run.mkdir()
    _put(kind, run / "step-00000001", elsewhere)
    save(run, tree_of(2), step=1, overwrite=True)
    assert names_in(run) == ["step-00000001"]
    assert not (run / "step-00000001").is_symlink()
    assert _value(latest(run)) == 2
    assert _value(elsewhere) == 9


def _protected() -> list[tuple[list[str], list[str], bool]]:
    """An owner's `chmod a-w` of step 1, by somebody who is not root: root would not notice."""
    save(tempfile.mkdtemp(), tree_of(0), step=0)  # what is imported late, while it can be read
    me = os.geteuid()
    # not pytest's own folders, which are its user's alone
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o777)
        os.seteuid(65534 if me == 0 else me)
        run, found = Path(above) / "run", []
        for step in range(1, 5):
            with _told() as said:
                save(run, tree_of(step), step=step, keep=1)
            os.chmod(run / "step-00000001", 0o555)
            first = any(f"{run / 'step-00000001'} (Permission denied)" in text for text in said)
            found.append((said, names_in(run), first))
        os.chmod(run / "step-00000001", 0o755)
        os.seteuid(me)
    return found


def test_one_that_its_owner_protects_keeps_its_name() -> None:
    ((one, *others),) = run_fresh(1, _protected)
    assert one == ([], ["step-00000001"], False)
    for step, (said, names, first) in enumerate(others, 2):
        assert first, said
        assert names == ["step-00000001", f"step-0000000{step}"]


# ---- a disk that fails at one call
def _fails(at: int, torn: bool) -> Callable[[int, str, tuple[Any, ...]], None]:
    def act(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == at:
            if torn and name == "remove" and args[0].is_dir():
                next(args[0].iterdir()).unlink()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(args[0]))

    return act


def _third(run: Path, at: int, torn: bool, overwrite: bool, asynchronous: bool) -> Any:
    """Steps 1 and 2 are there; a third save fails at call `at`: what it said, and its calls."""
    background.heads = Heads()
    for step in (1, 2):
        save(run, tree_of(step), {"lr": 0.1}, step=step)
    left = run / ".step-00000009.0123abcd.removing"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    error = ""
    with _told() as said, watched(_fails(at, torn)) as seen:
        try:
            save(
                *(run, tree_of(3), {"lr": 0.1}),
                step=2 if overwrite else 3,
                keep=1,
                overwrite=overwrite,
                asynchronous=asynchronous,
            )
            wait()
        except fzero.CheckpointError as raised:
            error = str(raised)
    return error, said, list(seen)


@pytest.mark.parametrize("can_swap", [True, False])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_at_any_call_is_told_as_it_is(
    asynchronous: bool,
    overwrite: bool,
    can_swap: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is said of the checkpoint is so, what was whole stays so, and the next save works."""
    if not can_swap:
        monkeypatch.setattr(disk, "exchange", lambda one, other: False)
    numbers = itertools.count()
    seen = _third(tmp_path / "undisturbed", -1, False, overwrite, asynchronous)[2]
    outcomes = set()
    points = [(at, torn) for at, name in enumerate(seen) for torn in {False, name in TORN}]
    for at, torn in points:
        run = tmp_path / str(next(numbers))
        error, said, _ = _third(run, at, torn, overwrite, asynchronous)
        there = [_value(folder) for folder in steps(run)]
        mine = run / ("step-00000002" if overwrite else "step-00000003")
        if "not written" in error:
            outcomes.add("not written")
            assert there == [1, 2]
            assert said == []
        else:
            assert _value(latest(run)) == _value(mine) == 3
            assert read(mine).lineage.line == (((1, 1),) if overwrite else ((2, 2), (1, 1)))
            if error:
                # no older one goes for one whose name may not last
                outcomes.add("not synced")
                assert error.startswith(f"the checkpoint is there, but {run} could not be synced")
                assert there == ([1, 3] if overwrite else [1, 2, 3])
                assert said == []
            elif said:
                outcomes.add("not removed")
                (text,) = said
                assert text.startswith(UNREMOVED)
                assert "Input/output error" in text
                assert text.count(str(run)) == 1
            else:
                outcomes.add("well")
        # what comes next comes from what is there
        parent = read(latest(run) or run).lineage.order, latest(run)
        with _told() as said:
            last = save(run, tree_of(4), {"lr": 0.1}, step=4, keep=1)
        assert said == []
        assert read(last).lineage.line[0][1] == parent[0]
        assert names_in(run) == ["step-00000004"]
        assert _value(last) == 4
    assert outcomes >= {"not written", "not synced", "not removed"}


def test_nothing_that_was_replaced_goes_before_the_folder_is_synced(tmp_path: Path) -> None:
    save(tmp_path, tree_of(1), step=1)
    with watched(busy(lambda path: path == tmp_path, ("sync_folder",))):
        with pytest.raises(fzero.CheckpointError, match="step-00000001 is found"):
            save(tmp_path, tree_of(2), step=1, overwrite=True)
        with pytest.raises(fzero.CheckpointError, match="not written"):
            save(tmp_path, tree_of(3), step=3)
    (old,) = tmp_path.glob(".step-*")
    assert _value(old) == 1
    assert _value(latest(tmp_path)) == 2
    save(tmp_path, tree_of(3), step=3)
    assert names_in(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_lock_that_fails_to_go_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def flock(file: int, how: int) -> None:
        if how == fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    for step in (1, 2):
        save(tmp_path, tree_of(step), step=step, keep=1, timeout=4.0)
    assert names_in(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("how", ["save", "load", "wait"])
def test_a_save_in_the_background_warns_at_the_next_call(how: str, tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.0123abcd.removing").mkdir()
    with watched(busy(lambda path: path.name[0] == ".", ("remove",))):
        with _told() as said:
            save(tmp_path, tree_of(1), step=1, asynchronous=True)
            going = background._background.going
            assert going is not None
            going.join()
        assert said == []
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: save(tmp_path, tree_of(2), step=2),
        "load": lambda: load(tmp_path, tree_of(0)),
        "wait": wait,
    }
    with _told() as said:
        calls[how]()
        wait()
    assert len(said) == 1
    assert said[0].startswith(UNREMOVED)


def test_a_warning_made_an_error_comes_after_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.0123abcd.removing").mkdir()
    with warnings.catch_warnings(), watched(busy(lambda path: path.name[0] == ".", ("remove",))):
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="checkpoint is there"):
            save(tmp_path, tree_of(1), step=1)
        save(tmp_path, tree_of(2), step=2, asynchronous=True)
        with pytest.raises(UserWarning, match="checkpoint is there"):
            wait()
    assert [_value(folder) for folder in steps(tmp_path)] == [1, 2]


# ---- several ranks
def _on_ranks(run: Path, call: str, asynchronous: bool) -> tuple[list[str], list[str], list[str]]:
    """Three saves, the last two while rank 0 fails in one call: warnings, errors, what is there."""
    texts, errors, leads = [], [], os.environ["RANK"] == "0"
    left = run / ".step-00000009.0123abcd.removing"
    for step in (1, 2, 3):
        tree = fzero.shard({"w": torch.full((4,), float(step))}, fzero.Config(stage=3))
        with _told() as said, contextlib.ExitStack() as stack:
            if leads and step > 1:
                if call == "remove":
                    left.mkdir(exist_ok=True)
                stack.enter_context(watched(busy(lambda path: path in (run, left), (call,))))
            try:
                save(run, tree, step=step, keep=1, asynchronous=asynchronous, timeout=20.0)
                wait()
            except fzero.CheckpointError as error:
                errors.append(str(error))
        texts += said
    assert load(run, tree)[0]["w"].full_tensor().sum() == 12
    return texts, errors, names_in(run)


@pytest.mark.parametrize("call", ["remove", "sync_folder"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_rank_is_told_and_goes_on(asynchronous: bool, call: str, tmp_path: Path) -> None:
    one, other = run_ranks(2, _on_ranks, tmp_path, call, asynchronous)
    assert one == other
    said, errors, names = one
    if call == "remove":
        assert len(said) == 2
        assert all(".removing (Device or resource busy)" in text for text in said)
        assert errors == []
        assert names == [".step-00000009.0123abcd.removing", "step-00000003"]
    else:
        assert said == []
        assert len(errors) == 2
        assert all("could not be synced" in text for text in errors)
        assert names == [f"step-0000000{step}" for step in (1, 2, 3)]
