"""Safetensors, as Hugging Face lays them out: parameters out, and parameters in.

    model.safetensors.index.json        {"metadata": {...}, "weight_map": {name: file}}
    model-00001-of-00002.safetensors

References: https://huggingface.co/docs/safetensors/index#format, and
https://huggingface.co/docs/hub/models-adding-libraries for the names of the files.
"""

import contextlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.checkpoint.flatten import has_memory, keys
from fzero.checkpoint.format import disk
from fzero.checkpoint.format.folders import hold
from fzero.checkpoint.format.writer import write_file
from fzero.checkpoint.progress import progress
from fzero.checkpoint.ranks import Ranks, on_every_rank, ranks_of
from fzero.checkpoint.sources import (
    Lazy,
    LazyReader,
    Rename,
    Source,
    our_names,
    renamed_params,
)
from fzero.errors import CheckpointError, arguments_by_name
from fzero.numerics.host import ST_DTYPES
from fzero.tree import PyTree

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 5 * 10**9

_PATIENCE = 300.0  # seconds for another's save or export to this folder
_UNWRITTEN = ("the parameters were not exported", "See that the disk has room, then export again.")


@arguments_by_name
def export_safetensors(
    path: str | os.PathLike[str],
    params: PyTree,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    timeout: float | None = None,
) -> Path:
    """Write full parameters as safetensors that `transformers` loads; every rank must call it.

    Leaves are gathered one at a time. Ranks take turns with the files.

    Args:
        path: folder for the files, such as one with the model's config.json; made if need be.
        params: pytree of tensors or DTensors; names are its keys joined by dots. Where two leaves
            have one name so, or a leaf has none (a tensor by itself), the name is its path,
            `params['a.b']`. A module's buffers (running statistics, say) go along as
            `{**params, **buffers}`.
        dtype: what floating leaves are converted to; None leaves them.
        max_file_bytes: a file is closed before it would grow beyond this, unless one leaf does.
        overwrite: replace an export that is there. The old one stays readable until all files of
            the new one are written (that needs room for both); then they take their places, the
            index last. Without it that is an error.
        timeout: seconds that ranks wait for each other; None: as long as the process group does.

    Returns:
        The folder.

    Raises:
        CheckpointError: a leaf that the format can't hold, files that are there already, a disk
            that is full. What was written by then is removed, as it is on Ctrl-C.

    Examples:
        >>> import tempfile
        >>> folder = export_safetensors(tempfile.mkdtemp(), {"w": torch.ones(2, 3)})
        >>> sorted(file.name for file in folder.iterdir())
        ['model-00001-of-00001.safetensors', 'model.safetensors.index.json']
    """
    folder = disk.as_path(path).absolute()
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(
            f"export_safetensors: dtype={dtype!r} must be a floating torch.dtype, such as "
            "torch.bfloat16: floating leaves are converted to it, and whole numbers would cut them."
        )
    if type(max_file_bytes) is not int or max_file_bytes < 1:
        raise CheckpointError(
            f"export_safetensors: max_file_bytes={max_file_bytes!r} must be a number of bytes from "
            "1 on, such as 5 * 10**9."
        )
    leaves = tree.leaves(params)
    if not leaves:
        raise CheckpointError(
            f"export_safetensors: params has no leaves ({params!r}). Pass what step_fn returned "
            "first, or engine.full_params()."
        )
    ranks = ranks_of([x for x in leaves if isinstance(x, Tensor)], timeout)
    return write_folder(folder, _whole_leaves(params, dtype), ranks, max_file_bytes, overwrite)


def export_of_one_rank(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """`export_safetensors` of full tensors over what is there; one rank calls it, or each."""
    return write_folder(path.absolute(), _whole_leaves(tensors), Ranks.alone(), overwrite=True)


class Whole(NamedTuple):
    """A full leaf that isn't there yet.

    Args:
        name: in the file.
        dtype: in the file.
        shape: of the leaf.
        make: the leaf; every rank of the ranks calls it, and says whether it wants the result.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[bool], Tensor | None]


def write_folder(
    folder: Path,
    leaves: Sequence[Whole],
    ranks: Ranks,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
) -> Path:
    """`export_safetensors` of leaves that are made one at a time."""
    # one export at a time: each takes away what an older one has left
    lock = disk.Lock()
    try:
        return _write_folder(folder, leaves, ranks, max_file_bytes, overwrite, lock)
    finally:
        lock.let_go()


def _write_folder(
    folder: Path,
    leaves: Sequence[Whole],
    ranks: Ranks,
    max_file_bytes: int,
    overwrite: bool,
    lock: disk.Lock,
) -> Path:
    bad = [f"{leaf.name} ({leaf.dtype})" for leaf in leaves if leaf.dtype not in ST_DTYPES]
    if bad:
        raise CheckpointError(
            f"safetensors can't hold {', '.join(bad)}. Pass a dtype, or convert these leaves."
        )
    names = [leaf.name for leaf in leaves]
    if unreadable := [repr(name) for name in names if name == _ABOUT or not _is_text(name)]:
        raise CheckpointError(
            f"safetensors can't hold a leaf by the name of {', '.join(unreadable)}: the format has "
            f"another use for {_ABOUT!r}, and its names are texts of Unicode, without lone "
            "surrogates. Rename the dict keys that lead there."
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise CheckpointError(
            f"several leaves would be {', '.join(map(repr, twice))} in the file, which needs one "
            "name for each. Rename one of the dict keys that lead there."
        )
    ranks.same("what they export", {leaf.name: f"{leaf.dtype} {leaf.shape}" for leaf in leaves})
    sizes = [torch.Size(leaf.shape).numel() * leaf.dtype.itemsize for leaf in leaves]
    members = _files_of(sizes, max_file_bytes)
    files = [f"model-{i:05d}-of-{len(members):05d}.safetensors" for i in range(1, len(members) + 1)]
    shown = progress(f"exporting to {folder}", sum(sizes), shown=ranks.leads)

    def prepare() -> tuple[str, bool] | None:
        if not ranks.leads:
            return None
        disk.make_folder(folder)
        hold(folder, _PATIENCE, lock)
        there = [n for n in (*files, INDEX, SINGLE) if os.path.lexists(folder / n)]
        if folders := [n for n in there if (folder / n).is_dir()]:
            raise CheckpointError(
                f"{folder} has a folder {folders[0]}, where a file of the export belongs. Export "
                "to another folder, or move it."
            )
        if there and not overwrite:
            raise CheckpointError(
                f"{folder} has {', '.join(there[:3])} already. Export to another folder, remove "
                "them first, or pass overwrite=True."
            )
        return secrets.token_hex(4), bool(there)

    def write(number: int) -> None:
        rows = [leaves[i] for i in members[number]]
        # each file has one writer, and the ranks take turns
        if number % len(ranks.members) != ranks.index:
            # a gather needs all ranks, also those that don't write
            for leaf in rows:
                leaf.make(False)
            return
        described = [(leaf.name, leaf.dtype, leaf.shape) for leaf in rows]
        coming = iter(rows)
        tensors = (_made(leaf) for leaf in coming)
        part = folder / parts[number]
        try:
            write_file(part, described, tensors, about={"format": "pt"}, on_bytes=shown)
        except BaseException as error:  # no other rank has been told of it: it can go
            _remove(folder, [part.name])
            if isinstance(error, OSError):
                for leaf in coming:  # the others gather what this one can't write any more
                    leaf.make(False)
            raise

    def finish() -> None:
        if ranks.leads:
            rows = [(leaves[i].name, k) for k, f in enumerate(members) for i in f]
            _publish(folder, parts, files, rows, sum(sizes), replaced=replaced)

    # Of this export alone: what another left may be what its index names.
    token, replaced = on_every_rank(ranks, "whether the folder is there", prepare, _UNWRITTEN)[0]
    parts = [f".{name}.{token}.part" for name in files]
    try:
        for number, name in enumerate(files):
            on_every_rank(ranks, f"whether {name} is written", partial(write, number), _UNWRITTEN)
        # Last: readers find the files through the index, and by then all are there.
        on_every_rank(ranks, "whether the index is written", finish, _UNWRITTEN)
    except BaseException:
        if ranks.leads:  # a full disk needs the room back
            _withdraw(folder, [_INDEX_PART, *parts, *([] if replaced else files)])
        raise
    shown.close()
    return folder


def _publish(
    folder: Path,
    parts: Sequence[str],
    files: Sequence[str],
    rows: Sequence[tuple[str, int]],
    total: int,
    *,
    replaced: bool,
) -> None:
    """Give files that are written the names that they are found by, on one rank.

    [Note: one export or the other] Whoever reads through the index finds all of the old export or
    all of the new one, wherever this is cut short: the index names the new files first under the
    names that they were written under, then those get their own, then the index follows.

    Args:
        folder: they are in.
        parts: their names so far.
        files: their names from now on.
        rows: each leaf's name, and the number of its file.
        total: bytes of all leaves.
        replaced: whether any file of an export was there.
    """

    def write_index(names: Sequence[str]) -> None:
        where = {leaf: names[number] for leaf, number in rows}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        part = folder / _INDEX_PART
        disk.unlink(part)  # of an export that was cut short
        with disk.created(part) as file:
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            disk.append(file, memoryview(text.encode()))
            disk.sync(file)
        disk.rename(part, folder / INDEX)
        disk.sync_folder(folder)

    if replaced:
        write_index(parts)
        # transformers takes it before any index
        disk.unlink(folder / SINGLE)
    for part, name in zip(parts, files, strict=True):
        disk.unlink(folder / name)
        disk.link(folder / part, folder / name)
    write_index(files)
    for file in list(folder.iterdir()):
        # of the export that was there: it has no place in the index any more
        old = replaced and _EXPORTED.fullmatch(file.name) and file.name not in files
        if old or file.name in parts:
            disk.unlink(file)


def _withdraw(folder: Path, made: Sequence[str]) -> None:
    """Remove the files that an export made before it failed; what the index names stays."""
    named: set[str] = set()
    if (folder / INDEX).exists():
        try:
            named = {file.name for file in _members(folder)}
        except CheckpointError:  # nobody knows
            return
    _remove(folder, [name for name in made if name not in named])


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):  # an error is on its way already
            disk.unlink(folder / name)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


_ABOUT = "__metadata__"
_INDEX_PART = f".{INDEX}.part"
_EXPORTED = re.compile(r"\.?model-\d{5,}-of-\d{5,}\.safetensors(\.[0-9a-f]{8})?(\.part)?")


def is_safetensors(path: Path) -> bool:
    """Whether `path` is a safetensors file, an index of them, or a folder with either."""
    if path.is_dir():
        return (path / INDEX).exists() or (path / SINGLE).exists()
    return path.name.endswith((".safetensors", ".safetensors.index.json"))


def open_safetensors(
    path: Path,
    wanted: Sequence[str],
    on_bytes: Callable[[int], None],
    rename: Rename | None = None,
) -> Source:
    """A safetensors file, or what an index lists, as a source of parameters.

    Args:
        path: of the file, the index, or the folder with either.
        wanted: our keys.
        on_bytes: called with the bytes of each piece that is read.
        rename: see `our_names`.

    Raises:
        CheckpointError: a file is damaged, missing, or not in the folder; two prefixes fit as well.
    """
    found = {name: file for file in _members(path) for name in _names_in(file)}
    # as they are exported: what has no dotted name of its own goes by its path
    keys = {key.removeprefix("params."): key for key in wanted if key.startswith("params")}
    ours = our_names(list(keys), list(found), rename, str(path))
    leaves = {keys.get(to, f"params.{to}"): _lazy(found[n], n) for n, to in ours.items()}
    reader = LazyReader(leaves, on_bytes)
    # sizes, not contents: to compare those would cost a reading of all files
    identity = json.dumps(sorted((name, file.stat().st_size) for name, file in found.items()))
    renamed = renamed_params(ours, rename)
    source = Source(str(path), reader, reader.read_metadata(), identity=identity)
    return replace(source, renamed=renamed, names=list(found))


def _whole_leaves(params: PyTree, dtype: torch.dtype | None = None) -> list[Whole]:
    names = [key.removeprefix("params.") for key in keys("params", params)]
    return [_whole(name, x, dtype) for name, x in zip(names, tree.leaves(params), strict=True)]


def _whole(name: str, x: Any, dtype: torch.dtype | None) -> Whole:
    if not isinstance(x, Tensor):
        raise CheckpointError(
            f"params.{name} is a {type(x).__name__}; safetensors hold tensors only. Keep it out of "
            "the tree."
        )
    if not has_memory(x):
        raise CheckpointError(
            f"params.{name} is a {type(x).__name__} without memory of its own. Of an engine export "
            "engine.full_params(), or the first of engine.state."
        )
    to = dtype if dtype is not None and x.is_floating_point() else x.dtype

    def make(keep: bool) -> Tensor | None:
        # on every rank, whoever keeps it: it is a collective
        full = x.full_tensor() if isinstance(x, DTensor) else x
        return full.detach().to(to) if keep else None

    return Whole(name, to, tuple(x.shape), make)


def _made(leaf: Whole) -> Tensor:
    full = leaf.make(True)
    assert full is not None
    return full


def _files_of(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive leaves for each file."""
    borders, filled = [0], 0
    for i, size in enumerate(sizes):
        # a leaf is never cut: one that is larger than a file may be has a file of its own
        if filled and filled + size > limit:
            borders.append(i)
            filled = 0
        filled += size
    return [range(a, b) for a, b in zip(borders, [*borders[1:], len(sizes)], strict=True)]


def _members(path: Path) -> list[Path]:
    """The safetensors files of a file, an index, or a folder."""
    if path.is_dir():
        path = path / INDEX if (path / INDEX).exists() else path / SINGLE
    if not path.name.endswith(".json"):
        return [path]
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors: {error!r}.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{path} names the file {name!r}; it may name only files in its own folder. Don't "
                "trust it."
            )
    return [path.parent / name for name in names]


def _names_in(file: Path) -> Iterator[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield from opened.keys()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. It is damaged or no safetensors file."
        ) from error


def _lazy(file: Path, name: str) -> Lazy:
    with safe_open(file, framework="pt") as opened:
        view = opened.get_slice(name)
        shape, stored = tuple(view.get_shape()), view.get_dtype()
    by_name = {text: dtype for dtype, text in ST_DTYPES.items()}
    if stored not in by_name:
        raise CheckpointError(f"{file}: {name} is {stored}, which torch does not have.")

    def read(region: tuple[slice, ...]) -> Tensor:
        with safe_open(file, framework="pt") as opened:
            return opened.get_slice(name)[region] if region else opened.get_tensor(name)

    return Lazy(by_name[stored], shape, read)
