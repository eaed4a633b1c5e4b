"""`load`: from any world size, stage and mesh into the tensors that are there."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fzero.checkpoint.fill import fill
from fzero.checkpoint.flatten import Flat
from fzero.checkpoint.foreign import dcp
from fzero.checkpoint.foreign.safetensors import is_safetensors, open_safetensors
from fzero.checkpoint.format import folders, manifest
from fzero.checkpoint.format.disk import as_path
from fzero.checkpoint.format.reader import Reader
from fzero.checkpoint.sources import Rename, Source, names_of, one_each, split_key
from fzero.errors import arguments_by_name
from fzero.tree import PyTree


@arguments_by_name
def load(
    path: str | os.PathLike[str],
    params_like: PyTree,
    opt_state_like: PyTree = None,
    *,
    strict: bool = True,
    cast: bool = False,
    timeout: float | None = None,
) -> tuple[PyTree, PyTree]:
    """Fill trees from a checkpoint that any world size, stage and mesh wrote; all ranks call it.

    The values are read into the very tensors of the trees: nothing but a few MiB is allocated, and
    no rank holds more of a leaf than it has room for. Don't read the old names again, as after a
    step with `Config(donate=True)`; after an error don't use their values either.

    Args:
        path: the folder that `save` was given (the newest whole checkpoint in it is taken, also
            beside other files), or one checkpoint in it; the same on all ranks. Also a safetensors
            file, its index or the folder with either; or a checkpoint of
            `torch.distributed.checkpoint`, FSDP2's for one, whose parameters have the same names,
            after any one prefix.
        params_like: params as `TrainStep.init` gives them, or None.
        opt_state_like: the state likewise, or None to leave it aside.
        strict: False: leaves that are missing, extra or of another shape keep their values, and a
            warning lists them.
        cast: convert leaves whose dtype differs; without it that is an error. Parameters that are
            rounded copies of masters need no cast: it is the masters that are stored.
        timeout: seconds that ranks wait for each other; None: as long as the process group does.

    Returns:
        `(params, opt_state)`.

    Raises:
        CheckpointError: on every rank: their paths differ, there is no whole checkpoint, it does
            not fit (every leaf that differs is named), or a block of it is damaged (file and leaf
            are named).

    Examples:
        >>> import tempfile, torch, fzero
        >>> run = tempfile.mkdtemp()
        >>> _ = fzero.checkpoint.save(run, {"w": torch.ones(2)}, {"lr": 0.5})
        >>> load(run, {"w": torch.zeros(2)}, {"lr": 0.0})
        ({'w': tensor([1., 1.])}, {'lr': 0.5})
    """
    where = as_path(path)
    return fill(
        where,
        lambda: choose(where),
        open_source,
        params_like,
        opt_state_like,
        strict=strict,
        cast=cast,
        timeout=timeout,
    )


def choose(path: Path) -> str:
    """Where the checkpoint is that `load` takes for a path; on the leading rank."""
    # one checkpoint itself, before a folder of them: whoever names a step means that step
    if (path / manifest.NAME).exists():
        return str(path.absolute())
    # a run's folder may have an export of its parameters in it: of the run, and not of now
    a_run = any((step / manifest.NAME).exists() for step in folders.steps(path))
    of_torch = (path / dcp.NAME).exists()
    if not a_run and (of_torch or is_safetensors(path)):
        return str(path.absolute())
    newest = folders.latest(path)
    if newest is None:
        beside = ""
        if is_safetensors(path):
            beside = " For the safetensors beside them pass the file, or its index: not the folder."
        elif of_torch:
            beside = " Move the checkpoint of torch.distributed.checkpoint to a folder of its own."
        raise folders.none_at(
            path,
            f"{beside} python -m fzero.checkpoint verify says what is there. A file of torch.save "
            "(.pt, .bin) is read before: module.load_state_dict(torch.load(file, "
            "weights_only=True)), then functionalize or Engine.",
        )
    # absolute, for other ranks open it, wherever they were started
    return str(newest.absolute())


def open_source(
    where: str, flat: Flat, on_bytes: Callable[[int], None], rename: Rename | None = None
) -> Source:
    """What is there, by the files that it has."""
    path = Path(where)
    if (path / manifest.NAME).exists():
        reader = Reader(path, on_bytes)
        found = reader.manifest
        # the manifest has a checksum of each block: who reads the same one reads the same bytes
        identity = found.dumps()
        stored = [*found.leaves, *found.scalars]
        params = {*names_of(stored)}
        parts = {key: split_key(key, params) for key in stored}
        ours = {key: _renamed(*parts[key], rename) for key in stored}
        one_each(ours)
        leaves = {ours[key]: leaf for key, leaf in found.leaves.items()}
        scalars = {ours[key]: value for key, value in found.scalars.items()}
        # it reads by the names that are asked for
        reader.manifest = replace(found, leaves=leaves, scalars=scalars)
        source = Source(where, reader, reader.manifest.metadata(), scalars, identity=identity)
        renamed = {to: key for key, to in ours.items() if to != key}
        return replace(source, renamed=renamed, names=[n for _, n in parts.values() if n])
    if is_safetensors(path):
        return open_safetensors(path, list(flat.tensors), on_bytes, rename)
    return dcp.open_dcp(path, flat, on_bytes, rename)


def _renamed(head: str, name: str | None, rename: Rename | None) -> str:
    """What a key is to be called."""
    to = None if name is None or rename is None else rename(name)
    return head + (to if to is not None else name or "")
