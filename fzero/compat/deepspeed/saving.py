"""Checkpoints of a run, under DeepSpeed's tags, in fzero's format.

    SAVE_DIR/latest                                the tag that was saved last
    SAVE_DIR/TAG/step-00000004/                    see fzero.checkpoint
    SAVE_DIR/TAG/rank-00000-step-00000004.pt       what the client and the shim keep, rank by rank

[Note: a tag is whole] The files of the ranks come first, then the checkpoint, which appears at
once, then `latest`: who follows it finds all three.
"""

import argparse
import contextlib
import io
import os
import re
import secrets
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fzero import checkpoint
from fzero.checkpoint import background
from fzero.checkpoint.format.folders import retain, step_folder, step_of, steps
from fzero.checkpoint.ranks import Ranks, on_every_rank, ranks_of
from fzero.compat.deepspeed import comm
from fzero.engine import Engine
from fzero.errors import CheckpointError, ShardError, users_line

LATEST = "latest"


def save(
    folder: Path,
    tag: str,
    engine: Engine,
    step: int,
    kept: dict[str, Any],
    *,
    latest: bool,
    without: Collection[str] = (),
) -> None:
    """Write a checkpoint; every rank calls it.

    Args:
        folder: of all tags.
        tag: names this one.
        engine: whose state it is.
        step: of the run.
        kept: by this rank, beside the state: tensors and plain values.
        latest: whether this is the one to go on from.
        without: names of parameters that are left out.

    Raises:
        CheckpointError: on every rank: something is kept that could only be read back by running
            code, the tag names no folder, its folder has a checkpoint of this step that somebody
            else wrote, or a rank's disk failed; or see `fzero.checkpoint.save`.
    """
    _same(folder, tag, step)
    _check_tag(tag)  # now all ranks have this one, and raise
    ranks, where = ranks_of([]), folder / tag
    packed: list[bytes] = []

    def pack() -> list[bool]:
        packed.append(_packed(kept))  # before anything is written
        return _whose(where, step) if ranks.leads else []

    ours, alone = on_every_rank(ranks, "what each keeps", pack, _UNWRITTEN)[0]

    def write() -> None:
        where.mkdir(parents=True, exist_ok=True)
        whole_file(_file(where, comm.get_rank(), step), packed[0])

    try:
        on_every_rank(ranks, "whether its file is there", write, _UNWRITTEN)
        params, state = engine.state
        params = {name: x for name, x in params.items() if name not in without}
        if state.master is not None:
            master = {name: x for name, x in state.master.items() if name not in without}
            state = state._replace(master=master)
        checkpoint.save(where, params, state, step=step, overwrite=ours)
    except BaseException:
        if not ours:  # of a checkpoint that is not there; a full disk needs the room back
            _file(where, comm.get_rank(), step).unlink(missing_ok=True)
        raise

    def tell() -> list[str]:
        left: list[str] = []
        if ranks.leads:
            # what somebody else keeps in this folder is theirs: nothing of it is let go
            if alone:
                never = {step, background.heads.resumed(where)}
                left, _ = retain(where, 1, never, others=True)
            there = {step_of(path) for path in steps(where)}
            for file, _, of in _files(where):
                if of not in there:
                    file.unlink()
            if latest:
                whole_file(folder / LATEST, tag.encode())
        return left

    left = on_every_rank(ranks, "whether it is the latest", tell, _UNTOLD)[0]
    if left:
        warnings.warn(
            f"the checkpoint is there, and an earlier one of tag {tag!r} could not be removed: "
            f"{'; '.join(left)}. Remove it by hand.",
            stacklevel=users_line(),
        )


_UNWRITTEN = (
    "the checkpoint was not written, and earlier ones are as they were",
    "See that the disks have room and that all ranks reach the same folder, then save again.",
)
_UNTOLD = (
    f"the checkpoint is there, but not all around it: files of earlier ones, or {LATEST!r}",
    "See to the disk, and save again.",
)


def _check_tag(tag: str) -> None:
    path = Path(tag)
    if path.is_absolute() or not path.parts or ".." in path.parts or path.parts[0] == LATEST:
        raise CheckpointError(
            f"save_checkpoint: tag={tag!r} names no folder in save_dir for a checkpoint. Pass "
            f"another ({LATEST!r} is the file that says which tag was saved last); nothing was "
            "written."
        )


def _files(where: Path) -> list[tuple[Path, int, int]]:
    """The files that this module has written for a tag: each with its rank and step."""
    matches = [(path, _RANK_FILE.fullmatch(path.name)) for path in where.glob("rank-*-step-*.pt")]
    return [(path, int(m[1]), int(m[2])) for path, m in matches if m]


_RANK_FILE = re.compile(r"rank-(\d{5,})-step-(\d{8,})\.pt")


def _whose(where: Path, step: int) -> list[bool]:
    """Whether the tag's checkpoint of this step is this module's, and whether all are."""
    written = {of for _, rank, of in _files(where) if rank == 0}
    there = {of for path in steps(where) if (of := step_of(path)) is not None}
    if step in there - written:
        raise CheckpointError(
            f"save_checkpoint: {step_folder(where, step)} is there already, and no save_checkpoint "
            "wrote it. It stays: pass another tag or save_dir, or move it."
        )
    return [step in there, there <= written]


def latest_tag(folder: Path) -> str | None:
    """The tag that was saved last, or None.

    Raises:
        CheckpointError: the file that says it is empty.
    """
    file = folder / LATEST
    if not file.is_file():
        return None
    if not (tag := file.read_text().strip()):
        raise CheckpointError(
            f"{file} is empty, and names no tag. Name one, load_checkpoint(folder, tag). "
            f"Tags there: {_tags(folder)}."
        )
    return tag


def find(folder: Path, tag: str) -> Path:
    """The checkpoint of a tag.

    Raises:
        CheckpointError: there is none, or it is DeepSpeed's own.
    """
    where = folder / tag
    found = checkpoint.latest(where) if where.is_dir() else None
    if found is not None:
        return found
    if list(where.glob("*_states.pt")):
        raise CheckpointError(
            f"{where} was written by DeepSpeed. Convert it with its ds_to_universal, and read that "
            "with fzero.checkpoint.import_deepspeed_universal(path, *engine.inner.state)."
        )
    raise CheckpointError(f"{where} holds no whole checkpoint. Tags there: {_tags(folder)}.")


def _tags(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*") if path.is_dir())
    return ", ".join(found) or "none"


def kept_of(found: Path) -> dict[str, Any]:
    """What this rank kept; the first one's where another world saved."""
    step = int(found.name.partition("-")[2])
    mine = _file(found.parent, comm.get_rank(), step)
    file = mine if mine.is_file() else _file(found.parent, 0, step)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. It is damaged or missing."
        ) from error


def keys_of(module: nn.Module) -> dict[str, str]:
    """The keys of a module's `state_dict`, each with the name that a checkpoint has for it.

    A checkpoint has tied tensors under one name, and buffers that are not persistent, too. Of a
    module that makes other tensors of its parameters when it is saved, these parameters' own names
    are the keys: those tensors are in no checkpoint.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> model[1].weight = model[0].weight
    >>> keys_of(model)
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    names = {id(x): name for name, x in named}
    own = module.state_dict(keep_vars=True)
    keys = {key: names.get(id(x), key) for key, x in own.items() if isinstance(x, Tensor)}
    # a name of each, as `named_parameters` has tied ones once
    missing = {name for name, _ in module.named_parameters()} - {*keys.values()}
    return keys | {name: name for name in sorted(missing)}


def module_of(found: Path, *, frozen: bool = True) -> dict[str, Tensor]:
    """What the module's `state_dict` had, in full, on the host, in the highest precision.

    Args:
        found: the checkpoint; no process group is needed.
        frozen: False: without parameters that were frozen.

    Returns:
        One tensor for all names of a tied one.

    Raises:
        CheckpointError: an earlier version saved it, and has not said which were frozen.
    """
    reader = checkpoint.Reader(found)
    wanted: dict[str, Any] = {}
    for key, leaf in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(_PREFIXES) and hasattr(leaf, "properties"):
            described: Any = leaf
            wanted[key] = torch.empty(
                described.size, dtype=described.properties.dtype, device="cpu"
            )
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    there = {
        next(key[len(p) :] for p in _PREFIXES if key.startswith(p)): wanted[key] for key in wanted
    }
    kept = kept_of(found)
    if not frozen and "frozen" not in kept:
        raise CheckpointError(
            f"{found} does not say which parameters were frozen: an earlier version saved it. Take "
            "their names out of what is returned without exclude_frozen_parameters."
        )
    wanted_names = there.keys() - (set() if frozen else kept["frozen"])
    # of what an earlier version saved there is no list
    keys = kept.get("keys", {name: name for name in there})
    return {key: there[name] for key, name in keys.items() if name in wanted_names}


def cast(tensors: dict[str, Any], dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Floating tensors in other dtypes; what was one tensor under several names still is."""
    done = {
        id(x): x.to(dtypes[name])
        for name, x in tensors.items()
        if name in dtypes and x.is_floating_point()
    }
    return {name: done.get(id(x), x) for name, x in tensors.items()}


@contextlib.contextmanager
def in_its_words() -> Iterator[None]:
    """Inside, what does not fit is told with the arguments that DeepSpeed's load has for it."""
    try:
        yield
    except (CheckpointError, ShardError) as error:
        if "strict=False" not in str(error):
            raise
        raise CheckpointError(
            f"{error} Here that is load_checkpoint(load_module_strict=False); of another optimizer "
            "load_optimizer_states=False."
        ) from error


def _same(folder: Path, tag: str, step: int) -> None:
    """All ranks save the same: else each would wait for the others in a folder of its own."""
    if comm.get_world_size() == 1:
        return
    said: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(said, f"{folder}, tag {tag!r}, step {step}")
    for rank, other in enumerate(said):
        if other != said[0]:
            raise CheckpointError(
                f"save_checkpoint: rank {rank} saves to {other}, and rank 0 to {said[0]}. All "
                "ranks save to one folder, under one tag. Nothing was written."
            )


_PREFIXES = ("params.", "opt_state.model_state.")


def write_tensors(file: Path, tensors: dict[str, Any] | None, ranks: Ranks | None = None) -> None:
    """`torch.save`, whole or not at all, on the rank that has tensors.

    Args:
        file: to be written.
        tensors: None on the other ranks.
        ranks: those that call it; None: all.

    Raises:
        CheckpointError: on each of them, what is written to failed.
    """

    def write() -> None:
        if tensors is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            buffer = io.BytesIO()
            torch.save(tensors, buffer)
            whole_file(file, buffer.getvalue())

    failing = (f"{file} was not written", "See that the disk has room, then save again.")
    on_every_rank(ranks or ranks_of([]), f"whether {file.name} is there", write, failing)


def _packed(kept: dict[str, Any]) -> bytes:
    try:
        return _plainly(kept)
    except Exception as error:
        raise CheckpointError(
            f"save_checkpoint: {_culprit(kept)}, which can't be read back without running code. "
            "Keep tensors, numbers, texts, lists and dicts (x.item() of a number of numpy's); "
            "nothing was written."
        ) from error


def _plainly(kept: Any) -> bytes:
    """What `torch.save` writes, if that can be read back as data alone."""
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([argparse.Namespace]):
        torch.load(buffer, weights_only=True)
    return buffer.getvalue()


def _culprit(kept: Any, at: str = "") -> str:
    """The place of what is to blame, and what it is."""
    children: Any = ()
    if isinstance(kept, dict):
        children = kept.items()
    elif isinstance(kept, list | tuple):
        children = enumerate(kept)
    for key, child in children:
        try:
            _plainly(child)
        except Exception:
            return _culprit(child, f"{at}[{key!r}]" if at else str(key))
    return f"{at} is a {type(kept).__module__}.{type(kept).__qualname__}"


def _file(where: Path, rank: int, step: int) -> Path:
    return where / f"rank-{rank:05d}-step-{step:08d}.pt"


def whole_file(file: Path, data: bytes) -> None:
    """Write a file, which is there whole or not at all; of a link the file that it points to."""
    file = Path(os.path.realpath(file))
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is no file, and stays.")
    # ranks may write the same file: each its own part, and the last one stays
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)  # gone already if all went well
