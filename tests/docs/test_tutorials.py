"""Every tutorial is a script: its blocks run as a reader starts them, under torchrun."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.ranks import run_fresh

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(path.stem for path in (ROOT / "docs/tutorials").glob("*.md"))
ALONE = ("faq", "memory")  # other ranks would only do the same
SLOW = ("hugging_face",)  # docs/transformers.md is always run


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a tutorial that are in this language."""
    text = (ROOT / f"docs/tutorials/{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def _run(script: str) -> str:
    """What a script prints on this rank."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(script)
    sys.stdout.flush()
    return said.getvalue()


def run_page(page: str, folder: Path) -> str:
    """What a tutorial prints on the first of its ranks."""
    script = folder / f"{page}.py"
    script.write_text("\n".join(blocks(page, "python")))
    return run_fresh(1 if page in ALONE else 2, _run, str(script), timeout=240)[0]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
        for page in TUTORIALS
        if page not in ("index", "debug")
    ],
)
@pytest.mark.quick("train", "faq")
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def test_the_messages_on_the_page_about_errors_are_what_it_prints(tmp_path: Path) -> None:
    said = " ".join(run_page("debug", tmp_path).split())
    shown = blocks("debug", "output")
    assert len(shown) > 5
    for block in shown:
        for message in block.split("\n\n"):
            parts = " ".join(message.split()).split("...")
            pattern = ".*?".join(re.escape(part.strip()) for part in parts)
            assert re.search(pattern, said), f"docs/tutorials/debug.md shows\n{message}\nof\n{said}"


def test_zero_from_scratch_is_as_short_as_it_says() -> None:
    script = "\n".join(blocks("from_scratch", "python"))
    by_hand = script[: script.index("import fzero")]
    assert len([line for line in by_hand.splitlines() if line.strip()]) <= 100
