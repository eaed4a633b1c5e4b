"""What a checkpoint holds, and whether every byte of it is as it was written."""

import os
import zlib
from pathlib import Path

from fzero.checkpoint.format import folders, manifest
from fzero.checkpoint.format.manifest import Manifest
from fzero.checkpoint.format.reader import Boxed, open_checked
from fzero.checkpoint.progress import progress
from fzero.errors import CheckpointError


def found_in(path: Path) -> list[Path]:
    """The checkpoints that `path` means: itself, or those below it by step.

    Raises:
        CheckpointError: there are none.
    """
    there = [path] if (path / manifest.NAME).exists() else folders.steps(path)
    if not there:
        raise folders.none_at(path)
    return there


def problems(folder: Path, *, shown: bool = False) -> list[str]:
    """Everything that is wrong with a checkpoint: one text per damaged file or leaf; [] if whole.

    Args:
        folder: of one checkpoint.
        shown: whether long checks tell how far they are.

    Examples:
        >>> import tempfile, torch, fzero
        >>> folder = fzero.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)})
        >>> problems(folder)
        []
    """
    try:
        found = manifest.read(folder)
    except CheckpointError as error:
        return [str(error)]
    on_bytes = progress(f"verifying {folder.name}", found.nbytes, shown=shown)
    wrong = []
    for name, file in found.files.items():
        try:
            with open_checked(folder / name, file) as opened:
                header = os.pread(opened.descriptor, file.header_bytes, 0)
                # `load` goes by the manifest and never looks; other readers of safetensors go by
                # the header
                if zlib.crc32(header) != file.header_check:
                    wrong.append(f"{opened.path}: its header does not have its checksum.")
                for key, leaf in found.leaves.items():
                    for box, extent in leaf.boxes.items():
                        # a file at a time, as each is opened and checked once
                        if extent.file != name:
                            continue
                        try:
                            Boxed(opened, key, extent, box.sizes, leaf.dtype).check(on_bytes)
                        # on to the next: whoever asks wants to know of all that is damaged
                        except CheckpointError as error:
                            wrong.append(str(error))
        except CheckpointError as error:
            wrong.append(str(error))
    on_bytes.close()
    return wrong


def table(found: Manifest) -> str:
    """A checkpoint's leaves, one a line, with what they take.

    >>> import torch
    >>> print(table(Manifest(3, 2, {}, {"opt_state.lr": 0.1})))
    step 3, written by 2 ranks: 1 leaves, 0.0 MB in 0 files
    opt_state.lr  0.1
    """
    head = (
        f"step {found.step}, written by {found.world} ranks: "
        f"{len(found.leaves) + len(found.scalars)} leaves, {found.nbytes / 1e6:,.1f} MB "
        f"in {len(found.files)} files"
    )
    rows = [
        (key, f"{manifest.dtype_name(leaf.dtype)} {leaf.shape}", f"{len(leaf.boxes)} boxes")
        for key, leaf in found.leaves.items()
    ]
    rows += [(key, repr(value), "") for key, value in found.scalars.items()]
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    return "\n".join([head, *lines])
