"""`save`: a checkpoint that is visible once it is whole, and not before.

all ranks          leading rank
─────────          ────────────
plan               lock the folder, make .step-42.<id>.saving/
copy (asynchronous only)
write own file, fsync
                   write manifest.json, fsync, fsync folder
                   rename to step-42 (or swap with what is there)
──────────────────────────────────────────────────────────────── from here on it is there
                   fsync parent
                   remove what was swapped, and what `keep` lets go
"""

import contextlib
import hashlib
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.checkpoint import background
from fzero.checkpoint.client import compared, encode
from fzero.checkpoint.flatten import Flat, Scalar, flatten, placement_of
from fzero.checkpoint.format import disk
from fzero.checkpoint.format.boxes import Chunk, plan_save
from fzero.checkpoint.format.folders import (
    clear,
    entries,
    hold,
    publish,
    retain,
    saving_folder,
    step_folder,
    sweep,
    why_it_stays,
)
from fzero.checkpoint.format.manifest import Extent, File
from fzero.checkpoint.format.writer import Writer, Written
from fzero.checkpoint.lineage import following, parse
from fzero.checkpoint.progress import Progress, progress
from fzero.checkpoint.ranks import Ranks, on_every_rank, ranks_of
from fzero.distributed.dtensor import local_tensor
from fzero.errors import CheckpointError, arguments_by_name, users_line
from fzero.numerics.host import on_host
from fzero.state.follow import followed
from fzero.state.opt_state import OptState, refuse_spent
from fzero.tree import PyTree

# A plain tensor counts as the same on all ranks; those of a state that cost nothing are compared.
COMPARED_BYTES = 2**16

_UNWRITTEN = (
    "the checkpoint was not written, and earlier ones are as they were",
    "See that the disk has room and that all ranks reach the same folder, then save again.",
)
_UNSYNCED = (
    "the checkpoint is there, but {} could not be synced: {}. {} is found, and a crash of the "
    "machine may undo that, so no older one was removed. See to the disk and save again, this step "
    "with overwrite=True."
)
_OTHERS = (
    "{} has checkpoints of another run, which this process has neither loaded nor saved: {}. "
    "keep={} leaves them there, and the latest is this run's now. To go on from them, call "
    "fzero.checkpoint.load first; a new run takes a folder of its own."
)
_UNREMOVED = (
    "the checkpoint is there, but some of what should go could not be removed",
    "Each save tries again; remove by hand what stays.",
)


@arguments_by_name
def save(
    path: str | os.PathLike[str],
    params: PyTree,
    opt_state: PyTree = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    overwrite: bool = False,
    asynchronous: bool = False,
    timeout: float | None = None,
    client_state: Any = None,
) -> Path:
    """Write a checkpoint; every rank must call it. It appears only once it is whole.

    Each leaf is stored once, in its highest precision: the master's, where there is one, or what
    somebody wrote into its parameter since. Each rank writes its share. With HSDP the replicas
    share the work as well.

    Args:
        path: folder of the run's checkpoints, the same for all ranks; made if it isn't there.
        params: pytree of tensors, DTensors or not, as `TrainStep` gives it.
        opt_state: an `OptState`, any other pytree of tensors and plain Python values, or None. Of
            several engines that are trained together save one tree: `{"g": g.state[0], ...}` and
            `{"g": g.state[1], ...}`, with `step`.
        step: names the checkpoint; taken from `opt_state.step` if not given, else 0.
        keep: remove all but so many checkpoints of this run once this one is there; at least 1.
            What stays is this one, those that it came from, then branches that the run has left,
            newest first; and in any case the one that this process was resumed from. Those of
            another run, which this one has not gone on from, stay, with a warning. Damaged ones
            count for nothing and are left alone.
        overwrite: replace whatever has the name of this step's checkpoint. It stays, whole, until
            the new one takes its place at once. Without it that is an error, unless what is there
            is a checkpoint of this format that is unfinished or damaged, and holds nothing else:
            one of a newer release, or that cannot be read just now, and other files and folders
            stay. Of a link to elsewhere, here as for `keep`, the link goes and nothing else.
        asynchronous: return once this rank's share is copied to the host, and write it from a
            thread. Training may go on at once; `dist.destroy_process_group()` waits for it. An
            error is raised by the next `save`, `load` or `wait`, or else printed when the program
            ends. In an `atexit` handler, where no thread is waited for, it is written at once.
        timeout: seconds that ranks wait for each other; None: as long as the process group does.
        client_state: what else belongs to the run, the same on every rank; `client_state(path)`
            gives it back. None, numbers, texts, bytes, small dense tensors, and lists, tuples and
            dicts of these: what needs no code to be read.

    Returns:
        The folder of the checkpoint; with `asynchronous`, where it will be.

    Raises:
        CheckpointError: on every rank: ranks differ, a leaf or `client_state` can't be stored, the
            step is there already, another process keeps saving to this folder, the disk
            is full, a rank is gone. Earlier ones are as they were, and this one is not there unless
            the message says that it is.
        ShardError: the process group of the leaves was destroyed.

    Warns:
        UserWarning: on every rank: the checkpoint is there, but what `keep` lets go or an earlier
            save has left could not be removed. With `asynchronous` as errors are raised.

    Examples:
        >>> import tempfile
        >>> run = tempfile.mkdtemp()
        >>> save(run, {"w": torch.ones(4)}, {"mu": torch.zeros(4), "lr": 0.1}, step=7).name
        'step-00000007'
    """
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise CheckpointError(f"keep={keep!r} must be None or an int >= 1: how many stay.")

    def saved() -> Path:
        options = _Options(step, keep, overwrite, asynchronous, timeout, encode(client_state))
        return _save(disk.as_path(path).absolute(), params, opt_state, options)

    return background.in_turn(saved)


_AT_ONCE = (
    "asynchronous=True: a save beside training needs a process group of its own, and torch would "
    "have these ranks wait for each other under different names, since they are in different "
    "numbers of groups. This one is written before save returns, on all ranks. Have all ranks in "
    "the same number of groups, or save with asynchronous=False."
)
_PATIENCE = 600.0  # seconds for another process's save, where nobody says how long


class _Options(NamedTuple):
    """The arguments of `save` that have a name."""

    step: int | None
    keep: int | None
    overwrite: bool
    asynchronous: bool
    timeout: float | None
    client: Any  # encoded


def _save(where: Path, params: PyTree, opt_state: PyTree, options: _Options) -> Path:
    step, keep, overwrite, asynchronous, timeout, client = options
    for state in tree.nodes(OptState, opt_state):
        refuse_spent(state)
    _refuse_state(params)
    flat = flatten(params, opt_state)
    ranks = ranks_of(flat.tensors.values(), timeout)
    step = _step_of(opt_state) if step is None else step
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"step={step!r} must be an int >= 0: it names the checkpoint.")
    asked = {"path": str(where), "step": str(step), "keep": str(keep), "overwrite": str(overwrite)}
    # before the plan, which each rank makes by itself and which is the same if these are
    _agree(flat, ranks, asked | compared(client))
    chunks = plan_save(flat.tensors, ranks.members)
    mine = {i: _value_of(flat, c) for i, c in enumerate(chunks) if c.rank == ranks.index}
    total = sum(x.nbytes for x in mine.values())
    lock = disk.Lock()  # the leading rank takes the folder with it
    job = None
    try:
        folder, replaces, lineage, left = on_every_rank(
            ranks,
            "whether the folder is there",
            lambda: _prepare(ranks, where, step, overwrite, lock),
            _UNWRITTEN,
        )[0]
        if asynchronous:
            # its messages must not come between training's own
            apart = background.apart_from(ranks)
            if apart is None:
                asynchronous = False
                warnings.warn(_AT_ONCE, stacklevel=users_line())
            ranks = apart or ranks
        if asynchronous:
            # a copy on the host, too: the next step writes over these tensors
            mine = {i: x.to("cpu", copy=True) for i, x in mine.items()}
        shown = progress(f"saving step {step}", total, shown=ranks.leads)
        metadata = _metadata(flat, step, lineage, chunks, ranks, client)
        job = Job(
            ranks,
            where,
            Path(folder),
            step,
            keep,
            replaces,
            metadata,
            chunks,
            mine,
            shown,
            lock,
            left,
        )
        told = ""
        # Without a pool: it may go on while the interpreter ends, which starts no threads then.
        if background.is_ending():
            told = job()
        elif asynchronous:
            background.start(job, f"the save of step {step} to {where}")
        else:
            with ThreadPoolExecutor(1) as pool:
                told = job(pool)
    except BaseException:
        # a job that a thread has begun goes on, and lets go by itself
        if job is None or not background.runs(job):
            lock.let_go()
        raise
    if told:
        warnings.warn(told, stacklevel=users_line())
    return step_folder(where, step)


def _refuse_state(params: PyTree) -> None:
    """See that no state is where parameters belong: nothing would tell step and masters in it."""
    if isinstance(params, OptState):
        raise CheckpointError(
            f"params is an OptState, of step {int(params.step)}, and must be the parameters: the "
            "two are swapped, it seems. Pass fzero.checkpoint.save(path, params, opt_state), as a "
            "step takes them."
        )
    if tree.nodes(OptState, params):
        raise CheckpointError(
            f"params is a {type(params).__name__} with an OptState in it (engine.state, or what a "
            "step returned), and must be the parameters alone. Pass the two parts, "
            "fzero.checkpoint.save(path, *engine.state), as load takes them; of several engines "
            'two trees: {"g": g.state[0], ...} and {"g": g.state[1], ...}, with step.'
        )


@dataclass(frozen=True)
class Job:
    """A save whose plan is made: writes and publishes, on this or another thread.

    Args:
        ranks: the ranks that save.
        path: the folder of the run.
        folder: where it is written.
        step: names the checkpoint.
        keep: see `save`.
        replaces: whether what has its name goes.
        metadata: of all leaves.
        chunks: the plan, all ranks'.
        mine: by index in `chunks`, what this rank writes.
        progress: told of what is written.
        lock: on the folder; let go in the end.
        left: what earlier saves have left and could not be removed, and why.
    """

    ranks: Ranks
    path: Path
    folder: Path
    step: int
    keep: int | None
    replaces: bool
    metadata: Metadata
    chunks: Sequence[Chunk]
    mine: dict[int, Tensor]
    progress: Progress
    lock: disk.Lock
    left: list[str]

    def __call__(self, pool: Executor | None = None) -> str:
        """Write this rank's share; on the leading rank publish the whole.

        Args:
            pool: see `Writer`.

        Returns:
            What to warn of, the same on every rank; "" if nothing.

        Raises:
            CheckpointError: on every rank; nothing has become visible then, or it says so.
        """
        try:
            return self._run(pool)
        finally:
            self.lock.let_go()
            # what became of it is kept until somebody asks; a copy of all state need not be
            self.mine.clear()

    def _run(self, pool: Executor | None) -> str:
        ranks, folder, there = self.ranks, self.folder, step_folder(self.path, self.step)
        writer = Writer(folder, f"rank-{ranks.index:05d}.safetensors", self.progress, pool)
        published, replaced = False, None

        def write() -> list[Any]:
            planner = _Planner(self.chunks, self.mine, self.metadata)
            results = writer.write_data(planner.create_local_plan(), planner).wait()
            # tuples: ranks tell each other in JSON, which makes lists of them, and `_results` reads
            # those
            return [result.storage_data for result in results]

        def finish(by_rank: Sequence[Any]) -> str:
            nonlocal published, replaced
            if not ranks.leads:
                return ""
            writer.finish(self.metadata, self._results(by_rank))
            # the name comes last: what has it has its manifest, and all that the manifest names
            replaced = publish(folder, there, replaces=self.replaces)
            published = True
            # only now: a lineage must not name what was never published
            background.heads.saved(self.path, self.step)
            try:
                disk.sync_folder(self.path)
            except OSError as error:
                # no failure to write it, which all would be told: it is there
                return str(error)
            return ""

        def let_go() -> tuple[list[str], list[str]]:
            if not ranks.leads:
                return [], []
            left, others = self.left + ([] if replaced is None else clear(replaced)), []
            if self.keep is not None:
                never = {self.step, background.heads.resumed(self.path)}
                more, others = retain(self.path, self.keep, never)
                left += more
            return left, others if others and background.heads.meets_others(self.path) else []

        try:
            by_rank = on_every_rank(ranks, "what they wrote", write, _UNWRITTEN)
            self.progress.close()
            unsynced = on_every_rank(
                ranks, "whether it is published", lambda: finish(by_rank), _UNWRITTEN
            )[0]
        except CheckpointError:
            # a full disk needs the room back; once swapped, the old one is there
            if ranks.leads and not published:
                with contextlib.suppress(OSError):
                    disk.remove(folder)
            raise
        # on the others, too: one of them may lead the ranks of another mesh
        background.heads.saved(self.path, self.step)
        if unsynced:
            # an error, as of every other sync; and nothing goes for one that a crash may take away
            raise CheckpointError(_UNSYNCED.format(self.path, unsynced, there.name))
        left, others = on_every_rank(ranks, "whether older ones are removed", let_go, _UNREMOVED)[0]
        told = [f"{_UNREMOVED[0]}: {'; '.join(left)}. {_UNREMOVED[1]}"] if left else []
        if others:
            names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
            told.append(_OTHERS.format(self.path, names, self.keep))
        return " ".join(told)

    def _results(self, by_rank: Sequence[Sequence[Any]]) -> list[list[WriteResult]]:
        """What all ranks wrote, as `torch.distributed.checkpoint` passes it on."""
        results = []
        for rank, rows in enumerate(by_rank):
            chunks = [chunk for chunk in self.chunks if chunk.rank == rank]
            results.append(
                [
                    WriteResult(
                        MetadataIndex(chunk.key, chunk.box.offsets),
                        chunk.box.numel,
                        Written(Extent(name, start, tuple(checks)), File(*file)),
                    )
                    for chunk, ((name, start, checks), file) in zip(chunks, rows, strict=True)
                ]
            )
        return results


class _Planner(SavePlanner):
    """`plan_save`'s answer in the terms of `torch.distributed.checkpoint`."""

    def __init__(
        self, chunks: Sequence[Chunk], mine: dict[int, Tensor], metadata: Metadata
    ) -> None:
        self.chunks, self.mine, self.metadata = chunks, mine, metadata
        self.tensors = {MetadataIndex(chunks[i].key, chunks[i].box.offsets): i for i in mine}

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """The plan is made already."""

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        items = []
        for i in self.mine:
            key, box, _ = self.chunks[i]
            leaf = self.metadata.state_dict_metadata[key]
            assert isinstance(leaf, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, leaf.properties, leaf.size)
            index = MetadataIndex(key, box.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans as they are: no box is in two of them."""
        return all_plans, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor, which can go once it is written."""
        return self.mine[self.tensors[write_item.index]]


def _agree(flat: Flat, ranks: Ranks, asked: dict[str, str]) -> None:
    """See that all ranks save the same thing, before any of them writes."""
    items = asked | {key: placement_of(x) for key, x in flat.tensors.items()}
    items |= {key: repr(x) for key, x in flat.scalars.items()}
    ranks.same("what they save", items)
    small = {
        key: _text(x)
        for key, x in flat.tensors.items()
        if not isinstance(x, DTensor)
        and key.startswith("opt_state")
        # buffers, which ranks do change each in its own way, whatever they take
        and (x.nbytes <= COMPARED_BYTES or key in flat.buffers)
        and ranks.group is not None
    }
    ranks.same("the values of leaves that are no DTensors and are stored once", small)


def _prepare(
    ranks: Ranks, path: Path, step: int, overwrite: bool, lock: disk.Lock
) -> tuple[str, bool, dict[str, Any], list[str]] | None:
    """Make room for it, on the leading rank.

    Returns:
        The folder to write into, whether it replaces what is there, its lineage, and what earlier
        saves have left that could not be removed.
    """
    if not ranks.leads:
        return None
    disk.make_folder(path)
    # or a crash could take the run's folder along with its name
    disk.sync_folder(path.parent)
    # half of what the other ranks wait for this one
    hold(path, (ranks.timeout or _PATIENCE) / 2, lock)
    # under the lock: what lies about now belongs to nobody who still writes
    left = sweep(path)
    found = entries(path)
    there = step_folder(path, step)
    # or put aside for it, with a disk that doesn't let `sweep` put it back
    taken = next((entry.folder for entry in found if entry.step == step), there)
    if not overwrite and (why := why_it_stays(taken)):
        raise CheckpointError(
            f"{taken} is there already, and {why}. Pass overwrite=True to have it replaced, "
            "whatever it is (a run that went back to an earlier step comes to later ones again), "
            "save another step, or move it away first."
        )
    folder = saving_folder(path, step)
    disk.make_folder(folder)
    lineage = following(found, step, background.heads.parent(path))
    # what is there now is a damaged checkpoint of ours, or not wanted
    return str(folder), os.path.lexists(there), lineage._asdict(), left


def _metadata(
    flat: Flat, step: int, lineage: Any, chunks: Sequence[Chunk], ranks: Ranks, client: Any
) -> Metadata:
    boxes: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in flat.tensors}
    for chunk in chunks:
        box = ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes))
        boxes[chunk.key].append(box)
    scalars: dict[str, Scalar] = flat.scalars
    return Metadata(
        {
            key: TensorStorageMetadata(TensorProperties(dtype=x.dtype), x.shape, boxes[key])
            for key, x in flat.tensors.items()
        },
        planner_data={
            "step": step,
            "world": len(ranks.members),
            "scalars": scalars,
            "lineage": parse(lineage),
            "client": client,
        },
    )


def _step_of(opt_state: PyTree) -> int:
    return int(opt_state.step) if isinstance(opt_state, OptState) else 0


def _value_of(flat: Flat, chunk: Chunk) -> Tensor:
    """What this rank has of a leaf: of a master, what it will be once it follows its parameter."""
    value = local_tensor(flat.tensors[chunk.key]).detach()
    if chunk.key not in flat.rounded:
        return value
    part = local_tensor(flat.rounded[chunk.key]).detach()
    if part.shape != value.shape:  # a whole parameter beside this rank's part of its master
        for dim, (start, size) in enumerate(zip(*chunk.box, strict=True)):
            part = part.narrow(dim, start, size)
    return followed(value, part)


def _text(tensor: Tensor) -> str:
    """The first values, and a digest of all of them."""
    values = on_host(tensor)
    digest = hashlib.blake2b(disk.bytes_of(values), digest_size=8).hexdigest()
    shown = str(values.flatten()[:1000].tolist())
    return shown if values.numel() <= 1000 else f"{shown}, digest {digest}"
