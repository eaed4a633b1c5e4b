"""What the README and the documentation show runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page that are in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_blocks_run(page: str) -> None:
    # In a process of its own, as a reader would: one page, one script.
    script = "\n".join(blocks(page, "python"))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_readme_commands_do_their_own_set_up() -> None:
    train, test = blocks("README.md", "sh")
    for command in (train, test):
        assert command.startswith(
            "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt"
        )
    assert "torchrun --nproc_per_node 2 examples/train_lm.py" in train
    assert test.rstrip().endswith("pytest")


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text())
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert not missing
