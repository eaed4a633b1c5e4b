"""What the README and the documentation show runs as it stands."""

import os
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


@pytest.mark.parametrize(
    ("page", "ranks"),
    [
        *((page, 1) for page in PAGES if blocks(page, "python")),
        ("README.md", 2),
        ("docs/engine.md", 2),
    ],
)
def test_python_blocks_run(page: str, ranks: int, tmp_path: Path) -> None:
    # As a reader would: one page, one script, alone and under torchrun.
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
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
