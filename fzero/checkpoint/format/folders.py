"""The folder of a run's checkpoints: `step-00000042/` each, whole or not there.

step-00000042/                manifest.json, rank-00000.safetensors, ...
.step-00000043.saving/        being written; what a killed save leaves, removed by the next one
.step-00000041.removing/      on its way out
"""

import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path

from fzero.checkpoint.format import disk, manifest
from fzero.checkpoint.format.manifest import Manifest
from fzero.checkpoint.format.reader import open_checked
from fzero.checkpoint.lineage import Entry, Lineage, peek, ranked
from fzero.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.step-\d{8,}\.(saving|removing)")


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint below `path` that is whole, or None.

    The newest is the one that was written last, whatever its step: a run that went back to step 10
    and has saved step 15 goes on from there. Where it is not whole, the one that it came from is
    next; then the others, by when they were written.

    Whole means that the manifest can be read and every file has the size that it says; checksums
    are for `load` and for `python -m fzero.checkpoint verify`. What isn't whole is passed over with
    a warning.

    Args:
        path: the folder that `save` was given.

    Examples:
        >>> import tempfile, torch, fzero
        >>> run = tempfile.mkdtemp()
        >>> latest(run) is None
        True
        >>> _ = fzero.checkpoint.save(run, {"w": torch.ones(2)}, step=3)
        >>> latest(run).name
        'step-00000003'
    """
    for folder, _, _ in ranked(entries(Path(path))):
        try:
            whole(folder)
        except CheckpointError as error:
            warnings.warn(f"{folder} is passed over: {error}", stacklevel=2)
        else:
            return folder
    return None


def steps(path: Path) -> list[Path]:
    """The checkpoints below `path` by step, whole or not."""
    if not path.is_dir():
        return []
    found = [(match, entry) for entry in path.iterdir() if (match := _STEP.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found, key=lambda row: int(row[0][1]))]


def entries(path: Path) -> list[Entry]:
    """The checkpoints below `path` by step, whole or not, each with its lineage.

    One whose manifest cannot be read counts as written right after the ones of lower steps.
    """
    found: list[Entry] = []
    highest = 0
    for folder in steps(path):
        lineage = peek(folder / manifest.NAME)
        lineage = Lineage(highest) if lineage is None else lineage
        highest = max(highest, lineage.order)
        found.append(Entry(folder, int(folder.name.removeprefix("step-")), lineage))
    return found


def step_folder(path: Path, step: int) -> Path:
    """Where the checkpoint of a step is.

    >>> step_folder(Path("run"), 42).name
    'step-00000042'
    """
    return path / f"step-{step:08d}"


def saving_folder(path: Path, step: int) -> Path:
    """Where it is while it is being written."""
    return path / f".step-{step:08d}.saving"


def whole(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there in full.

    Raises:
        CheckpointError: says what is missing.
    """
    found = manifest.read(folder)
    for name, file in found.files.items():
        open_checked(folder / name, file).__exit__()
    return found


def is_whole(folder: Path) -> bool:
    """Whether `whole` would raise nothing."""
    try:
        whole(folder)
    except CheckpointError:
        return False
    return True


def sweep(path: Path) -> None:
    """Remove what saves and removals that were cut short have left."""
    if path.is_dir():
        for entry in list(path.iterdir()):
            if _HIDDEN.fullmatch(entry.name):
                disk.remove(entry)


def retain(path: Path, keep: int, never: Collection[str] = ()) -> None:
    """Remove all whole checkpoints but the first `keep` in the order of `latest`.

    What isn't whole counts for nothing, and is left alone.

    Args:
        never: names of those that stay in any case.
    """
    there = [folder for folder, _, _ in ranked(entries(path)) if is_whole(folder)]
    for folder in reversed(there[keep:]):
        if folder.name not in never:
            drop(folder)


def drop(folder: Path) -> None:
    """Remove a checkpoint: under its own name it is never half there, not even while it goes."""
    gone = folder.with_name(f".{folder.name}.removing")
    disk.rename(folder, gone)
    disk.remove(gone)
