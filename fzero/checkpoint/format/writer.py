"""Where `torch.distributed.checkpoint` writes to and reads from: safetensors and a JSON manifest.

Each rank writes one safetensors file with its boxes; the leading rank writes the manifest. What is
read goes straight into the tensors that are there, a few MiB at a time, and every block of it is
held against its checksum first.

References: the format of the files, https://huggingface.co/docs/safetensors/index#format.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    Metadata,
    SavePlan,
    SavePlanner,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fzero.checkpoint.format import disk, manifest
from fzero.checkpoint.format.boxes import Box
from fzero.checkpoint.format.manifest import BLOCK, Extent, File, Leaf, Manifest
from fzero.checkpoint.format.pieces import Checks, stream
from fzero.errors import CheckpointError
from fzero.numerics.host import ST_DTYPES

OnBytes = Callable[[int], None]

THREADS = 2


class Written(NamedTuple):
    """A box on the disk, and the file it is in."""

    extent: Extent
    file: File


class Writer(StorageWriter):
    """One rank's boxes into one safetensors file of a folder; the leading rank adds the manifest.

    Args:
        folder: where the files go; not yet visible to readers.
        name: of this rank's file.
        on_bytes: called with the bytes of each piece that is written.
        pool: computes checksums beside the writing; None: one after the other.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        on_bytes: OnBytes = lambda nbytes: None,
        pool: Executor | None = None,
    ) -> None:
        self.folder, self.name, self.on_bytes, self.pool = folder, name, on_bytes, pool

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the boxes of the plan one after the other; returns once they are on the disk."""
        results = []
        if plan.items:
            items = list(map(_described, plan.items))
            tensors = (_resolved(planner, item) for item in plan.items)
            path = self.folder / self.name
            written = write_file(path, items, tensors, on_bytes=self.on_bytes, pool=self.pool)
            for item, (_, dtype, shape), one in zip(plan.items, items, written, strict=True):
                nbytes = torch.Size(shape).numel() * dtype.itemsize
                results.append(WriteResult(item.index, nbytes, one))
        # torch wants a future, and all is done: a save in the background has its thread already
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, on the leading rank, once all ranks' boxes are there."""
        found = {result.index: result.storage_data for rank in results for result in rank}
        # a rank without a box has no file: it is named by no box either
        files = {one.extent.file: one.file for one in found.values()}
        leaves = {}
        for key, leaf in metadata.state_dict_metadata.items():
            boxes = {}
            for chunk in leaf.chunks:  # pyright: ignore[reportAttributeAccessIssue]  # no bytes here
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                boxes[box] = found[MetadataIndex(key, box.offsets)].extent
            leaves[key] = Leaf(leaf.properties.dtype, tuple(leaf.size), boxes)  # pyright: ignore
        about: Mapping[str, Any] = metadata.planner_data
        text = Manifest(leaves=leaves, files=files, **about).dumps()
        with disk.created(self.folder / manifest.NAME) as file:
            disk.append(file, memoryview(text.encode()))
            disk.sync(file)
        # The ranks' files are entries of it as well; all must be there before it gets its name.
        disk.sync_folder(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A folder says all there is to say."""
        return checkpoint_id is None


def write_file(
    path: Path,
    items: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterator[Tensor],
    *,
    about: Mapping[str, str] | None = None,
    on_bytes: OnBytes = lambda nbytes: None,
    pool: Executor | None = None,
) -> list[Written]:
    """A new safetensors file, written a piece at a time; returns once it is on the disk.

    Args:
        path: of the file, which must not be there yet.
        items: (key, dtype, shape) of each tensor, in the order they are written.
        tensors: the tensors, each asked for when its turn comes.
        about: texts for the file's own metadata.
        on_bytes: called with the bytes of each piece.
        pool: computes checksums beside the writing; None: one after the other.

    Returns:
        Where each tensor is.

    Raises:
        OSError: the disk is full, for one.
    """
    header = _header(items, about)
    extents = []
    with disk.created(path) as file:
        disk.append(file, memoryview(header))
        start = len(header)
        for (key, dtype, shape), tensor in zip(items, tensors, strict=True):
            # the header is on the disk already, and has said so
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), key
            checks, first = Checks(), start
            for data in stream(tensor):
                # The little ones aren't worth a thread.
                beside = pool.submit(checks.add, data) if pool and len(data) > BLOCK else None
                try:
                    disk.append(file, data)
                finally:
                    # Waited for in any case: the memory goes with the next piece.
                    beside.result() if beside else checks.add(data)
                on_bytes(len(data))
                start += len(data)
            extents.append(Extent(path.name, first, checks.done()))
        # before anybody is told where things are: the manifest must not name what a crash could
        # undo
        disk.sync(file)
    about_file = File(start, len(header), zlib.crc32(header))
    return [Written(extent, about_file) for extent in extents]


def _header(
    items: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], about: Mapping[str, str] | None
) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    start = 0
    for key, dtype, shape in items:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        # A dtype that the format lacks is kept as its bytes; the manifest knows better.
        name, sizes = (ST_DTYPES[dtype], list(shape)) if dtype in ST_DTYPES else ("U8", [nbytes])
        table[key] = {"dtype": name, "shape": sizes, "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // 64) * 64 - 8)  # tensors start at an aligned byte
    return len(text).to_bytes(8, "little") + text


def _described(item: WriteItem) -> tuple[str, torch.dtype, tuple[int, ...]]:
    """A name in the file for a box, its dtype and its shape."""
    data = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or data is None:
        raise CheckpointError(
            f"{item.index.fqn} is no tensor, and would be pickled. Save tensors only."
        )
    whole = data.chunk.sizes == data.size
    # names must differ within a file, and a rank may write several boxes of a leaf
    where = "" if whole else f"@{','.join(map(str, data.chunk.offsets))}"
    return f"{item.index.fqn}{where}", data.properties.dtype, tuple(data.chunk.sizes)


def _resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor.detach()
