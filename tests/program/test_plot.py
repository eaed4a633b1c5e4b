"""The picture of a step is written as what its name says, or says what to install."""

import sys
from pathlib import Path

import pytest

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


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fzero.FzeroError, match="pip install matplotlib"):
        lowered().plot(tmp_path / "step.png")
    assert not list(tmp_path.iterdir())
