"""`load`: from any world size, stage and mesh into the tensors that are there."""

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner

from fzero.checkpoint import background
from fzero.checkpoint.compare import compare, refuse
from fzero.checkpoint.flatten import Flat, flatten
from fzero.checkpoint.foreign import dcp
from fzero.checkpoint.foreign.safetensors import is_safetensors, open_safetensors
from fzero.checkpoint.format import folders, manifest
from fzero.checkpoint.format.storage import Reader
from fzero.checkpoint.progress import progress
from fzero.checkpoint.ranks import crew_of, together
from fzero.checkpoint.sources import Source
from fzero.distributed.dtensor import local_tensor
from fzero.errors import CheckpointError
from fzero.tree import PyTree

_UNREAD = (
    "the checkpoint was not loaded, and params and opt_state may hold parts of it by now",
    "Load another checkpoint, or build params and opt_state anew.",
)


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
            checkpoint in it. Also a safetensors file, its index or the folder with either; or a
            checkpoint of `torch.distributed.checkpoint`, FSDP2's for one, whose parameters have the
            same names, after any one prefix.
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
    where = Path(path)
    return fill(
        lambda: _choose(where),
        _open,
        params_like,
        opt_state_like,
        strict=strict,
        cast=cast,
        timeout=timeout,
    )


def fill(
    choose: Callable[[], str],
    open_source: Callable[[str, Flat, Callable[[int], None]], Source],
    params_like: PyTree,
    opt_state_like: PyTree,
    *,
    strict: bool,
    cast: bool,
    timeout: float,
) -> tuple[PyTree, PyTree]:
    """`load` from any kind of source.

    Args:
        choose: on the leading rank, says where the source is.
        open_source: opens it there, on every rank.
        params_like, opt_state_like, strict, cast, timeout: as for `load`.
    """
    background.wait()
    flat = flatten(params_like, opt_state_like)
    crew = crew_of(flat.tensors.values(), timeout)
    found = together(crew, "which checkpoint", lambda: choose() if crew.leads else None, _UNREAD)[0]
    shown = progress(f"loading {found}", _nbytes(flat), shown=crew.leads)
    opened: list[Source] = []

    def open_() -> str:
        opened.append(open_source(found, flat, shown))
        return hashlib.blake2b(opened[0].identity.encode(), digest_size=16).hexdigest()

    if len(set(together(crew, "what they read", open_, _UNREAD))) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints at {found}. All ranks must reach the same folder."
        )
    source = opened[0]
    report = compare(flat, source.metadata, source.scalars)
    refuse(report, source.where, strict=strict, cast=cast)
    if (report.missing or report.extra or report.misshapen) and crew.leads:
        warnings.warn(f"{source.where} does not fit in all: {report}.", stacklevel=3)
    skip = {*report.missing, *report.misshapen}
    together(crew, "whether they have read it", lambda: _read(flat, source, skip), _UNREAD)
    shown.close()
    return flat.rebuild({k: v for k, v in source.scalars.items() if k not in skip})


def _choose(path: Path) -> str:
    if (path / manifest.NAME).exists() or (path / dcp.NAME).exists() or is_safetensors(path):
        return str(path.absolute())
    newest = folders.latest(path)
    if newest is None:
        raise CheckpointError(
            f"{path} is no checkpoint and holds none that is whole. Pass the folder that save was "
            "given, or one checkpoint in it; python -m fzero.checkpoint verify says what is there."
        )
    return str(newest.absolute())


def _open(where: str, flat: Flat, told: Callable[[int], None]) -> Source:
    path = Path(where)
    if (path / manifest.NAME).exists():
        reader = Reader(path, told)
        found = reader.manifest
        identity = found.dumps()
        return Source(where, reader, found.metadata(), found.scalars, identity=identity)
    if is_safetensors(path):
        return open_safetensors(path, list(flat.tensors), told)
    return dcp.open_dcp(path, flat, told)


@torch.no_grad()
def _read(flat: Flat, source: Source, skip: set[str]) -> None:
    """Read into masters and whatever has none, then into the rounded copies of masters."""
    for key, value in source.values.items():
        if key in flat.tensors and key not in skip:
            local_tensor(flat.tensors[key]).copy_(value)
    done = {*skip, *source.values}
    for tensors in (flat.tensors, flat.rounded):
        wanted: dict[str, Any] = {key: x for key, x in tensors.items() if key not in done}
        if not wanted:
            continue
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(wanted, source.metadata, is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        source.reader.read_data(plan, planner).wait()


def _nbytes(flat: Flat) -> int:
    return sum(local_tensor(x).nbytes for x in (*flat.tensors.values(), *flat.rounded.values()))
