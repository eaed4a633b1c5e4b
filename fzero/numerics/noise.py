"""Random numbers inside an optimizer's update, as a function of (seed, step, element of the leaf).

An optimizer sees this rank's part of each leaf. What it draws for a part is drawn for the whole
leaf, by every rank alike, and cut as the leaf is: the numbers don't depend on how many ranks there
are. Which leaf a tensor belongs to is followed through the operators: a result that has the shape
of the part is of the same leaf. Draws are counted for each leaf: where a part is empty, an
optimizer may draw none for it (`F.dropout` does not), and all others have their numbers still.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.errors import TraceError
from fzero.layout import LeafLayout
from fzero.operators import define


class WholeLeafNoise(TorchDispatchMode):
    """While it is entered, noise for a part is this rank's part of the noise for the leaf.

    Args:
        leaves: of the layout.
        groups: lists of this rank's parts, in the order of `leaves`.
        rank: along the shard axis; None: every rank has all of each leaf.
        around: a context for each draw, by its number.
    """

    def __init__(
        self,
        leaves: Sequence[LeafLayout],
        groups: Sequence[Sequence[Tensor]],
        rank: int | None,
        around: Callable[[int], contextlib.AbstractContextManager[object]],
    ) -> None:
        super().__init__()
        self.leaves, self.rank, self.around = leaves, rank, around
        self._place: dict[int, int] = {}  # of a tensor's leaf
        self._refs: dict[int, Any] = {}
        self._drawn_of: Counter[int | None] = Counter()
        for parts in groups:
            for place, part in enumerate(parts):
                self._tell(part, place)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and _random_name(func):
            return self._drawn(func, args, kwargs)
        results = func(*args, **kwargs)
        found = list(_tensors((args, kwargs)))
        for result in _tensors(results):
            for x in found:
                place = self._place_of(x)
                if place is not None and x.shape == result.shape:
                    self._tell(result, place)
                    break
        return results

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors((args, kwargs)))
        place = self._place_of(tensors[0]) if tensors else None
        name = func._schema.name.removeprefix("aten::")
        if len(tensors) != 1 or not name.endswith(("_like", "_")):
            place = None
        if place is None and self.rank is not None:
            raise TraceError(
                f"the optimizer draws random numbers with {name}, of which fzero can't tell to "
                "which leaf of the parameters they belong; every rank would draw others for its "
                "part. Draw them in the shape of a gradient or a parameter: torch.randn_like(g), "
                "torch.rand_like(g), or torch.empty_like(g).normal_()."
            )
        number = (0 if place is None else 1 + place) * _APART + self._drawn_of[place]
        self._drawn_of[place] += 1
        with self.around(number):
            if place is None:
                return func(*args, **kwargs)
            leaf, part = self.leaves[place], tensors[0]
            if self.rank is None or leaf.dim is None or part.shape == leaf.shape:
                result = func(*args, **kwargs)
            else:
                whole = torch.empty(leaf.shape, dtype=part.dtype, device=part.device)
                drawn = leaf.split(func(whole, *args[1:], **kwargs), self.rank)
                result = part.copy_(drawn) if name.endswith("_") else drawn.contiguous()
        self._tell(result, place)
        return result

    def _place_of(self, x: Tensor) -> int | None:
        # An id is given to another tensor once its own is gone.
        ref = self._refs.get(id(x))
        return self._place[id(x)] if ref is not None and ref() is x else None

    def _tell(self, x: Tensor, place: int) -> None:
        self._refs[id(x)], self._place[id(x)] = weakref.ref(x), place


_APART = 2**32  # more than a leaf has draws


def _site(number: int) -> None:
    return None


SITE_OF_NEXT = define("site(int number) -> ()", _site, _site)
"""Before a random operator of a recorded update: the number of its site."""


def noted(number: int) -> contextlib.AbstractContextManager[None]:
    """Around a draw of an update: where it is recorded, its site has this number."""
    SITE_OF_NEXT(number)
    return contextlib.nullcontext()


def _random_name(func: Any) -> bool:
    return "dropout" not in func._schema.name and "attention" not in func._schema.name


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
