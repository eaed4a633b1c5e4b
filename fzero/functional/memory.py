"""Each parameter has memory of its own, which can be written over.

What two names see in one place is one parameter.

Where two parameters have elements in common, or a parameter and a buffer or an attribute, an update
in place of one also changes the other. That is lost on shards, which are cut apart, and in a pure
function. A tensor that sits in several slots is one parameter with several names, and stays so.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import call, is_
from typing import Any

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
    """Finds what can't be written over leaf by leaf, call by call: see `why_unwritable`; and leaves
    that lie in the memory of others.

    Examples:
        >>> x, apart = torch.zeros(5), Apart()
        >>> apart.fault([x[:3], x[3:]], ["a", "b"].__getitem__, lambda: [True, True])
        >>> apart.fault([x, x[3:]], ["a", "b"].__getitem__, lambda: [True, False])
        'a and b lie in the same memory'
    """

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []
        self._where: Any = None

    def fault(
        self,
        tensors: Sequence[Tensor],
        name: Callable[[int], str],
        written: Callable[[], Sequence[bool]],
    ) -> str | None:
        """The first leaf that can't be written over, and why; None if all can.

        Args:
            tensors: plain ones, or what stands for them where these can be written over.
            name: of one, by its number.
            written: tells which are written over; asked where they are not those of the last call.
        """
        # a loop hands in again what it got; without a line of Python for each
        same = len(self._seen) == len(tensors) and all(map(is_, map(call, self._seen), tensors))
        where = _where(tensors)  # `x.data = y` puts the same object elsewhere
        if same and where is not None and where == self._where:
            return None
        flags = written()
        for i, x in enumerate(tensors):
            if flags[i] and (why := why_unwritable(x)):
                return f"{name(i)} {why}"
        if (pair := next(overlapping(tensors, flags), None)) is not None:
            return f"{name(pair[0])} and {name(pair[1])} lie in the same memory"
        if not torch.is_inference_mode_enabled():  # which allows more than holds after it
            self._seen, self._where = list(map(weakref.ref, tensors)), where
        return None


def _where(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Where tensors are, and how their elements lie; None if one can't tell."""
    try:
        dense = list(map(Tensor.is_contiguous, tensors))
        # nearly always all of them; to ask for strides takes eight times as long
        rest = [] if all(dense) else [x.stride() for x in tensors if not x.is_contiguous()]
        return list(map(Tensor.data_ptr, tensors)), dense, rest
    except RuntimeError:  # of a class that has no memory of its own
        return None


def why_unwritable(x: Tensor) -> str | None:
    """Why torch refuses to write over this tensor here, as words after its name; None if it can.

    Examples:
        >>> why_unwritable(torch.zeros(3))
        >>> why_unwritable(torch.zeros(1).expand(3))
        'has elements that are one number in memory, as expand() makes them'
        >>> with torch.inference_mode():
        ...     x = torch.zeros(3)
        >>> why_unwritable(x)
        "was made under torch.inference_mode(), outside of which torch can't write over it"
    """
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return "was made under torch.inference_mode(), outside of which torch can't write over it"
    if overlaps_itself(x):
        return "has elements that are one number in memory, as expand() makes them"
    return None


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of a tensor are one in memory.

    Examples:
        >>> x = torch.zeros(6)
        >>> overlaps_itself(x.view(2, 3).T), overlaps_itself(x.as_strided((2, 3), (1, 2)))
        (False, False)
        >>> overlaps_itself(x[:1].expand(3)), overlaps_itself(x.unfold(0, 3, 1))
        (True, True)
    """
    if storage_of(x) is None or x.is_contiguous():
        return False
    end = 1  # elements that the dims so far reach over
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < end:  # it may still step between them
                # the tensor may be a fake one, and its mode in force
                return not stride or apart(lambda: len(_places(x).unique()) < x.numel())
            end += stride * (size - 1)
    return False


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
        return bool(torch.isin(_places(a), _places(b)).any())

    return apart(look)  # the tensors may be fake ones, and their mode in force


def _places(x: Tensor) -> Tensor:
    """Where in its storage each element of a tensor is; in one dim."""
    start, end = (at // x.element_size() for at in extent(x))
    return torch.arange(start, end, device="cpu").as_strided(x.shape, x.stride(), 0).flatten()


def _shared(kind: str, name: str, other_kind: str, other: str) -> ShardError:
    return ShardError(
        f"the {kind} {name!r} and the {other_kind} {other!r} lie in the same memory, as a view or "
        "`.data` of one would: an update in place of one would change the other, and here each is "
        f"updated, sharded and stored by itself. Give {other!r} memory of its own (.clone()); or "
        "tie them: one nn.Parameter in both places (b.weight = a.weight), and a view of it "
        "computed in forward (a.weight.T). What forward itself left there, delete before."
    )
