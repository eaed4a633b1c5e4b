"""What a user keeps beside a checkpoint: plain data, as JSON in the manifest.

    {"epoch": 3, "seen": (1, 2)}  ⇄  {"epoch": 3, "seen": {"tuple": [1, 2]}}

What JSON has is itself; the rest is an object with one key that says what it is. Nothing else can
be written, so nothing else can be read: no class is looked up, and no code runs.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint import background
from fzero.checkpoint.format import disk, manifest
from fzero.checkpoint.load import choose
from fzero.errors import CheckpointError
from fzero.numerics.host import on_host

MAX_BYTES = 2**24  # of tensors, which make a manifest a third longer than they are


def client_state(path: str | os.PathLike[str]) -> Any:
    """What `save(..., client_state=...)` was given with this checkpoint, or None.

    Any rank may call it, alone or not; what it returns is a new object each time.

    Args:
        path: as for `load`, which takes the same checkpoint: the newest whole one of a folder.

    Raises:
        CheckpointError: there is no checkpoint, or it was not written by fzero.

    Examples:
        >>> import tempfile, fzero
        >>> run = tempfile.mkdtemp()
        >>> kept = {"epoch": 3, "best": float("inf"), "order": (2, 0, 1), 7: {"seed": b"xy"}}
        >>> _ = fzero.checkpoint.save(run, {"w": torch.ones(2)}, client_state=kept)
        >>> client_state(run) == kept
        True
    """
    background.wait()
    found = Path(choose(disk.as_path(path)))
    if not (found / manifest.NAME).exists():
        raise CheckpointError(f"{found} was not written by fzero, and has no client_state.")
    try:
        return decode(manifest.read(found).client)
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f"{found} has a client_state that nothing of fzero's has written: {error!r}. Don't "
            "trust this checkpoint."
        ) from error


def encode(value: Any) -> Any:
    """Plain data as what JSON can hold.

    Raises:
        CheckpointError: something in it is no plain data, and where.

    >>> encode({"a": (1, 2.5), 3: None})
    {'dict': [['a', {'tuple': [1, 2.5]}], [3, None]]}
    """
    room = [MAX_BYTES]
    try:
        return _encoded(value, "client_state", room)
    except RecursionError:
        raise CheckpointError(
            "client_state is nested too deep, or holds itself; keep plain data."
        ) from None


def compared(encoded: Any) -> dict[str, str]:
    """What ranks compare of an encoded client state: a text for each of its first keys.

    >>> compared(encode({"a": 1}))
    {"client_state['a']": '1'}
    """
    texts = {"client_state": encoded}
    if isinstance(encoded, dict) and "dict" in encoded:
        texts = {f"client_state[{key!r}]": value for key, value in encoded["dict"]}
    return {where: _short(json.dumps(value)) for where, value in texts.items()}


def decode(value: Any) -> Any:
    """What `encode` was given; ValueError, KeyError or TypeError if nothing was.

    >>> decode({"dict": [["a", {"tuple": [1, 2.5]}], [3, None]]})
    {'a': (1, 2.5), 3: None}
    """
    if isinstance(value, list):
        return [decode(x) for x in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return _DECODE[kind](inner)


def _encoded(value: Any, where: str, room: list[int]) -> Any:
    kind = type(value)
    # longer ones Python reads only by request
    if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= 4096):
        return value
    if kind is float:
        # JSON has no word for the others
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return [_encoded(x, f"{where}[{i}]", room) for i, x in enumerate(value)]
    if kind is tuple:
        return {"tuple": [_encoded(x, f"{where}[{i}]", room) for i, x in enumerate(value)]}
    if kind is dict:
        return {"dict": [_pair(k, x, f"{where}[{k!r}]", room) for k, x in value.items()]}
    if kind is bytes:
        return {"bytes": _text(value, where, room)}
    if kind is Tensor and value.layout == torch.strided and not value.is_quantized:
        data = on_host(value).flatten().view(torch.uint8)
        text = _text(bytes(disk.bytes_of(data)), where, room)
        return {"tensor": [manifest.dtype_name(value.dtype), list(value.shape), text]}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}. A client_state is plain data, which "
        "needs no code to be read: None, bool, int, float, str, bytes, dense tensors, and lists, "
        "tuples and dicts of these. Convert it: float(x), dict(x), torch.from_numpy(x), vars(x), "
        "x.state_dict()."
    )


def _pair(key: Any, value: Any, where: str, room: list[int]) -> list[Any]:
    if not _is_key(key):
        raise CheckpointError(
            f"{where}: a key is None, a bool, a number, a text, bytes or a tuple of these."
        )
    return [_encoded(key, f"the key of {where}", room), _encoded(value, where, room)]


def _is_key(key: Any) -> bool:
    # one that doesn't equal itself would never be found again
    plain = type(key) in (type(None), bool, int, float, str, bytes) and key == key
    return plain or (type(key) is tuple and all(map(_is_key, key)))


def _short(text: str) -> str:
    if len(text) <= 200:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:100]}..., digest {digest}"


def _text(data: bytes, where: str, room: list[int]) -> str:
    room[0] -= len(data)
    if room[0] < 0:
        raise CheckpointError(
            f"{where}: tensors and bytes of a client_state have at most {MAX_BYTES} bytes in all. "
            "Save large ones in the state, which may be any pytree: save(path, params, "
            "{'opt': opt_state, 'more': tensors})."
        )
    return base64.b64encode(data).decode()


def _tensor(parts: list[Any]) -> Tensor:
    name, shape, text = parts
    data = bytearray(base64.b64decode(text, validate=True))
    dtype = manifest.dtype_of(name)
    if not data and math.prod(shape) == 0:  # of nothing torch makes no view
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


_DECODE: Mapping[str, Any] = {
    "float": float,
    "tuple": lambda items: tuple(decode(x) for x in items),
    "dict": lambda pairs: {decode(k): decode(x) for k, x in pairs},
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "tensor": _tensor,
}
