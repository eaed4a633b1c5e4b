"""What the README and the documentation show runs as it stands, and what they name is there."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fzero

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
        # tutorials run on two ranks: tests/docs/test_tutorials.py
        *((page, 1) for page in PAGES if blocks(page, "python") and "/tutorials/" not in page),
        ("README.md", 2),
        *(
            pytest.param(f"docs/{page}.md", 2, marks=pytest.mark.slow)
            for page in ("checkpoints", "engine", "explain", "functions")
        ),
    ],
)
@pytest.mark.quick("README.md-1", "README.md-2")
def test_python_blocks_run(page: str, ranks: int, tmp_path: Path) -> None:
    # As a reader would: one page, one script, alone and under torchrun.
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_table_of_config_has_every_field_and_its_default() -> None:
    table = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", (ROOT / "docs/config.md").read_text(), re.M)
    fields = {field.name: field.default for field in dataclasses.fields(fzero.Config)}
    assert {name: ast.literal_eval(default) for name, default in table} == fields
    assert len(table) == len(fields)


def test_readme_commands_do_their_own_set_up() -> None:
    train, test = blocks("README.md", "sh")
    for command in (train, test):
        assert command.startswith(
            "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt"
        )
    assert "torchrun --nproc_per_node 2 examples/train_lm.py" in train
    assert test.rstrip().endswith("python -m pytest -n 2 --dist loadfile")


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text())
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert not missing


TEXTS = [
    *(ROOT / page for page in (*PAGES, "CONTRIBUTING.md", "benchmarks/README.md", ".ci/versions")),
    *sorted((ROOT / "fzero").rglob("*.py")),
]
# of whoever reads, and of DeepSpeed
OTHERS = (
    "script.py",
    "train.py",
    "page.py",
    "ds_to_universal.py",
    "deepspeed/",
    "universal_checkpoint.py",
)


def test_files_that_are_named_are_there() -> None:
    for text in TEXTS:
        ours, _, _ = text.read_text().partition("## DeepSpeed's own tests")
        for name in re.findall(r"[\w/]*\w\.py\b", ours):
            near = (ROOT, ROOT / "fzero", text.parent, ROOT / "tests/program")
            there = any((folder / name).exists() for folder in near)
            assert there or name.startswith(OTHERS), f"{text.relative_to(ROOT)} names {name}"


def test_folders_of_the_glossary_are_there() -> None:
    glossary = (ROOT / "docs/design.md").read_text().partition("## Glossary")[2]
    table = glossary.partition("\n## ")[0]
    rows = re.findall(r"^\| (?!term|-)(.*) \| (.*) \| (.*) \|$", table, re.M)
    terms = [term for cell, *_ in rows for term in cell.split(", ")]
    assert len(terms) > 40
    assert len(terms) == len(set(terms))
    for cell, _, where in rows:
        places = re.findall(r"`([\w/.]+)`", where)
        assert places, cell
        assert all((ROOT / "fzero" / place).exists() for place in places), cell


def test_notes_that_are_cited_are_written_somewhere() -> None:
    written, cited = set(), set()
    for path in (ROOT / "fzero").rglob("*.py"):
        for before, note in re.findall(r"(.{0,4})\[Note: ([^]]*)\]", path.read_text()):
            (cited if before.endswith(("ee ", "(")) else written).add(" ".join(note.split()))
    assert written
    assert cited <= written


def test_the_changelog_says_nothing_twice() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        for part in re.split(r"^### ", section, flags=re.M)[1:]:
            headings = re.findall(r"^#### (.*)", part, re.M)
            assert len(headings) == len(set(headings))
            # a heading stands on lines of its own and has something under it
            assert not re.search(r"[^\n]\n#### |^#### .*\n+(#|\Z)", part, re.M), part
        points = [point[:60] for point in re.findall(r"^- (.*)", section, re.M)]
        assert len(points) == len(set(points))
