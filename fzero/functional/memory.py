"""Each parameter has memory of its own: what two names see in one place is one parameter.

Where two parameters have elements in common, or a parameter and a buffer or an attribute, an update
in place of one also changes the other. That is lost on shards, which are cut apart, and in a pure
function. A tensor that sits in several slots is one parameter with several names, and stays so.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import call, is_

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fzero.errors import FzeroError, ShardError
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
    rows = [
        (kind, name, x)
        for kind, named in (("parameter", params), ("buffer", buffers), ("attribute", attributes))
        for name, x in named
    ]
    trained = [kind == "parameter" and x.requires_grad for kind, _, x in rows]
    for i, j in overlapping([x for _, _, x in rows], trained):
        raise _shared(*rows[i][:2], *rows[j][:2])


def overlapping(tensors: Sequence[Tensor], matters: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors, by their numbers, that have an element in common.

    Args:
        tensors: on any devices.
        matters: one flag a tensor: of two whose flag is not set nobody asks.

    Examples:
        >>> x = torch.zeros(5)
        >>> list(overlapping([x[:3], x[3:], x[2:]], [True, True, False]))
        [(0, 2), (1, 2)]
    """
    together: dict[int, list[int]] = {}
    for i, x in enumerate(tensors):
        if (key := storage_of(x)) is not None:
            together.setdefault(key, []).append(i)
    for found in together.values():
        if len(found) > 1 and any(matters[i] for i in found):
            yield from _overlapping_among(found, tensors, matters)


class Apart:
    """Finds leaves that are written over and lie in the memory of others, call by call.

    Examples:
        >>> x, apart = torch.zeros(5), Apart()
        >>> apart.shared([x[:3], x[3:]], lambda: [True, True])
        >>> apart.shared([x, x[3:]], lambda: [True, False])
        (0, 1)
    """

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []

    def shared(
        self, tensors: Sequence[Tensor], written: Callable[[], Sequence[bool]]
    ) -> tuple[int, int] | None:
        """The numbers of two tensors that share an element, of which one is written; or None.

        Args:
            tensors: plain ones.
            written: tells which are; asked where they are not those of the last call.
        """
        # a loop hands in again what it got; without a line of Python for each
        if len(self._seen) == len(tensors) and all(map(is_, map(call, self._seen), tensors)):
            return None
        found = next(overlapping(tensors, written()), None)
        if found is None:
            self._seen = list(map(weakref.ref, tensors))
        return found


def storage_of(x: Tensor) -> int | None:
    """What tells a tensor's storage from others; None if it has none, or no elements there."""
    if x.layout is not torch.strided or is_lazy(x):
        return None
    try:
        return x.untyped_storage()._cdata if x.numel() else None
    except (RuntimeError, FzeroError):  # a wrapper, as transforms and engines have
        return None


def _overlapping_among(
    numbers: Sequence[int], tensors: Sequence[Tensor], matters: Sequence[bool]
) -> Iterator[tuple[int, int]]:
    """Those pairs of tensors of one storage."""
    open_: list[tuple[int, int]] = []  # those that may reach into what comes, by their ends
    for i in sorted(numbers, key=lambda i: extent(tensors[i])):
        start, end = extent(tensors[i])
        open_ = [(stop, j) for stop, j in open_ if stop > start]
        for _, j in open_:
            if (matters[i] or matters[j]) and _overlap(tensors[i], tensors[j]):
                yield min(i, j), max(i, j)
        open_.append((end, i))


def extent(x: Tensor) -> tuple[int, int]:
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
        end = max(extent(a)[1], extent(b)[1]) // a.element_size()
        marks = torch.zeros(end - low, dtype=torch.bool)
        at = [marks.as_strided(x.shape, x.stride(), x.storage_offset() - low) for x in (a, b)]
        at[0].fill_(True)
        return bool(at[1].any())

    return apart(look)  # the tensors may be fake ones, and their mode in force


def _shared(kind: str, name: str, other_kind: str, other: str) -> ShardError:
    return ShardError(
        f"the {kind} {name!r} and the {other_kind} {other!r} lie in the same memory, as a view or "
        "`.data` of one would: an update in place of one would change the other, and here each is "
        f"updated, sharded and stored by itself. Give {other!r} memory of its own (.clone()); or "
        "tie them: one nn.Parameter in both places (b.weight = a.weight), and a view of it "
        "computed in forward (a.weight.T). What forward itself left there, delete before."
    )
