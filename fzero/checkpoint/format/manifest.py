"""The manifest: what a checkpoint holds and where, as JSON that is checked before it is believed.

    {"checksum": "...", "manifest": {"format": "fzero checkpoint", "version": 1, "step": 42,
      "lineage": {"order": 3, "line": [[28, 2], [14, 1]]},
      "files": {"rank-00000.safetensors": {"bytes": 4211, "header": "..."}},
      "leaves": {"params.w": {"dtype": "float32", "shape": [4, 2], "boxes": [{"offsets": [0, 0],
        "sizes": [2, 2], "file": "rank-00000.safetensors", "start": 187, "checks": "..."}]}}}}

`checks` are CRC-32 of each `BLOCK` bytes of a box, the last one shorter, as hexadecimal digits laid
end to end: whoever reads a part of a box can check just the blocks that it touches. The lineage is
missing in what earlier releases wrote.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fzero.checkpoint.flatten import Scalar
from fzero.checkpoint.format.boxes import Box, are_disjoint
from fzero.checkpoint.lineage import UNKNOWN, Lineage
from fzero.checkpoint.lineage import parse as parse_lineage
from fzero.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "fzero checkpoint"
VERSION = 1
BLOCK = 2**20
# A leaf takes some hundred bytes of manifest, plus 8 per MiB of data: this is far beyond any.
MAX_BYTES = 2**30

# What `dumps` begins with, and so much of a file as holds it.
_START = re.compile(
    rb'\{"checksum": "[0-9a-f]{32}", "manifest": '
    + re.escape(f'{{"format": "{FORMAT}", "version": {VERSION},'.encode())
)
_START_BYTES = 200
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
# One name for each: no aliases such as torch.half. Quantised ones are never saved.
_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and name[0] != "q"
}


class Extent(NamedTuple):
    """Where the bytes of a box are.

    Args:
        file: name of the file, in the checkpoint's folder.
        start: first byte in it.
        checks: CRC-32 of each block of `BLOCK` bytes.
    """

    file: str
    start: int
    checks: tuple[int, ...]


class Leaf(NamedTuple):
    """One leaf: its dtype and full shape, and the boxes that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: dict[Box, Extent]

    @property
    def nbytes(self) -> int:
        """Bytes of the full leaf."""
        return math.prod(self.shape) * self.dtype.itemsize


class File(NamedTuple):
    """One file: its size, and the CRC-32 of its header, which is all before the first box."""

    nbytes: int
    header_bytes: int
    header_check: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: of the training run.
        world: ranks that wrote it.
        leaves: tensors by key.
        scalars: plain Python values by key.
        files: by name.
        lineage: which checkpoints it comes from.
        client: what a user keeps beside it, encoded; see `fzero.checkpoint.client`.
    """

    step: int
    world: int
    leaves: dict[str, Leaf]
    scalars: dict[str, Scalar] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    lineage: Lineage = UNKNOWN
    client: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def metadata(self) -> Metadata:
        """The same for `torch.distributed.checkpoint`."""
        tensors: dict[str, Any] = {}
        where = {}
        for key, leaf in self.leaves.items():
            tensors[key] = TensorStorageMetadata(
                TensorProperties(dtype=leaf.dtype),
                torch.Size(leaf.shape),
                [
                    ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                    for box in leaf.boxes
                ],
            )
            for box, extent in leaf.boxes.items():
                where[MetadataIndex(key, box.offsets)] = extent
        return Metadata(tensors, storage_data=where)

    def dumps(self) -> str:
        """As JSON, with its own checksum."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "world": self.world,
            # early: `peek` reads the first bytes only
            "lineage": self.lineage._asdict(),
            "scalars": self.scalars,
            "files": {
                name: {"bytes": f.nbytes, "header_bytes": f.header_bytes, "header": f.header_check}
                for name, f in self.files.items()
            },
            "leaves": {
                key: {
                    "dtype": dtype_name(leaf.dtype),
                    "shape": leaf.shape,
                    "boxes": [
                        {
                            "offsets": box.offsets,
                            "sizes": box.sizes,
                            "file": extent.file,
                            "start": extent.start,
                            "checks": "".join(f"{check:08x}" for check in extent.checks),
                        }
                        for box, extent in leaf.boxes.items()
                    ],
                }
                for key, leaf in self.leaves.items()
            },
        }
        if self.client is not None:
            # last: `peek` must find the lineage in the first bytes
            body["client"] = self.client
        return json.dumps({"checksum": _digest(body), "manifest": body})


def loads(text: str, where: str) -> Manifest:
    """A manifest from its JSON, every number in it checked against the others.

    Args:
        text: what `dumps` made, or what somebody else says is that.
        where: the file, for messages.

    Raises:
        CheckpointError: it is damaged, of another format or version, or contradicts itself.

    >>> manifest = Manifest(3, 1, {}, {"lr": 0.1})
    >>> loads(manifest.dumps(), "manifest.json") == manifest
    True
    """
    try:
        return _parse(json.loads(text), where)
    # whatever the parser trips over, by nesting too deep for one: nothing in a file is trusted
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not a manifest that can be read: {type(error).__name__}: {error}. The "
            "file is damaged; load another checkpoint (python -m fzero.checkpoint verify lists "
            "which are whole)."
        ) from error


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it cannot be believed.
    """
    path = folder / NAME
    try:
        size = path.stat().st_size
        # asked before it is read: a damaged one must not fill the memory
        if size > MAX_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes; a manifest has at most {MAX_BYTES}. The file is damaged."
            )
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. A checkpoint is a folder with a {NAME}; of a "
            "run's folder, which holds several, fzero.checkpoint.latest(folder) gives the newest."
        ) from error
    return loads(text, str(path))


def is_of_this_version(folder: Path) -> bool:
    """Whether its manifest begins as `dumps` has it begin, or is empty; the rest may be damaged.

    Raises:
        OSError: it can't be read, or is not there.
    """
    with (folder / NAME).open("rb") as file:
        start = file.read(_START_BYTES)
    return not start or _START.match(start) is not None


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name; KeyError if torch has none."""
    return _DTYPES[name]


def blocks(nbytes: int) -> int:
    """How many blocks so many bytes have."""
    return -(-nbytes // BLOCK)


def _digest(body: Any) -> str:
    # JSON keeps the order of keys and every digit: what was read digests as it was written.
    return hashlib.blake2b(json.dumps(body).encode(), digest_size=16).hexdigest()


def _parse(found: Any, where: str) -> Manifest:
    body = found["manifest"]
    if body["format"] != FORMAT:
        raise CheckpointError(f"{where} has the format {body['format']!r}; expected {FORMAT!r}.")
    if body["version"] != VERSION:
        raise CheckpointError(
            f"{where} has version {body['version']!r}, and this release of fzero reads version "
            f"{VERSION}. Load it with the release that wrote it, or a newer one."
        )
    # After the version: another one may have another checksum.
    if found["checksum"] != _digest(body):
        raise CheckpointError(
            f"{where} does not have the checksum that it says: the file is damaged. Load another "
            "checkpoint (python -m fzero.checkpoint verify lists which are whole)."
        )
    files = {
        _file_name(name, where): File(
            _count(f["bytes"]), _count(f["header_bytes"]), _count(f["header"])
        )
        for name, f in body["files"].items()
    }
    leaves = {
        key: _parse_leaf(key, leaf, files, where) for key, leaf in dict(body["leaves"]).items()
    }
    for key, value in body["scalars"].items():
        if not isinstance(value, Scalar):
            _refuse(where, key, f"the value {value!r:.60}, not a bool, int, float or str")
    lineage = parse_lineage(body["lineage"]) if "lineage" in body else UNKNOWN
    return Manifest(
        _count(body["step"]),
        _count(body["world"]),
        leaves,
        dict(body["scalars"]),
        files,
        lineage,
        body.get("client"),
    )


def _parse_leaf(key: str, leaf: Mapping[str, Any], files: Mapping[str, File], where: str) -> Leaf:
    shape = tuple(map(_count, leaf["shape"]))
    dtype = dtype_of(leaf["dtype"])
    boxes = {}
    for found in leaf["boxes"]:
        box = Box(tuple(map(_count, found["offsets"])), tuple(map(_count, found["sizes"])))
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            start + size <= full
            for start, size, full in zip(box.offsets, box.sizes, shape, strict=True)
        )
        # a repeated one would make up in number for elements that are nowhere
        if not inside or not box.numel or box in boxes:
            _refuse(where, key, f"the box {tuple(box)}, which is no part of shape {shape}")
        extent = Extent(
            _file_name(found["file"], where),
            _count(found["start"]),
            tuple(int(found["checks"][i : i + 8], 16) for i in range(0, len(found["checks"]), 8)),
        )
        nbytes = box.numel * dtype.itemsize
        # so no read goes beyond what was opened, whatever the numbers say
        if extent.file not in files or extent.start + nbytes > files[extent.file].nbytes:
            _refuse(
                where, key, f"{nbytes} bytes at {extent.start} of {extent.file}, beyond its end"
            )
        # a block without one would be read unchecked
        if len(extent.checks) != blocks(nbytes):
            _refuse(where, key, f"{len(extent.checks)} checksums for {blocks(nbytes)} blocks")
        boxes[box] = extent
    # elements that no box has would keep the values that were there before the load
    if sum(box.numel for box in boxes) != math.prod(shape) or not are_disjoint(list(boxes)):
        _refuse(where, key, f"boxes that do not add up to its shape {shape}")
    return Leaf(dtype, shape, boxes)


def _refuse(where: str, key: str, what: str) -> NoReturn:
    raise CheckpointError(
        f"{where} gives {key!r} {what}. The manifest contradicts itself; don't trust this "
        "checkpoint."
    )


def _file_name(name: Any, where: str) -> str:
    # Nothing that a path could be made of: the file is in the folder, or it is refused.
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise CheckpointError(
            f"{where} names the file {name!r}; a file of a checkpoint is in its own folder and "
            "named like 'rank-00000.safetensors'. Don't trust this checkpoint."
        )
    return name


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value
