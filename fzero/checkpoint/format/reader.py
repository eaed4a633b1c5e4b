"""Reading for `torch.distributed.checkpoint`: straight into the tensors that are there.

It comes a few MiB at a time. Every block is held against its checksum before it is used.
"""

import os
import stat
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from fzero.checkpoint.format import manifest
from fzero.checkpoint.format.boxes import Box
from fzero.checkpoint.format.disk import as_path, bytes_of
from fzero.checkpoint.format.manifest import BLOCK, Extent, File
from fzero.checkpoint.format.pieces import PIECE, pieces
from fzero.checkpoint.format.writer import THREADS, OnBytes
from fzero.errors import CheckpointError
from fzero.numerics.host import is_on_host


class Reader(StorageReader):
    """A checkpoint of fzero for `torch.distributed.checkpoint`: any model can read its leaves.

    Args:
        folder: of the step, with its manifest.
        on_bytes: called with the bytes of each piece that is read.

    Examples:
        >>> import tempfile, fzero, torch.distributed.checkpoint as dcp
        >>> where = fzero.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=3)
        >>> mine = {"params.w": torch.zeros(2)}
        >>> dcp.load(mine, storage_reader=Reader(where), no_dist=True)
        >>> mine
        {'params.w': tensor([1., 1.])}
    """

    def __init__(
        self, folder: str | os.PathLike[str], on_bytes: OnBytes = lambda nbytes: None
    ) -> None:
        # absolute at once: it may be read from another folder
        self.folder, self.on_bytes = as_path(folder).absolute(), on_bytes
        self.manifest = manifest.read(self.folder)

    def reset(self, checkpoint_id: Any = None) -> None:
        """The folder stays the one that it was made for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest as `torch.distributed.checkpoint` knows it."""
        return self.manifest.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The manifest is read already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan names into the planner's tensors, file by file from start to end."""
        by_file: dict[str, list[tuple[Extent, Box, ReadItem]]] = {}
        for item in plan.items:
            leaf = self.manifest.leaves[item.storage_index.fqn]
            offsets = tuple(item.storage_index.offset or (0,) * len(leaf.shape))
            # boxes of a leaf don't overlap, so the first element tells them apart
            box, extent = next((b, e) for b, e in leaf.boxes.items() if b.offsets == offsets)
            by_file.setdefault(extent.file, []).append((extent, box, item))
        for name in sorted(by_file):
            # Reading, checking and copying leave the interpreter to others: two at a time.
            with (
                open_checked(self.folder / name, self.manifest.files[name]) as file,
                ThreadPoolExecutor(THREADS) as pool,
            ):
                waiting = []
                # in the order of the file, which disks read ahead in
                for extent, box, item in sorted(by_file[name], key=lambda row: row[0].start):
                    key = item.storage_index.fqn
                    source = Boxed(file, key, extent, box.sizes, self.manifest.leaves[key].dtype)
                    target = planner.resolve_tensor(item).detach()
                    copy = pool.submit(source.copy, item.storage_offsets, target, self.on_bytes)
                    waiting.append((copy, item, target))
                for copy, item, target in waiting:
                    copy.result()
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A folder says all there is to say."""
        return checkpoint_id is None


class Open(NamedTuple):
    """An open file of a checkpoint."""

    path: Path
    descriptor: int

    def __enter__(self) -> "Open":
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self.descriptor)


def open_checked(path: Path, expected: File) -> Open:
    """A file of a checkpoint, if it is a plain one of the size that the manifest says.

    Raises:
        CheckpointError: it is missing, a link, or has another size.
    """
    try:
        # Without O_NONBLOCK opening a pipe that somebody put there would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened: {error.strerror}. The manifest names it: the checkpoint is "
            "not whole. Load another one (python -m fzero.checkpoint verify lists which are)."
        ) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size != expected.nbytes:
        os.close(descriptor)
        raise CheckpointError(
            f"{path} has {found.st_size} bytes, and the manifest says {expected.nbytes}. It was "
            "cut off or changed after the save; load another checkpoint (python -m "
            "fzero.checkpoint verify lists which are whole)."
        )
    return Open(path, descriptor)


class Boxed(NamedTuple):
    """A box on the disk, to be read in parts.

    Args:
        file: the file that it is in.
        key: the leaf's, for messages.
        extent: where it is.
        sizes: of the box.
        dtype: of the leaf.
    """

    file: Open
    key: str
    extent: Extent
    sizes: tuple[int, ...]
    dtype: torch.dtype

    def copy(self, offsets: Sequence[int], target: Tensor, on_bytes: OnBytes) -> None:
        """Copy the part of the box at `offsets`, of the target's shape, converting its dtype.

        Raises:
            CheckpointError: a block does not have its checksum.
        """
        first = self._start_in_file_order(offsets, target)
        if first is not None:
            self._read_into(bytes_of(target), first, on_bytes)
            return
        # by way of a buffer: the target has other columns, strides or dtype, or is on a device
        for piece in pieces(self.sizes, self.dtype.itemsize):
            box = _region(piece.cuts, self.sizes)
            low = [max(a, b) for (a, _), b in zip(box, offsets, strict=True)]
            high = [
                min(a + n, b + m) for (a, n), b, m in zip(box, offsets, target.shape, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            # only now: of a piece that nobody asked for not a byte is read
            data = self._read(piece.start, piece.nbytes)
            source = torch.frombuffer(data, dtype=self.dtype).view([n for _, n in box])
            part = target
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                source = source.narrow(dim, a - box[dim][0], b - a)
                part = part.narrow(dim, a - offsets[dim], b - a)
            part.copy_(source)
            on_bytes(part.numel() * self.dtype.itemsize)

    def _start_in_file_order(self, offsets: Sequence[int], target: Tensor) -> int | None:
        """Where in the box the target's bytes start, if they follow each other there as here."""
        # the usual case, a leaf of the same job: then nothing is copied twice
        same = target.dtype == self.dtype and is_on_host(target)
        if not same or tuple(target.shape[1:]) != self.sizes[1:]:
            return None  # the same rows, whole: or else the bytes are scattered
        rows = offsets[0] if offsets else 0
        return rows * torch.Size(self.sizes[1:]).numel() * self.dtype.itemsize

    def _read_into(self, target: memoryview, start: int, on_bytes: OnBytes) -> None:
        """Blocks that are asked for whole go straight into the tensor; the ends take a detour."""
        at = 0
        while at < len(target):
            room = len(target) - at
            size = min(PIECE, room // BLOCK * BLOCK)
            if (start + at) % BLOCK or not size:
                size = min(BLOCK - (start + at) % BLOCK, room)
                target[at : at + size] = self._read(start + at, size)
            else:
                self._fill(target[at : at + size], (start + at) // BLOCK)
            on_bytes(size)
            at += size

    def check(self, on_bytes: OnBytes) -> None:
        """Read all of it, and hold it against its checksums."""
        for piece in pieces((torch.Size(self.sizes).numel(),), self.dtype.itemsize):
            self._read(piece.start, piece.nbytes)
            on_bytes(piece.nbytes)

    def _read(self, start: int, nbytes: int) -> memoryview:
        """Bytes of the box, from blocks that are as they were written."""
        whole = torch.Size(self.sizes).numel() * self.dtype.itemsize
        first = start // BLOCK
        # To the end of the last block: a part of one has no checksum.
        stop = min(-(-(start + nbytes) // BLOCK) * BLOCK, whole)
        # a bytearray, because torch wants memory that may be written to
        data = memoryview(bytearray(stop - first * BLOCK))
        self._fill(data, first)
        return data[start - first * BLOCK :][:nbytes]

    def _fill(self, data: memoryview, first: int) -> None:
        """Read whole blocks from the one numbered `first`, and hold each against its checksum."""
        filled = 0
        while filled < len(data):
            at = self.extent.start + first * BLOCK + filled
            got = os.preadv(self.file.descriptor, [data[filled:]], at)
            # cut off since it was opened: the checksum will not fit
            if not got:
                break
            filled += got
        for i in range(0, len(data), BLOCK):
            block = first + i // BLOCK
            if zlib.crc32(data[i : i + BLOCK]) != self.extent.checks[block]:
                where = self.extent.start + block * BLOCK
                raise CheckpointError(
                    f"{self.file.path}: bytes {where} to {where + len(data[i : i + BLOCK])}, which "
                    f"hold a part of {self.key}, do not have their checksum. The file was damaged "
                    "after the save; load another checkpoint (python -m fzero.checkpoint verify "
                    "lists which are whole)."
                )


def _region(index: Sequence[tuple[int, int, int]], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The piece's (offset, size) along every dim."""
    region = [(0, size) for size in sizes]
    for dim, start, length in index:
        region[dim] = (start, length)
    return region
