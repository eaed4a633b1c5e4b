"""Each parameter has memory of its own: what two names see in one place is one parameter.

Where two parameters have elements in common, or a parameter and a buffer or an attribute, an update
in place of one also changes the other. That is lost on shards, which are cut apart, and in a pure
function. A tensor that sits in several slots is one parameter with several names, and stays so.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fzero.errors import ShardError
from fzero.functional.apart import apart

Named = Sequence[tuple[str, Tensor]]


def refuse_shared(params: Named, buffers: Named = (), attributes: Named = ()) -> None:
    """Raise a ShardError that names a parameter whose elements something else has as well.

    Parameters that lie beside each other in one storage are fine, and so is what is never trained:
    frozen parameters, and the others among themselves.

    Args:
        params: each once, with its name.
        buffers: likewise.
        attributes: tensors that modules hold otherwise.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> refuse_shared([("a", weight), ("b", torch.nn.Parameter(torch.ones(3, 2)))])
        >>> refuse_shared([("a", weight), ("b", torch.nn.Parameter(weight.data.T))])
        Traceback (most recent call last):
        ...
        fzero.errors.ShardError: the parameter 'a' and the parameter 'b' lie in the same memory, ...
    """
    together: dict[int, list[_Row]] = {}
    kinds = (("parameter", params), ("buffer", buffers), ("attribute", attributes))
    for kind, named in kinds:
        for name, x in named:
            if (key := storage_of(x)) is not None:
                found = together.setdefault(key, [])
                found.append(_Row(len(found), kind, name, x))
    for found in together.values():
        if len(found) > 1 and any(row.trained for row in found):
            _refuse_among(found)


class _Row(NamedTuple):
    turn: int
    kind: str
    name: str
    x: Tensor

    @property
    def trained(self) -> bool:
        return self.kind == "parameter" and self.x.requires_grad


def storage_of(x: Tensor) -> int | None:
    """What tells a tensor's storage from others; None if it has none, or no elements there."""
    if x.layout is not torch.strided or is_lazy(x):
        return None
    try:
        return x.untyped_storage()._cdata if x.numel() else None
    except (RuntimeError, NotImplementedError):  # a wrapper, as transforms have
        return None


def _refuse_among(rows: list[_Row]) -> None:
    """Raise for two tensors of one storage, of which one is trained."""
    open_: list[tuple[int, _Row]] = []  # those that may reach into what comes, by their ends
    for row in sorted(rows, key=lambda row: _extent(row.x)):
        start, end = _extent(row.x)
        open_ = [(stop, other) for stop, other in open_ if stop > start]
        for _, other in open_:
            if (row.trained or other.trained) and _overlap(row.x, other.x):
                raise _shared(*sorted((row, other), key=lambda one: one.turn))
        open_.append((end, row))


def _extent(x: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor may have, and what comes after its last one."""
    last = sum(int((n - 1) * s) for n, s in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset())
    return start * x.element_size(), (start + last + 1) * x.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose extents overlap have an element in common."""
    if (a.is_contiguous() and b.is_contiguous()) or a.element_size() != b.element_size():
        return True

    def look() -> bool:
        low = min(a.storage_offset(), b.storage_offset())
        end = max(_extent(a)[1], _extent(b)[1]) // a.element_size()
        marks = torch.zeros(end - low, dtype=torch.bool)
        at = [marks.as_strided(x.shape, x.stride(), x.storage_offset() - low) for x in (a, b)]
        at[0].fill_(True)
        return bool(at[1].any())

    return apart(look)  # the tensors may be fake ones, and their mode in force


def _shared(first: _Row, second: _Row) -> ShardError:
    return ShardError(
        f"the parameter {first.name!r} and the {second.kind} {second.name!r} lie in the same "
        "memory, as a view or `.data` of one would: an update in place of one would change the "
        "other, and here each is updated, sharded and stored by itself. Give "
        f"{second.name!r} memory of its own (.clone()); or tie them: one nn.Parameter in both "
        "places (b.weight = a.weight), and a view of it computed in forward (a.weight.T). What "
        "forward itself left there, delete before."
    )
