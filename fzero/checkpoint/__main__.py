"""Look at checkpoints, check them, take parameters out.

python -m fzero.checkpoint inspect PATH       every leaf: its shape, dtype, pieces
python -m fzero.checkpoint verify PATH        every byte against its checksum
python -m fzero.checkpoint export PATH OUT    parameters as safetensors, for transformers

PATH is one checkpoint, or the folder of a run: then inspect and export take the newest whole one,
and verify checks all. Nothing here starts other processes, and no more than one leaf is in memory.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fzero.checkpoint.foreign.safetensors import Whole, write_folder
from fzero.checkpoint.format import manifest
from fzero.checkpoint.format.folders import latest, none_at
from fzero.checkpoint.format.manifest import Manifest
from fzero.checkpoint.format.reader import Boxed, open_checked
from fzero.checkpoint.format.verify import found_in, problems, table
from fzero.checkpoint.ranks import ranks_of
from fzero.errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or 1 if something is damaged or can't be done."""
    cli = argparse.ArgumentParser(
        "python -m fzero.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = cli.add_subparsers(dest="command", required=True)
    for name in ("inspect", "verify", "export"):
        command = commands.add_parser(name)
        command.add_argument("path", type=Path, metavar="PATH")
        if name == "export":
            command.add_argument("out", type=Path, metavar="OUT", nargs="?")
            command.add_argument("--dtype", help="such as bfloat16; as stored if not given")
            command.add_argument("--overwrite", action="store_true", help="replace what is there")
    args = cli.parse_args(arguments)
    try:
        if args.command == "verify":
            return _verify(args.path)
        folder = _newest(args.path)
        if args.command == "inspect":
            _say(table(manifest.read(folder)))
        else:
            here = folder.absolute()  # "." has no name
            out = args.out or here.parent / f"{here.name}-safetensors"
            _export(folder, out, args.dtype, overwrite=args.overwrite)
    except CheckpointError as error:
        # what is an argument in Python is a flag here
        sys.stderr.write(f"{str(error).replace('overwrite=True', '--overwrite')}\n")
        return 1
    return 0


def _verify(path: Path) -> int:
    damaged = 0
    for folder in found_in(path):
        wrong = problems(folder, shown=True)
        _say(f"{folder}: {'whole' if not wrong else 'DAMAGED'}")
        for text in wrong:
            _say(f"  {text}")
        damaged += bool(wrong)
    return 1 if damaged else 0


def _export(folder: Path, out: Path, dtype: str | None, *, overwrite: bool) -> None:
    found = manifest.read(folder)
    try:
        to = None if dtype is None else manifest.dtype_of(dtype.removeprefix("torch."))
    except KeyError as error:
        raise CheckpointError(f"--dtype {dtype}: torch has no such dtype; try bfloat16.") from error
    leaves = [
        _stored(folder, found, key, to if leaf.dtype.is_floating_point and to else leaf.dtype)
        for key, leaf in found.leaves.items()
        if key.startswith(("params.", "params[")) or key == "params"
    ]
    if not leaves:
        raise CheckpointError(f"{folder} holds no params, so there is nothing to export.")
    ranks = ranks_of([], 60.0)
    _say(str(write_folder(out.absolute(), leaves, ranks, overwrite=overwrite)))


def _stored(folder: Path, found: Manifest, key: str, dtype: torch.dtype) -> Whole:
    leaf = found.leaves[key]

    def make(keep: bool) -> Tensor:
        full = torch.empty(leaf.shape, dtype=dtype, device="cpu")
        for box, extent in leaf.boxes.items():
            part = full
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            with open_checked(folder / extent.file, found.files[extent.file]) as opened:
                stored = Boxed(opened, key, extent, box.sizes, leaf.dtype)
                stored.copy([0] * len(box.sizes), part, lambda nbytes: None)
        return full

    return Whole(key.removeprefix("params."), dtype, leaf.shape, make)


def _newest(path: Path) -> Path:
    if (path / manifest.NAME).exists():
        return path
    folder = latest(path)
    if folder is None:
        raise none_at(path, " The command verify says what is there.")
    return folder


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
