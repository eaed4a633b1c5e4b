"""The built documentation: no warnings, a place for each public name, links that lead somewhere."""

import ast
import os
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = runpy.run_path(str(ROOT / "docs/links.py"))
DRAW = runpy.run_path(str(ROOT / "docs/draw.py"))
# packages whose `__all__` is public, below fzero
PUBLIC = (
    *("", "optim", "checkpoint", "passes", "program", "simulation"),
    *("integrations.transformers", "compat.deepspeed", "compat.deepspeed.utils"),
)
# other names of what has its place elsewhere
ELSEWHERE = {"program.Hardware", "program.Program", "simulation.Report", "simulation.simulate"}
ELSEWHERE |= {"compat.deepspeed.utils.log_dist", "compat.deepspeed.utils.logger"}
# modules that are public themselves
MODULES = {
    f"compat.deepspeed.{name}"
    for name in (
        "accelerator",
        "checkpoint",
        "checkpointing",
        "comm",
        "ops",
        "runtime",
        "utils.zero_to_fp32",
        "zero",
    )
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as CI builds it: a warning is an error, and is seen."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def public(package: str) -> list[str]:
    """The names of a package's `__all__`, without importing it."""
    path = ROOT.joinpath("fzero", *filter(None, package.split(".")))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"fzero.{package} has no __all__")


def test_every_public_name_has_a_place(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes()
    body = zlib.decompress(inventory.split(b"\n", 4)[4]).decode()
    placed = dict(line.split(" ")[:2] for line in body.splitlines())
    missing = []
    for package in PUBLIC:
        for name in public(package):
            dotted = f"{package}.{name}" if package else name
            if dotted in PUBLIC or dotted in ELSEWHERE:
                continue
            # a function that has its module's name, `fzero.optim.adam`, is not that module
            kind = placed.get(f"fzero.{dotted}")
            if kind is None or (kind == "py:module") != (dotted in MODULES):
                missing.append(f"fzero.{dotted}: {kind}")
    assert not missing, "say `::: NAME` on a page of docs/api"


def test_links_within_the_site_lead_to_a_page_and_an_anchor(site: Path) -> None:
    assert LINKS["broken"](site) == []


def test_links_leave_for_known_hosts_only(site: Path) -> None:
    hosts = {link.split("/")[2] for link in LINKS["leaving"](site)}
    assert hosts <= {
        *("arxiv.org", "kellerjordan.github.io", "optax.readthedocs.io", "ui.perfetto.dev"),
        *("squidfunk.github.io", "github.com"),
    }


def test_pictures_say_what_they_show(site: Path) -> None:
    pages = LINKS["pages"](site)
    images = [(name, image) for name, page in pages.items() for image in page.images]
    assert len(images) > 10
    assert [name for name, image in images if len(image.get("alt") or "") < 15] == []


@pytest.mark.parametrize("name", DRAW["PICTURES"])
def test_diagrams_are_what_the_script_draws_and_fit_a_phone(name: str) -> None:
    drawn = (ROOT / f"docs/pictures/{name}.svg").read_text()
    assert drawn == DRAW["PICTURES"][name](), "run docs/draw.py"
    root = ElementTree.fromstring(drawn)
    assert root.attrib["viewBox"].split()[2] == "360"
    assert "prefers-color-scheme:dark" in drawn
    assert min(map(int, re.findall(r"font(?:-size)?:(\d+)px", drawn))) >= 12
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        wide = 0.62 * 13 * len("".join(node.itertext()))  # an upper bound of a letter's width
        x, anchor = float(node.attrib["x"]), node.attrib["text-anchor"]
        end = x + {"start": wide, "middle": wide / 2, "end": 0}[anchor]
        assert end <= 360, "".join(node.itertext())


def test_every_example_is_in_the_gallery() -> None:
    text = (ROOT / "docs/gallery.md").read_text()
    examples = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert [name for name in examples if name not in text] == []


def test_every_picture_is_shown_somewhere() -> None:
    texts = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    pictures = [path.name for path in (ROOT / "docs/pictures").iterdir()]
    assert [name for name in pictures if f"pictures/{name}" not in texts] == []
