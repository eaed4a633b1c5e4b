"""Trees filled from a source, whoever wrote it."""

import hashlib
import warnings
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata, TensorStorageMetadata

from fzero.checkpoint import background
from fzero.checkpoint.compare import Report, compare, refuse
from fzero.checkpoint.counted import as_stored, count_as_all
from fzero.checkpoint.flatten import Flat, flatten
from fzero.checkpoint.format import folders, manifest
from fzero.checkpoint.format.reader import Reader
from fzero.checkpoint.lineage import UNKNOWN
from fzero.checkpoint.progress import Progress, progress
from fzero.checkpoint.ranks import Ranks, on_every_rank, ranks_of
from fzero.checkpoint.sources import Source
from fzero.distributed.dtensor import local_tensor
from fzero.errors import CheckpointError, users_line
from fzero.tree import PyTree


@dataclass(frozen=True)
class Opened:
    """A source that all ranks have open, and the leaves that it is to fill.

    Args:
        flat: the leaves.
        ranks: that load together.
        source: the same on all of them.
        shown: told of the bytes that are read.
    """

    flat: Flat
    ranks: Ranks
    source: Source
    shown: Progress

    def read(self, skip: Set[str], cut: Set[str] = frozenset()) -> tuple[PyTree, PyTree]:
        """The trees, filled; all ranks call it.

        Args:
            skip: keys that stay as they are.
            cut: keys of leaves of two shapes, which take the elements that both have.
        """
        source = replace(self.source, metadata=_as_wanted(self.source.metadata, self.flat, cut))
        on_every_rank(
            self.ranks, "what is written to", lambda: _refuse_expanded(self.flat, skip), _UNOPENED
        )
        on_every_rank(
            self.ranks, "whether they have read it", lambda: _read(self.flat, source, skip), UNREAD
        )
        self.shown.close()
        return self.flat.rebuild({k: v for k, v in source.scalars.items() if k not in skip})


def open_on_every_rank(
    path: Path,
    choose: Callable[[], str],
    open_source: Callable[[str, Flat, Callable[[int], None]], Source],
    params_like: PyTree,
    opt_state_like: PyTree,
    timeout: float | None,
) -> Opened:
    """One source for all ranks, whoever wrote it.

    Args:
        path: the user's, the same on all ranks.
        choose: on the leading rank, says where the source is.
        open_source: opens it there, on every rank.
        params_like, opt_state_like, timeout: as for `load`.

    Raises:
        CheckpointError: it can't be opened, or ranks don't see the same.
    """
    # What is to be loaded may be what is still being written.
    background.wait()
    flat = flatten(params_like, opt_state_like)
    ranks = ranks_of(flat.tensors.values(), timeout)
    _same_path(ranks, path)
    # One rank chooses: a save may come between the looks of two.
    found = on_every_rank(
        ranks, "which checkpoint", lambda: choose() if ranks.leads else None, _UNOPENED
    )[0]
    shown = progress(f"loading {found}", _nbytes(flat), shown=ranks.leads)
    opened: list[Source] = []

    def open_() -> str:
        opened.append(open_source(found, flat, shown))
        return hashlib.blake2b(opened[0].identity.encode(), digest_size=16).hexdigest()

    if len(set(on_every_rank(ranks, "what they read", open_, _UNOPENED))) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints at {found}. All ranks must reach the same folder."
        )
    return Opened(flat, ranks, opened[0], shown)


def _refuse_expanded(flat: Flat, skip: Set[str]) -> None:
    """Raise if several elements of what is to be read into are one."""
    for key, x in (*flat.tensors.items(), *flat.rounded.items()):
        x = local_tensor(x)
        if key in skip:
            continue
        if x.numel() and any(
            n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)
        ):
            raise CheckpointError(
                f"{key} is an expanded tensor: several elements of it are one place in memory, and "
                "different values can't be read into them. Give load its clone() or contiguous() "
                "instead. Nothing was read."
            )


def _same_path(ranks: Ranks, path: Path) -> None:
    """See that all ranks were given one path, as it is written or as it is from the root."""
    given = ranks.gather("which path", [str(path), str(path.absolute())])
    if any(len({both[i] for both in given}) == 1 for i in (0, 1)):
        return
    pairs = zip(ranks.members, given, strict=True)
    listing = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in pairs)
    raise CheckpointError(
        f"ranks differ in what they load at path: {listing}. It must be the same on all. Pass the "
        "folder that save was given: then one rank chooses the newest checkpoint for all. Or "
        "choose on one rank, and send the path to the others "
        "(torch.distributed.broadcast_object_list)."
    )


def fill(
    path: Path,
    choose: Callable[[], str],
    open_source: Callable[[str, Flat, Callable[[int], None]], Source],
    params_like: PyTree,
    opt_state_like: PyTree,
    *,
    strict: bool,
    cast: bool,
    timeout: float | None,
) -> tuple[PyTree, PyTree]:
    """`load` from any kind of source.

    Args:
        path, choose, open_source: as for `open_on_every_rank`.
        params_like, opt_state_like, strict, cast, timeout: as for `load`.
    """
    opened = open_on_every_rank(path, choose, open_source, params_like, opt_state_like, timeout)
    stored = opened.source.metadata.state_dict_metadata.keys()
    like, uncounted = as_stored(opt_state_like, stored)
    if like is not opt_state_like:
        opened = replace(opened, flat=flatten(params_like, like))
    ranks, source = opened.ranks, opened.source
    report = compare(opened.flat, source.metadata, source.scalars)
    missing = (key for key in report.missing if key not in uncounted)
    report = replace(report, missing=tuple(missing))
    unsaved = _unsaved_buffers(source, report)
    if unsaved and ranks.leads:
        warnings.warn(
            f"{source.where} has no buffers: the release of fzero that wrote it kept an engine's "
            f"only beside a BatchNorm. These stay as they are: {', '.join(unsaved)}. Save again to "
            "have them in a checkpoint.",
            stacklevel=users_line(),
        )
    report = replace(report, missing=tuple(k for k in report.missing if k not in unsaved))
    refuse(report, source.where, strict=strict, cast=cast)
    if (report.missing or report.extra or report.misshapen) and ranks.leads:
        warnings.warn(f"{source.where} does not fit in all: {report}.", stacklevel=users_line())
    # what is let pass stays as it was in the trees that were given
    trees = opened.read({*report.missing, *report.misshapen, *unsaved, *uncounted})
    if uncounted:
        count_as_all(trees[1], uncounted)
    # only what was read whole is gone back to
    _remember(Path(source.where), state=opt_state_like is not None)
    return trees


def _as_wanted(metadata: Metadata, flat: Flat, cut: Set[str]) -> Metadata:
    """The metadata with the shapes that are asked for, of leaves of which a part is read.

    The boxes stay as they are stored: a planner reads where they and this rank's part overlap, and
    what lies outside of either is left alone.
    """
    stored = dict(metadata.state_dict_metadata)
    for key in cut:
        there = stored[key]
        assert isinstance(there, TensorStorageMetadata)  # none else has a shape
        stored[key] = replace(there, size=flat.tensors[key].shape)
    return replace(metadata, state_dict_metadata=stored)


@torch.no_grad()
def _read(flat: Flat, source: Source, skip: Set[str]) -> None:
    """Read into masters and whatever has none, then into the rounded copies of masters."""
    for key, value in source.values.items():
        if key in flat.tensors and key not in skip:
            local_tensor(flat.tensors[key]).copy_(value)
    done = {*skip, *source.values}
    # one after the other, since they have the same keys
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


_UNOPENED = (
    "the checkpoint was not loaded, and params and opt_state are as they were",
    "See that all ranks reach the same folder.",
)
UNREAD = (
    "the checkpoint was not loaded, and params and opt_state may hold parts of it by now: load "
    "another into them, or build them anew",
    "See that all ranks reach the same folder.",
)


def _remember(folder: Path, *, state: bool) -> None:
    """That what is saved next, and what `keep` must not let go, goes back to this checkpoint."""
    step = folders.step_of(folder)
    if step is not None and (folder / manifest.NAME).exists():
        background.heads.loaded(folder.parent, step, state=state)


def _unsaved_buffers(source: Source, report: Report) -> list[str]:
    """Model state that is asked for, and that an earlier release did not store."""
    old = isinstance(source.reader, Reader) and source.reader.manifest.lineage == UNKNOWN
    if not old or any(key.startswith(_STATE) for key in source.metadata.state_dict_metadata):
        return []
    return [key for key in report.missing if key.startswith(_STATE)]


_STATE = "opt_state.model_state"
