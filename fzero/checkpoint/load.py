"""`load`: from any world size, stage and mesh into the tensors that are there."""

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata, StorageReader

from fzero.checkpoint import background, folders, manifest
from fzero.checkpoint.crew import crew_of, together
from fzero.checkpoint.flat import Flat, Scalar, flatten
from fzero.checkpoint.manifest import Manifest
from fzero.checkpoint.progress import Progress, progress
from fzero.checkpoint.report import compare, refuse
from fzero.checkpoint.storage import Reader
from fzero.dtensor import local_tensor
from fzero.errors import CheckpointError
from fzero.tree import PyTree

_UNREAD = (
    "the checkpoint was not loaded, and params and opt_state may hold parts of it by now",
    "Load another checkpoint, or build params and opt_state anew.",
)


class Source(NamedTuple):
    """Something that can be loaded.

    Args:
        where: it is, for messages.
        reader: reads it.
        metadata: what it holds, under the keys of a checkpoint of fzero.
        scalars: plain values by key.
        identity: the same on all ranks if they see the same checkpoint.
    """

    where: str
    reader: StorageReader
    metadata: Metadata
    scalars: dict[str, Scalar]
    identity: str


def load(
    path: str | os.PathLike[str],
    params_like: PyTree,
    opt_state_like: PyTree = None,
    *,
    strict: bool = True,
    cast: bool = False,
    timeout: float = 600.0,
) -> tuple[PyTree, PyTree]:
    """Fill trees from a checkpoint that any world size, stage and mesh wrote; all ranks call it.

    The values are read into the very tensors of the trees: nothing but a few MiB is allocated, and
    no rank holds more of a leaf than it has room for. Don't read the old names again, as after a
    step with `Config(donate=True)`; after an error don't use their values either.

    Args:
        path: the folder that `save` was given (the newest whole checkpoint in it is taken), or one
            checkpoint in it.
        params_like: params as `TrainStep.init` gives them, or None.
        opt_state_like: the state likewise, or None to leave it aside.
        strict: False: leaves that are missing, extra or of another shape keep their values, and a
            warning lists them.
        cast: convert leaves whose dtype differs; without it that is an error. Parameters that are
            rounded copies of masters need no cast: it is the masters that are stored.
        timeout: seconds that ranks wait for each other.

    Returns:
        `(params, opt_state)`.

    Raises:
        CheckpointError: on every rank: there is no whole checkpoint, it does not fit (every leaf
            that differs is named), or a block of it is damaged (file and leaf are named).

    Examples:
        >>> import tempfile, fzero
        >>> run = tempfile.mkdtemp()
        >>> _ = fzero.checkpoint.save(run, {"w": torch.ones(2)}, {"lr": 0.5})
        >>> load(run, {"w": torch.zeros(2)}, {"lr": 0.0})
        ({'w': tensor([1., 1.])}, {'lr': 0.5})
    """
    background.wait()
    flat = flatten(params_like, opt_state_like)
    crew = crew_of(flat.tensors.values(), timeout)
    found = together(
        crew, "which checkpoint", lambda: str(_choose(Path(path))) if crew.leads else None, _UNREAD
    )[0]
    shown = progress(f"loading {found}", _nbytes(flat), shown=crew.leads)
    opened: list[Source] = []

    def open_() -> str:
        opened.append(_open(Path(found), shown))
        return opened[0].identity

    identities = together(crew, "what they read", open_, _UNREAD)
    if len(set(identities)) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints at {found}. All ranks must reach the same folder."
        )
    source = opened[0]
    report = compare(flat, source.metadata, source.scalars)
    refuse(report, source.where, strict=strict, cast=cast)
    if report and crew.leads:
        warnings.warn(f"{source.where} does not fit in all: {report}.", stacklevel=2)
    skip = {*report.missing, *report.misshapen}
    together(crew, "whether they have read it", lambda: _fill(flat, source, skip), _UNREAD)
    shown.close()
    return flat.rebuild({k: v for k, v in source.scalars.items() if k not in skip})


def _choose(path: Path) -> Path:
    if (path / manifest.NAME).exists():
        return path.absolute()
    newest = folders.latest(path)
    if newest is None:
        raise CheckpointError(
            f"{path} is no checkpoint and holds none that is whole. Pass the folder that save was "
            "given, or one checkpoint in it; python -m fzero.checkpoint verify says what is there."
        )
    return newest.absolute()


def _open(path: Path, told: Progress) -> Source:
    reader = Reader(path, told)
    found: Manifest = reader.manifest
    return Source(str(path), reader, found.metadata(), found.scalars, found.dumps()[:60])


@torch.no_grad()
def _fill(flat: Flat, source: Source, skip: set[str]) -> None:
    """Read into masters and whatever has none, then into the rounded copies of masters."""
    for tensors in (flat.tensors, flat.rounded):
        wanted: dict[str, Any] = {key: x for key, x in tensors.items() if key not in skip}
        if not wanted:
            continue
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(wanted, source.metadata, is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        source.reader.read_data(plan, planner).wait()


def _nbytes(flat: Flat) -> int:
    return sum(local_tensor(x).nbytes for x in (*flat.tensors.values(), *flat.rounded.values()))
