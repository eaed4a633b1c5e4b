"""Imports point down: the packages of docs/design.md, enforced on every import there is."""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import fzero

# What each package or file of fzero/ may import: others above it, or single modules of theirs.
PACKAGES: dict[str, tuple[str, ...]] = {
    "errors": (),
    "tree": (),
    "inference": (),
    "operators": (),
    "layout": ("errors",),
    "numerics": ("errors", "tree", "operators", "layout"),
    "distributed": ("errors", "operators", "layout"),
    "optim": ("errors", "tree", "inference", "layout", "distributed"),
    "functional": ("errors", "tree", "numerics"),
    "config": ("errors", "numerics", "functional.remat"),
    "zero": ("layout", "distributed", "functional.differentiate"),
    "eager": (
        *("errors", "tree", "inference", "layout", "numerics", "distributed"),
        *("functional.differentiate", "functional.held", "functional.tasks"),
        "functional.uncompiled",
    ),
    "program": (
        *("errors", "operators", "layout", "numerics.fakes", "numerics.host", "numerics.rng"),
        "distributed",
        "functional.copies",
        *("functional.islands", "functional.library", "functional.memory", "functional.opaque"),
        "functional.patch",
        "functional.warned",
        *("functional.remat", "functional.remat_modules", "functional.torch_checkpoint"),
        "functional.transforms",
    ),
    "passes": ("layout", "distributed", "program"),
    "state": (
        *("errors", "tree", "inference", "layout", "numerics", "distributed", "optim"),
        *("functional.memory", "functional.owners", "functional.transforms"),
        *("functional.uncompiled", "functional.warned", "config"),
    ),
    "transforms": (
        *("errors", "tree", "inference", "layout", "numerics"),
        *("distributed", "optim", "functional"),
        *("config", "zero", "eager", "program", "state"),
    ),
    "step": (
        *(
            "errors",
            "tree",
            "inference",
            "operators",
            "layout",
            "numerics",
            "distributed",
            "optim",
            "functional",
        ),
        *("config", "zero", "eager", "program", "state", "transforms"),
    ),
    "simulation": (
        *("errors", "tree", "numerics.fakes", "distributed", "optim", "functional", "config"),
        "program",
        *("state.sharding", "transforms.frames", "transforms.function", "step"),
    ),
    "simulate": ("simulation",),
    "checkpoint": (
        *("errors", "tree", "numerics.host", "distributed", "optim.counts"),
        *("state.opt_state", "state.follow"),
    ),
    "engine": (
        *("errors", "tree", "inference", "layout", "numerics"),
        *("distributed", "optim", "functional"),
        *("config", "eager", "state", "step"),
    ),
    "env": ("errors", "functional"),
    "integrations": ("errors", "optim", "config", "checkpoint", "engine"),
    "compat": ("errors", "tree", "distributed.dtensor", "optim", "config", "checkpoint", "engine"),
}

PACKAGE = Path(fzero.__file__).parent
ROOT = PACKAGE.parent
PATHS = {
    ".".join(("fzero", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
SOURCES = {name.removesuffix(".__init__"): path.read_text() for name, path in PATHS.items()}
FACES = {name.removesuffix(".__init__") for name in PATHS if name.endswith(".__init__")}
USERS = [
    path
    for folder in ("fzero", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def imports(name: str, source: str, *, face: bool = False) -> list[tuple[int, str]]:
    """The line and dotted name of all that `source`, the module `name`, imports, wherever it does.

    Imports inside functions and under TYPE_CHECKING count, and modules that are named to
    `import_module`. `face`: the module is the `__init__` of a package.
    """
    package = name.split(".") if face else name.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                found.append((node.lineno, str(first.value)))
    return found


def violations(name: str, source: str, *, face: bool = False) -> list[str]:
    """What `source` may not import as the module `name`: one message each."""
    if name == "fzero":  # the public names, of all packages
        return []
    own = name.split(".")[1]
    if own not in PACKAGES:
        return [f"{name} is in no package: add {own!r} to PACKAGES in tests/test_imports.py"]
    messages = []
    for line, imported in imports(name, source, face=face):
        what = imported.split(".")
        if what[0] != "fzero" or what[1:2] == [own]:
            continue
        if len(what) == 1 or what[1] not in PACKAGES:
            messages.append(
                f"{name}:{line} imports {imported}, which no package has: name the module"
            )
        elif not {what[1], ".".join(what[1:3])} & set(PACKAGES[own]):
            messages.append(
                f"{name}:{line} imports {imported}, but {own} may see only "
                f"{', '.join(PACKAGES[own]) or 'itself'}: move what is shared down, or pass it in"
            )
    return messages


def graph(sources: Mapping[str, str], faces: Iterable[str] = ()) -> dict[str, set[str]]:
    """The modules of `sources` that each of them imports.

    That a module's import runs the `__init__` of its packages is left out: it is so for each.
    """
    arrows = {}
    for name, source in sources.items():
        found = set()
        for _, imported in imports(name, source, face=name in faces):
            while imported and imported not in sources:  # a name in a module
                imported = imported.rpartition(".")[0]
            found.add(imported)
        arrows[name] = found - {"", name, "fzero"}
    return arrows


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups that import each other, directly or through others; without one, nothing.

    Who imports nothing that is left stands in no circle, and goes; so does who is imported by
    nothing that is left. The rest is circles, and what lies between two of them.
    """
    left = {name: set(found) & set(arrows) for name, found in arrows.items()}
    while True:
        imported = set().union(*left.values())
        gone = {name for name, found in left.items() if not found or name not in imported}
        if not gone:
            break
        left = {name: found - gone for name, found in left.items() if name not in gone}
    groups: list[list[str]] = []
    for name in sorted(left):
        if not any(name in group for group in groups):
            there = _reached(name, left)
            group = sorted(other for other in there if name in _reached(other, left))
            groups += [group] if group else []
    return groups


def _reached(name: str, arrows: Mapping[str, Iterable[str]]) -> set[str]:
    found, todo = set(), [name]
    while todo:
        new = set(arrows[todo.pop()]) - found
        found |= new
        todo += new
    return found


def private_names(name: str, source: str, *, face: bool = False) -> list[str]:
    """The underscore names of other modules of fzero that `source` imports or reads."""
    found, modules = [], {}
    for line, imported in imports(name, source, face=face):
        if imported.startswith("fzero.") and re.search(r"\._(?!_)", imported):
            found.append(f"{name}:{line} imports {imported}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if base + alias.name in SOURCES:
                    modules[alias.asname or alias.name] = base + alias.name
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            module = modules.get(ast.unparse(node.value))
            if module is not None and module != name:
                found.append(f"{name}:{node.lineno} reads {module}.{node.attr}")
    return found


def printed(text: str) -> dict[str, tuple[str, ...]]:
    """The rows of the table of packages in `text`: what stands there, and what it imports."""
    table = text.partition("\n| package |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)` \| [^|]*\w[^|]* \|(.*)\|$", table, re.MULTILINE)
    return {name: tuple(re.findall(r"`([\w.]+)`", cell)) for name, cell in rows}


# ------------------------------------------------------------------------------------ the rules
@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_down(name: str) -> None:
    found = violations(name, SOURCES[name], face=name in FACES)
    assert not found, "\n".join(found)


def test_a_package_sees_only_those_above_it_in_the_table() -> None:
    above: set[str] = set()
    for package, sees in PACKAGES.items():
        assert {one.split(".")[0] for one in sees} <= above, package
        above.add(package)


def test_packages_import_each_other_in_no_circle() -> None:
    arrows: dict[str, set[str]] = {}
    for name, imported in graph(SOURCES, FACES).items():
        if name != "fzero":
            own = name.split(".")[1]
            arrows.setdefault(own, set()).update({x.split(".")[1] for x in imported} - {own})
    assert circles(arrows) == []


def test_modules_import_each_other_in_no_circle() -> None:
    assert circles(graph(SOURCES, FACES)) == []


def test_no_arrow_of_the_table_is_idle() -> None:
    """What a package may see and does not is taken out: the table says what is so."""
    arrows = graph(SOURCES, FACES)
    for package, sees in PACKAGES.items():
        seen = {
            name
            for module, imported in arrows.items()
            if module.split(".")[1:2] == [package]
            for x in imported
            for name in (x.split(".")[1], ".".join(x.split(".")[1:3]))
        }
        assert set(sees) <= seen, f"{package} does not import {sorted(set(sees) - seen)}"


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_underscore_names_stay_in_their_module(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    face = name.endswith(".__init__")
    assert private_names(name.removesuffix(".__init__"), path.read_text(), face=face) == []


def test_design_prints_the_table() -> None:
    assert list(printed((ROOT / "docs/design.md").read_text()).items()) == list(PACKAGES.items())


def test_every_room_has_a_row() -> None:
    rooms = {name.split(".")[1] for name in SOURCES if name != "fzero"}
    assert rooms == set(PACKAGES)


# ----------------------------------------------------------------------------- of the rules' own
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("fzero.layout", "from fzero.step.train_step import TrainStep"),
        ("fzero.layout", "import fzero.zero"),
        ("fzero.layout", "from fzero import Config"),
        ("fzero.layout", "import fzero"),
        ("fzero.layout", "def later():\n    from .zero import zero3"),
        ("fzero.layout", "if TYPE_CHECKING:\n    from fzero.state.plan import Plan"),
        ("fzero.layout", "import importlib\nimportlib.import_module('fzero.zero')"),
        ("fzero.program.passes.bucket", "from fzero.optim import adamw"),
        ("fzero.program.passes.bucket", "from ...optim import adamw"),
        ("fzero.program.passes.bucket", "from fzero.functional.functionalize import functionalize"),
        ("fzero.program.passes.bucket", "from fzero import functional"),
        ("fzero.optim.adam", "from .. import zero"),
        ("fzero.unheard_of", ""),
    ],
)
def test_wrong_imports_are_found(name: str, source: str) -> None:
    assert violations(name, source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("fzero", "from fzero.step.train_step import TrainStep"),
        ("fzero.numerics.casts", "import torch\nfrom fzero import tree\nimport fzero.layout"),
        (
            "fzero.program.passes.bucket",
            "from ..graph import uses\nfrom fzero.distributed.collectives import gather\n"
            "from fzero.functional.remat import regions_of",
        ),
        ("fzero.optim.adam", "from fzero.optim.compose import chain\nfrom . import compose"),
        ("fzero.optim.adam", "from fzero.distributed.dtensor import local_of"),
    ],
)
def test_right_imports_pass(name: str, source: str) -> None:
    assert violations(name, source) == []


def test_the_face_of_a_package_counts_dots_from_itself() -> None:
    assert imports("fzero.optim", "from .adam import adam", face=True) == [
        (1, "fzero.optim.adam.adam")
    ]
    assert imports("fzero.optim.sgd", "from .adam import adam") == [(1, "fzero.optim.adam.adam")]


def test_circles_are_found() -> None:
    sources = {
        "fzero.a": "from fzero.b import x",
        "fzero.b": "def later():\n    from fzero.c import y",
        "fzero.c": "if TYPE_CHECKING:\n    from fzero import a",
        "fzero.d": "from fzero.a import z\nfrom fzero.e import w",
        "fzero.e": "import torch",
    }
    assert circles(graph(sources)) == [["fzero.a", "fzero.b", "fzero.c"]]
    assert circles(graph(sources | {"fzero.c": ""})) == []
    assert circles({"a": "b", "b": "ac", "c": "d", "d": "e", "e": "d"}) == [["a", "b"], ["d", "e"]]


def test_private_names_are_found() -> None:
    for source in (
        "from fzero.layout import _bounds",
        "from fzero import layout\nlayout._bounds()",
        "import fzero.layout\nfzero.layout._bounds()",
        "from fzero import layout as plans\nplans._bounds()",
    ):
        assert private_names("fzero.zero", source), source
    for source in (
        "from torch.utils import _pytree",
        "from fzero import layout\nlayout.plan_layout()\nself._bounds()",
        "from fzero.layout import __doc__",
    ):
        assert private_names("fzero.zero", source) == [], source


def test_every_module_was_seen() -> None:
    assert {"fzero", "fzero.errors", "fzero.step.train_step", "fzero.program.passes"} <= set(
        SOURCES
    )
