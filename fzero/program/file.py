"""Files of plain data and tensors: a safetensors file, one of its tensors a text in JSON.

Nothing is unpickled. A checksum of all of it is in its metadata: one bit in a recorded number would
train otherwise, and no other look at a Program could tell.

References: the format, https://huggingface.co/docs/safetensors/index#format.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.errors import FzeroError
from fzero.numerics.host import ST_DTYPES, on_host

_DTYPES = {name: dtype for dtype, name in ST_DTYPES.items()}
_KEY = "json"
# safetensors has texts of one's own under the first
_METADATA, _CHECKSUM, _FORMS = "__metadata__", "blake2b", "forms"


def write(path: Path, data: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write a file, which is there whole or not at all.

    Args:
        path: its folder is made.
        data: what `json` takes.
        tensors: by name; dense, of any device.

    Raises:
        FzeroError: the disk is full, for one; what was begun is removed. Or a folder, a device or a
            pipe is there, which a file would take the place of.
    """
    text = bytearray(json.dumps(data, separators=(",", ":")).encode())
    header: dict[str, Any] = {}
    forms: dict[str, Any] = {}  # of tensors whose dtype the format lacks
    chunks, end = [], 0
    for name, x in {_KEY: torch.frombuffer(text, dtype=torch.uint8), **tensors}.items():
        flat = on_host(x).reshape(-1).view(torch.uint8)
        start, end = end, end + flat.numel()
        header[name] = {
            "dtype": ST_DTYPES.get(x.dtype, "U8"),
            "shape": list(x.shape) if x.dtype in ST_DTYPES else [end - start],
            "data_offsets": [start, end],
        }
        if x.dtype not in ST_DTYPES:
            forms[name] = str(x.dtype).removeprefix("torch."), list(x.shape)
        chunks.append(flat.numpy().tobytes())
    told = {_FORMS: json.dumps(forms)}
    told[_CHECKSUM] = _checksum([told, header], *chunks)
    head = json.dumps({_METADATA: told, **header}).encode()
    head += b" " * (-len(head) % 8)
    with whole(path, "Programs") as part, part.open("wb") as file:
        for chunk in (len(head).to_bytes(8, "little"), head, *chunks):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def whole(path: str | Path, what: str, *, streams: bool = False) -> Iterator[Path]:
    """A file beside `path`, which takes that name when the block ends, and is gone if it raises.

    Args:
        path: its folder is made.
        what: is written, for messages: "Programs".
        streams: whether a device or a pipe that is there is written to as it is.

    Raises:
        FzeroError: the disk is full, for one; or a folder, a device or a pipe is there.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole(f"{folder}/a.json", "times") as part:
        ...         _ = part.write_text("{}")
        ...     [found.name for found in Path(folder).iterdir()]
        ['a.json']
    """
    path = Path(os.path.realpath(path))  # a link stays one
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        if path.exists() and not path.is_file():
            if path.is_dir() or not streams:
                raise FzeroError(f"{path} is no file. Save {what} to a file of their own.")
            yield path
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            part.replace(path)
        finally:
            # gone already if all went well; else a full disk needs the room back
            part.unlink(missing_ok=True)
    except OSError as error:
        raise FzeroError(
            f"the {what} can't be written to {path}: {error}. What was there is as it was. See "
            f"that {path.parent} can be a folder and that its disk has room, then save again."
        ) from error


def read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """The data and the tensors of a file.

    Raises:
        OSError: it can't be read.
        ValueError, KeyError, TypeError: it is no such file, is damaged, or has no checksum.
    """
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    if size > len(content) - 8:
        raise ValueError(f"{path} is cut short, or no file of Programs")
    header = json.loads(content[8 : 8 + size])
    body = memoryview(content)[8 + size :]
    if (metadata := header.pop(_METADATA, None)) is None:
        raise ValueError(f"{path} has no checksum, as files of earlier versions")
    if metadata.pop(_CHECKSUM) != _checksum([metadata, header], body):
        raise ValueError(f"{path} is damaged: its checksum is another")
    forms = json.loads(metadata[_FORMS])
    start, end = header.pop(_KEY)["data_offsets"]
    data = json.loads(bytes(body[start:end]))
    tensors = {}
    for name, row in header.items():
        start, end = row["data_offsets"]
        if end > len(body):
            raise ValueError(f"{path} is cut short")
        flat = (
            torch.frombuffer(bytearray(body[start:end]), dtype=torch.uint8)
            if end > start
            else (torch.empty(0, dtype=torch.uint8, device="cpu"))
        )
        dtype, shape = forms.get(name, (row["dtype"], row["shape"]))
        tensors[name] = flat.view(_DTYPES.get(dtype) or getattr(torch, dtype)).reshape(shape)
    return data, tensors


def _checksum(head: Any, *body: bytes | memoryview) -> str:
    found = hashlib.blake2b(json.dumps(head).encode(), digest_size=16)
    for chunk in body:
        found.update(chunk)
    return found.hexdigest()
