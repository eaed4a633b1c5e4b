"""The picture of a step is written as what its name says, or says what to install."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fzero
from tests.program.test_perfetto import lowered


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_written(ending: str, start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"step.{ending}"
    loaded = "matplotlib.pyplot" in sys.modules
    lowered().plot(path)
    assert path.read_bytes().startswith(start)
    assert ("matplotlib.pyplot" in sys.modules) == loaded  # nothing global is touched
    if ending == "svg":
        text = path.read_text()
        assert text.count("<path") > 20
        assert text.count("<!-- reduce_scatter -->") == 2  # in the legend, and the name of a lane


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_one_rank_which_sends_nothing_is_drawn(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    opt, cfg = fzero.optim.adam(0.1), fzero.Config(stage=stage)
    step_fn = fzero.make_train_step(lambda p, x: (x @ p["w"]).mean(), opt, cfg)
    program = step_fn.lower(*step_fn.init({"w": torch.ones(4, 4)}), torch.ones(2, 4))
    program.plot(tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert "<!-- computes -->" in text
    assert "<!-- communicates -->" not in text


@pytest.mark.parametrize(
    "fn",
    [lambda w: w, lambda w: None, lambda w: torch.zeros(3), lambda w: w[:0] * 2],
    ids=["as it is", "nothing", "a constant", "no bytes"],
)
def test_a_function_that_does_next_to_nothing_is_drawn(
    fn: Callable[[Tensor], Tensor | None], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    program = fzero.jit(fn).lower(torch.ones(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fzero.FzeroError, match="pip install matplotlib"):
        lowered().plot(tmp_path / "step.png")
    assert not list(tmp_path.iterdir())


def test_a_picture_has_an_ending(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lowered().plot(tmp_path / "step")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(fzero.ConfigError, match=r"step\.doc: a picture ends with .*\.png"):
        lowered().plot(tmp_path / "step.doc")
