"""The folder of a run's checkpoints: `step-00000042/` each, whole or not there.

step-00000042/                  manifest.json, rank-00000.safetensors, ...
.step-00000043.<id>.saving/     being written; what a killed save leaves, removed by the next one
.step-00000041.<id>.removing/   on its way out, or what is left of it that cannot be removed
.step-00000042.<id>.replaced/   the old one, while a new one takes its place in two renames; what a
                                kill leaves counts as step 42, and the next save renames it back

[Note: one at a time] Whoever saves holds a lock on the folder, from looking what is there until
older ones are removed. It is gone with the process. Where the file system has no locks, the id in a
name keeps two saves from writing into one folder, and the rename lets one of them win: the other
one's folder is gone, or its name is taken, and it says so.

[Note: what stays] What can't be removed stops no save: a folder that somebody has open over NFS,
protects or owns. `sweep` and `retain` say where it is and why, and the next save tries again.
"""

import contextlib
import os
import re
import secrets
import time
import warnings
from collections.abc import Collection
from pathlib import Path

from fzero.checkpoint.format import disk, manifest
from fzero.checkpoint.format.manifest import Manifest
from fzero.checkpoint.format.reader import open_checked
from fzero.checkpoint.lineage import Entry, Lineage, family, peek, ranked
from fzero.errors import CheckpointError, users_line

_STEP = re.compile(r"step-(\d{8,})")
_SAVING = re.compile(r"\.step-\d{8,}(\.[0-9a-f]{8})?\.saving")
_REMOVING = re.compile(r"\.step-\d{8,}(\.[0-9a-f]{8})?\.removing")
_REPLACED = re.compile(r"\.step-(\d{8,})\.[0-9a-f]{8}\.replaced")
_MINE = re.compile(rf"{re.escape(manifest.NAME)}|rank-\d{{5,}}\.safetensors")
_LEFT = _SAVING, _REMOVING, _REPLACED


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
    for folder, _, _ in ranked(entries(disk.as_path(path))):
        try:
            whole(folder)
        except CheckpointError as error:
            warnings.warn(f"{folder} is passed over: {error}", stacklevel=users_line())
        else:
            return folder
    return None


def none_at(path: Path, rest: str = "") -> CheckpointError:
    """What to raise where no checkpoint is, by what is there instead.

    Args:
        rest: what else to try where it is some folder or file.
    """
    if not path.exists():
        above = next((x for x in path.absolute().parents if x.exists()), None)
        return CheckpointError(
            f"{path} doesn't exist; the folder above that does is {above}. Pass what save was "
            "given, or one checkpoint in it. Relative paths begin in the current folder (os.chdir)."
        )
    if (path / "zero").is_dir() or (path.name == "zero" and path.is_dir()):
        return CheckpointError(
            f"{path} is a universal checkpoint of DeepSpeed. Load it with fzero.checkpoint."
            "import_deepspeed_universal(path, params_like, opt_state_like)."
        )
    if path.name.startswith("global_step") or any(path.glob("global_step*")):
        return CheckpointError(
            f"{path} is a checkpoint of DeepSpeed. Convert it with DeepSpeed's ds_to_universal.py, "
            "and load the folder that this writes with fzero.checkpoint.import_deepspeed_universal("
            "path, params_like, opt_state_like)."
        )
    return CheckpointError(
        f"{path} is no checkpoint and holds none that is whole. Pass the folder that save was "
        f"given, or one checkpoint in it.{rest}"
    )


def steps(path: Path) -> list[Path]:
    """The checkpoints below `path` by step, whole or not."""
    if not path.is_dir():
        return []
    there = list(path.iterdir())
    found = {int(match[1]): e for e in there if (match := _REPLACED.fullmatch(e.name))}
    # A step's own name goes before what was put aside for it.
    found |= {int(match[1]): e for e in there if (match := _STEP.fullmatch(e.name))}
    return [found[step] for step in sorted(found)]


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's folder is named for; None if it has another name.

    >>> step_of(Path("run/step-00000042")), step_of(Path("run/best"))
    (42, None)
    """
    match = _STEP.fullmatch(folder.name) or _REPLACED.fullmatch(folder.name)
    return None if match is None else int(match[1])


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
        step = step_of(folder)
        assert step is not None
        found.append(Entry(folder, step, lineage))
    return found


def step_folder(path: Path, step: int) -> Path:
    """Where the checkpoint of a step is.

    >>> step_folder(Path("run"), 42).name
    'step-00000042'
    """
    return path / f"step-{step:08d}"


def saving_folder(path: Path, step: int) -> Path:
    """Where it is while it is being written: another folder each time."""
    return _hidden(step_folder(path, step), "saving")


def whole(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there in full.

    Raises:
        CheckpointError: says what is missing.
    """
    found = manifest.read(folder)
    for name, file in found.files.items():
        # opened for the checks alone: nothing is read
        open_checked(folder / name, file).__exit__()
    return found


def is_whole(folder: Path) -> bool:
    """Whether `whole` would raise nothing."""
    try:
        whole(folder)
    except CheckpointError:
        return False
    return True


def why_it_stays(folder: Path) -> str:
    """Why a save of its step does not replace it unasked; "" where it may.

    It may where nothing can be lost: there is nothing, or an unfinished or damaged checkpoint as
    this release writes them and nothing else. What cannot be read just now may be whole.
    """
    if not os.path.lexists(folder):
        return ""
    try:
        whole(folder)
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            return f"it cannot be told what it is: {cause}"
    else:
        return "a checkpoint that is whole is replaced by choice only"
    try:
        strange = sorted(x.name for x in folder.iterdir() if not _MINE.fullmatch(x.name))
        with contextlib.suppress(FileNotFoundError):
            if not manifest.is_of_this_version(folder):
                strange.append(f"{manifest.NAME} of another kind or version")
    except OSError as error:
        return f"it cannot be told what it is: {error}"
    return f"no save of this release has written {strange[0]} in it" if strange else ""


def hold(path: Path, seconds: float, lock: disk.Lock) -> None:
    """Wait until `lock` has the folder.

    Raises:
        CheckpointError: another process has had it all the time.
    """
    start = time.monotonic()
    while not lock.take(path):
        if time.monotonic() - start > seconds:
            raise CheckpointError(
                f"another process has been saving to {path} for {seconds:g} s. One process (or one "
                "job of several ranks) saves to a folder at a time: wait for it or end it, or save "
                "to another folder."
            )
        # asked again and again: a lock that is waited for has no time limit
        time.sleep(0.02)


def publish(folder: Path, there: Path, *, replaces: bool) -> Path | None:
    """Give a checkpoint that is written the name that it is found by.

    Its last act on the disk: once it returns the checkpoint is there, if it raises it is not.

    Args:
        folder: it is in.
        there: its name from now on.
        replaces: what has that name makes room; it is never half there.

    Returns:
        Where what had the name is now. It can go once the folder of both is synced: a crash before
        may bring the old name back.

    Raises:
        CheckpointError: the name was taken meanwhile, and is not to be replaced.
    """
    try:
        # not looked up first: between a look and the rename another save could come
        disk.rename(folder, there)
    except OSError:
        # the name is free, so it is the disk that failed
        if not os.path.lexists(there):
            raise
        if not replaces:
            raise CheckpointError(
                f"{there} was published by another save in the meantime; that one stays. Let one "
                "process save a step, or pass overwrite=True."
            ) from None
        # once swapped, the old one lies where the new one was written
        if disk.exchange(folder, there):
            return folder
        old = _hidden(there, "replaced")
        disk.rename(there, old)
        try:
            disk.rename(folder, there)
        except OSError:
            # back: readers must find the one that was there, not a gap
            disk.rename(old, there)
            raise
        return old
    return None


def sweep(path: Path) -> list[str]:
    """Remove what saves and removals that were cut short have left.

    Returns:
        What stays after all, and why; see [Note: what stays].
    """
    left: list[str] = []
    there = [x for x in path.iterdir() if any(w.fullmatch(x.name) for w in _LEFT)]
    if there:
        # what took the place of one of them may never have been synced; see `publish`
        disk.sync_folder(path)
    for entry in there:
        match = _REPLACED.fullmatch(entry.name)
        # killed between two renames: the old one is the only one there is of its step
        if match is not None and not os.path.lexists(step_folder(path, int(match[1]))):
            try:
                disk.rename(entry, step_folder(path, int(match[1])))
            except OSError as error:
                left += _stays(entry, error)
        elif match is not None or _REMOVING.fullmatch(entry.name):
            left += clear(entry)
        else:
            # renamed first: whoever writes there after all can't publish what is left of it
            left += drop(entry)
    return left


def retain(
    path: Path, keep: int, never: Collection[int | None] = (), *, others: bool = False
) -> tuple[list[str], list[str]]:
    """Remove all whole checkpoints of a run but the first `keep` in the order of `latest`.

    What isn't whole counts for nothing, and is left alone. Of one that is a link to elsewhere the
    link goes.

    Args:
        never: steps of those that stay in any case.
        others: remove those of other runs, too.

    Returns:
        What stays after all, and why, see [Note: what stays]; the names of other runs' checkpoints.
    """
    try:
        found = ranked(entries(path))
        there = [entry for entry in found if is_whole(entry.folder)]
    except OSError as error:
        return _stays(path, error), []
    ours = family(found) if there else set()
    apart = [] if others else [entry for entry in there if entry.key not in ours]
    there = [entry for entry in there if entry not in apart]
    left: list[str] = []
    # Least wanted first: if it is cut short, the better ones are left.
    for entry in reversed(there[keep:]):
        if entry.step not in never:
            left += drop(entry.folder)
    return left, [entry.folder.name for entry in reversed(apart)]


def drop(folder: Path) -> list[str]:
    """Remove a checkpoint: under its own name it is never half there, not even while it goes.

    One that cannot be removed has its name again if nothing of it is gone. Else it stays under the
    other, which is no checkpoint's.

    Returns:
        Where it stays and why, if it does.
    """
    gone = _hidden(folder, "removing")
    at = folder
    try:
        disk.rename(folder, gone)
        at = gone
        disk.remove(gone)
    except OSError as error:
        if at == gone and _STEP.fullmatch(folder.name) and is_whole(gone):
            with contextlib.suppress(OSError):
                disk.rename(gone, folder)
                at = folder
        return _stays(at, error)
    return []


def clear(left: Path) -> list[str]:
    """Remove what is no checkpoint any more; what `drop` returns."""
    try:
        disk.remove(left)
    except OSError as error:
        return _stays(left, error)
    return []


def _stays(path: Path, error: OSError) -> list[str]:
    # without the file inside, whose path has another id each time: one warning, not one a save
    return [f"{path} ({error.strerror or error})"] if os.path.lexists(path) else []


def _hidden(folder: Path, why: str) -> Path:
    name = folder.name.removeprefix(".").split(".")[0]
    return folder.with_name(f".{name}.{secrets.token_hex(4)}.{why}")
