"""Imports point down: the layers of docs/design.md, enforced."""

import ast
from pathlib import Path

import pytest

import fzero

LAYERS = {
    "errors": 0,
    "patch": 0,
    "protocols": 0,
    "tree": 0,
    "agree": 1,
    "callbacks": 1,
    "collectives": 1,
    "dtensor": 1,
    "frames": 1,
    "layout": 1,
    "keepalive": 1,
    "mesh": 1,
    "presence": 1,
    "owners": 1,
    "plain": 1,
    "remat": 1,
    "whereabouts": 1,
    "works": 1,
    "takeover": 1,
    "tasks": 1,
    "transforms": 1,
    "config": 2,
    "config_deepspeed": 2,
    "functional": 2,
    "loss_scale": 2,
    "model_state": 2,
    "noise": 2,
    "optim": 2,
    "placement": 2,
    "precision": 2,
    "rounding": 2,
    "masters": 2,
    "sharding": 2,
    "state": 2,
    "update": 3,
    "zero": 3,
    "draws": 1,
    "outside": 1,
    "program": 4,
    "batched": 5,
    "deferred": 5,
    "eager": 5,
    "gradients": 5,
    "lazy": 5,
    "notes": 5,
    "plan": 5,
    "recording": 5,
    "simulate": 5,
    "stage": 5,
    "staged": 5,
    "start": 5,
    "step": 5,
    "checkpoint": 6,
    "engine": 6,
    "interop": 6,
}
# A pass never knows about optimizers: the Program sees less than its height would allow.
SEES_UP_TO = {"program": 1}

PACKAGE = Path(fzero.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def imports(source: str, package: list[str]) -> list[tuple[int, list[str]]]:
    """The line and dotted name of everything that `source`, a module of `package`, imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            found += [(node.lineno, [*base, alias.name]) for alias in node.names]
    return found


def violations(module: str, source: str) -> list[str]:
    """What `source` may not import as `module`, a path below fzero/: one message each."""
    parts = module.removesuffix(".py").split("/")
    if parts == ["__init__"]:
        return []
    own = parts[0]
    if own not in LAYERS:
        return [f"fzero/{module} is in no layer: add {own!r} to LAYERS in tests/test_imports.py"]
    limit = SEES_UP_TO.get(own, LAYERS[own])
    messages = []
    for line, name in imports(source, ["fzero", *parts[:-1]]):
        if name[0] != "fzero" or name[1:2] == [own]:
            continue
        where = f"fzero/{module}:{line} imports {'.'.join(name)}"
        if len(name) == 1 or name[1] not in LAYERS:
            messages.append(f"{where}, which is in no layer: name a module that LAYERS has")
        elif LAYERS[name[1]] > limit:
            messages.append(
                f"{where} of layer {LAYERS[name[1]]}, but {own} (layer {LAYERS[own]}) may see only "
                f"layers 0 to {limit}: move what is shared down, or pass it in"
            )
    return messages


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    found = violations(module, (PACKAGE / module).read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("layout.py", "from fzero.step.train_step import TrainStep"),
        ("layout.py", "import fzero.zero"),
        ("layout.py", "from fzero import Config"),
        ("layout.py", "import fzero"),
        ("layout.py", "def later():\n    from .zero import zero3"),
        ("program/passes/bucket.py", "from fzero.optim import adamw"),
        ("program/passes/bucket.py", "from ...optim import adamw"),
        ("optim/adam.py", "from .. import zero"),
        ("unheard_of.py", ""),
    ],
)
def test_wrong_imports_are_found(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("__init__.py", "from fzero.step.train_step import TrainStep"),
        (
            "layout.py",
            "import torch\nfrom fzero import mesh, tree\nfrom fzero.errors import ShardError",
        ),
        (
            "program/passes/bucket.py",
            "from ..ir import Program\nfrom fzero.distributed.collectives import gather",
        ),
        ("optim/adam.py", "from fzero.optim.chain import chain\nfrom . import chain"),
        ("engine/phases.py", "from fzero import simulate"),
    ],
)
def test_right_imports_pass(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_every_module_was_seen() -> None:
    assert {"__init__.py", "errors.py", "tree.py"} <= set(MODULES)
