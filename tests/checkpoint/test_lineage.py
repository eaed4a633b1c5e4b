"""Going back: what was written last is `latest`, and `keep` lets nothing go that is stood on."""

import itertools
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fzero.checkpoint import background, latest, load, save, wait
from fzero.checkpoint.format.folders import steps
from fzero.checkpoint.format.manifest import _digest, read
from fzero.checkpoint.format.verify import problems
from fzero.checkpoint.lineage import Heads


def _tree(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), float(value))}


def _names(run: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in steps(run)]


def _new_process() -> None:
    background.heads = Heads()


class Run:
    """A run's folder, and what it should hold: `(step, value)` in the order of writing, by hand.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.resumed = path, None, None
        self.value = itertools.count(1)
        self.parent: dict[int, int | None] = {}  # of each value
        self.there: dict[int, int] = {}  # value by step
        _new_process()

    def save(self, steps_on: int, keep: int | None) -> None:
        """Train on and save; a step that is there is another one's, and is left out."""
        step = (0 if self.at is None else self._step(self.at)) + steps_on
        while step in self.there:
            step += 1
        value = next(self.value)
        where = save(self.path, _tree(value), {"lr": 0.1}, step=step, keep=keep)
        self.parent[value], self.there[step], self.at = self.at, value, value
        assert problems(where) == []
        if keep is not None:
            apart = {v for v in self.there.values() if self._root(v) != self._root(value)}
            wanted = [v for v in self._wanted() if v not in apart]
            stay = {*wanted[:keep], value, self.resumed, *apart}
            self.there = {s: v for s, v in self.there.items() if v in stay}
        self.check()

    def load(self, which: int) -> None:
        """Go back to one of those that are there."""
        step = sorted(self.there)[which % len(self.there)]
        (params, _) = load(self.path / f"step-{step:08d}", _tree(0), {"lr": 0.0})
        assert params["w"][0] == self.there[step]
        self.at = self.resumed = self.there[step]

    def restart(self, resumes: bool) -> None:
        """Another process, from the newest or anew."""
        _new_process()
        self.at = self.resumed = None
        if resumes:
            load(self.path, _tree(0), {"lr": 0.0})
            self.at = self.resumed = max(self.there.values())

    def check(self) -> None:
        """The folder holds what it should, and the newest is the one that was written last."""
        assert _names(self.path) == sorted(self.there)
        newest = latest(self.path)
        assert newest is not None
        assert load(newest, _tree(0))[0]["w"][0] == max(self.there.values())
        self._forget_read(newest)

    def _forget_read(self, folder: Path) -> None:
        """A look at a checkpoint is no resumption here."""
        run = str(folder.parent.resolve())
        background.heads._resumed.pop(run, None)
        if self.resumed is not None:
            background.heads._resumed[run] = self._step(self.resumed)

    def _step(self, value: int) -> int:
        return next(s for s, v in self.there.items() if v == value)

    def _root(self, value: int) -> int:
        """The first save of its run, whether or not it is there."""
        while (parent := self.parent[value]) is not None:
            value = parent
        return value

    def _wanted(self) -> list[int]:
        """The newest, what it came from, then the others from the newest on."""
        line: list[int] = []
        at: int | None = max(self.there.values())
        while at is not None:
            line.append(at)
            at = self.parent[at]
        there = sorted(self.there.values(), reverse=True)
        return [v for v in line if v in there] + [v for v in there if v not in line]


moves = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 30), st.none() | st.integers(1, 4)),
    st.tuples(st.just("load"), st.integers(0, 9)),
    st.tuples(st.just("restart"), st.booleans()),
)


@settings(max_examples=60)
@given(script=st.lists(moves, min_size=3, max_size=14))
def test_any_history_keeps_what_it_stands_on(script: list[tuple[Any, ...]]) -> None:
    path = Path(tempfile.mkdtemp())
    try:
        run = Run(path)
        for what, *args in [("save", 10, None), *script]:
            getattr(run, what)(*args)
    finally:
        shutil.rmtree(path)
        _new_process()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_forgot_to_load_takes_nothing_away(asynchronous: bool, tmp_path: Path) -> None:
    for step in (30, 40, 50):
        save(tmp_path, _tree(step), {"lr": 0.1}, step=step, keep=3)
    _new_process()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (4, 8, 12):
            tree = _tree(step), {"lr": 0.1}
            save(tmp_path, *tree, step=step, keep=2, asynchronous=asynchronous)
        wait()
    (one,) = told
    assert "of another run" in str(one.message)
    assert "step-00000030, step-00000040, step-00000050. keep=2 leaves" in str(one.message)
    assert _names(tmp_path) == [8, 12, 30, 40, 50]
    load(tmp_path / "step-00000050", _tree(0), {"lr": 0.0})  # back to the old one
    save(tmp_path, _tree(60), {"lr": 0.1}, step=60, keep=2)
    assert _names(tmp_path) == [8, 12, 50, 60]


def test_the_one_resumed_from_stays_for_as_long_as_the_run_goes_on(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, _tree(step), {"lr": 0.1}, step=step)
    load(tmp_path / "step-00000010", _tree(0), {"lr": 0.0})
    for step in (35, 40, 45):
        save(tmp_path, _tree(step), {"lr": 0.1}, step=step, keep=1)
        assert _names(tmp_path) == [10, step]


def test_a_damaged_newest_leads_to_its_parent_and_not_to_the_branch_that_was_left(
    tmp_path: Path,
) -> None:
    for step in (10, 20, 30):
        save(tmp_path, _tree(step), {"lr": 0.1}, step=step)
    load(tmp_path / "step-00000010", _tree(0), {"lr": 0.0})
    folder = save(tmp_path, _tree(15), {"lr": 0.1}, step=15)
    (folder / "rank-00000.safetensors").unlink()
    with pytest.warns(UserWarning, match="step-00000015 is passed over"):
        assert latest(tmp_path) == tmp_path / "step-00000010"


def test_parameters_of_another_step_that_are_looked_at_change_no_line(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, _tree(step), {"lr": 0.1}, step=step)
    load(tmp_path / "step-00000010", _tree(0))  # an average, a teacher
    save(tmp_path, _tree(30), {"lr": 0.1}, step=30)
    assert read(tmp_path / "step-00000030").lineage.line == ((20, 2), (10, 1))


def test_checkpoints_of_an_earlier_release_go_by_their_step(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        folder = save(tmp_path, _tree(step), {"lr": 0.1}, step=step)
        found = json.loads((folder / "manifest.json").read_text())
        del found["manifest"]["lineage"]
        found["checksum"] = _digest(found["manifest"])
        (folder / "manifest.json").write_text(json.dumps(found))
    _new_process()
    assert latest(tmp_path) == tmp_path / "step-00000030"
    load(tmp_path / "step-00000020", _tree(0), {"lr": 0.0})
    save(tmp_path, _tree(25), {"lr": 0.1}, step=25, keep=2)
    assert latest(tmp_path) == tmp_path / "step-00000025"
    assert _names(tmp_path) == [20, 25]
