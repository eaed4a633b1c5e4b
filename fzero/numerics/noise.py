"""Random numbers inside an optimizer's update, as a function of (seed, step, element of the leaf).

An optimizer sees this rank's part of each leaf. What it draws for a part is drawn for the whole
leaf, by every rank alike, and cut as the leaf is: the numbers don't depend on how many ranks there
are. Which leaf a tensor belongs to is followed through the operators: a result that has the shape
of the part is of the same leaf.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.errors import TraceError
from fzero.layout import LeafLayout


class WholeLeafNoise(TorchDispatchMode):
    """While it is entered, noise for a part is this rank's part of the noise for the leaf.

    Args:
        leaves: of the layout.
        groups: lists of this rank's parts, in the order of `leaves`.
        rank: along the shard axis.
    """

    def __init__(
        self, leaves: Sequence[LeafLayout], groups: Sequence[Sequence[Tensor]], rank: int
    ) -> None:
        super().__init__()
        self.rank = rank
        self._leaf: dict[int, LeafLayout] = {}
        self._refs: dict[int, Any] = {}
        for parts in groups:
            for part, leaf in zip(parts, leaves, strict=True):
                self._tell(part, leaf)

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
                leaf = self._leaf_of(x)
                if leaf is not None and x.shape == result.shape:
                    self._tell(result, leaf)
                    break
        return results

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors((args, kwargs)))
        leaf = self._leaf_of(tensors[0]) if tensors else None
        name = func._schema.name.removeprefix("aten::")
        shaped = len(tensors) == 1 and (name.endswith(("_like", "_")))
        if leaf is None or not shaped:
            raise TraceError(
                f"the optimizer draws random numbers with {name}, of which fzero can't tell to "
                "which leaf of the parameters they belong; every rank would draw others for its "
                "part. Draw them in the shape of a gradient or a parameter: torch.randn_like(g), "
                "torch.rand_like(g), or torch.empty_like(g).normal_()."
            )
        part = tensors[0]
        if leaf.dim is None or part.shape == leaf.shape:
            result = func(*args, **kwargs)
        else:
            whole = torch.empty(leaf.shape, dtype=part.dtype, device=part.device)
            drawn = leaf.split(func(whole, *args[1:], **kwargs), self.rank)
            result = part.copy_(drawn) if name.endswith("_") else drawn.contiguous()
        self._tell(result, leaf)
        return result

    def _leaf_of(self, x: Tensor) -> LeafLayout | None:
        # An id is given to another tensor once its own is gone.
        ref = self._refs.get(id(x))
        return self._leaf[id(x)] if ref is not None and ref() is x else None

    def _tell(self, x: Tensor, leaf: LeafLayout) -> None:
        self._refs[id(x)], self._leaf[id(x)] = weakref.ref(x), leaf


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
