"""Parameters of a module that are there only while something reads them.

[Note: lazy parameters] A `LazyParameter` looks like the full parameter and holds no memory. It is a
leaf of autograd's graph. Below autograd, an operator that reads it gathers the unit that it belongs
to. A view of it (`weight.t()`) is lazy again, so what autograd and checkpoints save for backward
holds no memory either: backward gathers when it reads. A full parameter may therefore be freed at
any time; that costs another gather, never a value.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fzero.distributed.transport import Flight, Traffic
from fzero.errors import FzeroError
from fzero.layout import LeafLayout

Geometry = tuple[torch.Size, tuple[int, ...], int]


class LazyParameter(Tensor):
    """A full parameter, or a view of one; see [Note: lazy parameters].

    Attributes:
        leaf: how the parameter is split.
        place: its place among all parameters.
        units: what gathers it.
        geometry: sizes, strides and offset of a view; None for the parameter itself.
    """

    leaf: LeafLayout
    place: int
    units: "Units"
    geometry: Geometry | None

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(
        cls,
        units: "Units",
        place: int,
        geometry: Geometry | None = None,
        requires_grad: bool = False,
    ) -> "LazyParameter":
        leaf = units.leaves[place]
        size, stride, offset = geometry or (leaf.shape, None, None)
        self: LazyParameter = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls,
            size,
            strides=stride,
            storage_offset=offset,
            dtype=leaf.compute or leaf.dtype,
            device=units.device,
            requires_grad=requires_grad,
        )
        self.leaf, self.place, self.units, self.geometry = leaf, place, units, geometry
        if geometry is None:
            self._is_param = True  # what isinstance(x, nn.Parameter) asks for
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # operators of higher order have no such attributes
        if getattr(func, "is_view", False) and isinstance(args[0], LazyParameter):
            return _view(args[0], func, args[1:], kwargs)
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            _refuse_writes(func, args, kwargs or {})
        args = tuple([_full(x) if type(x) is LazyParameter else _inner(x) for x in args])
        if kwargs:
            kwargs = pytree.tree_map_only(LazyParameter, _full, kwargs)
        return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"LazyParameter({self.leaf.name!r}, {tuple(self.shape)}, {self.dtype})"

    @property
    def data(self) -> Tensor:  # pyright: ignore
        """The same values outside of autograd's graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # pyright: ignore
        if value is not self:  # module.to() assigns what it was given if it has nothing to do
            raise FzeroError(
                f"the parameter {self.leaf.name!r} is sharded, and was to be replaced by a tensor "
                f"of {tuple(value.shape)}, {value.dtype}, {value.device}. Call .to() or .half(), "
                "and load weights, before the module gets its engine; or assign engine.state."
            )

    def __deepcopy__(self, memo: Any) -> Any:
        raise FzeroError(
            f"the parameter {self.leaf.name!r} is sharded, and a copy of the module would share "
            "its engine. Build a second module and load engine.full_params() into it."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FzeroError(
            f"the parameter {self.leaf.name!r} is sharded and holds no values to save. Save "
            "engine.full_params(), or engine.state with fzero.checkpoint.save."
        )


class Units:
    """The full parameters that are there now.

    Args:
        leaves: of all parameters.
        plan: places of the leaves that travel together.
        shards: this rank's part of each leaf.
        traffic: what gathers.
        device: where they live.
        keep: keep what was gathered until the end of backward (reshard_after_forward=False).
        prefetch: how many units ahead gathers are launched.
    """

    def __init__(
        self,
        leaves: Sequence[LeafLayout],
        plan: Sequence[Sequence[int]],
        shards: Sequence[Tensor],
        traffic: Traffic,
        device: torch.device,
        *,
        keep: bool,
        prefetch: int,
    ) -> None:
        self.leaves, self.plan, self.shards = leaves, plan, shards
        self.traffic, self.device, self.keep, self.prefetch = traffic, device, keep, prefetch
        self.unit_of = {place: unit for unit, places in enumerate(plan) for place in places}
        self.here: dict[int, Tensor] = {}
        self.flying: dict[int, Flight] = {}
        self.pins: dict[str, dict[int, Tensor]] = {}  # by the module that pinned them
        self.order: list[int] = []  # of units, since the last update
        self.expected: list[int] = []  # the same, one update earlier

    def full(self, place: int) -> Tensor:
        """The full parameter, gathered unless it is there."""
        full = self.here.get(place)
        if full is None:
            self._bring(self.unit_of[place])
            full = self.here[place]
        return full

    def reshard(self) -> None:
        """Free everything; what is under way and was not asked for, too."""
        for flight in self.flying.values():
            flight.wait()
        self.flying.clear()
        self.pins = {}
        self.here.clear()

    def pin(self, caller: str, units: Sequence[int]) -> None:
        """Gather these units and hold them while `caller`, a module, or modules inside it run."""
        around = {n: held for n, held in self.pins.items() if _is_around(n, caller)}
        self.pins = {**around, caller: {i: self.full(i) for u in units for i in self.plan[u]}}
        self.here.update(self.pinned)  # a later one may have displaced an earlier one

    def unpin(self, caller: str) -> None:
        """Hold what `caller` pinned no longer than anything else."""
        self.pins.pop(caller, None)

    @property
    def pinned(self) -> dict[int, Tensor]:
        """What is held by whatever module."""
        return {i: full for held in self.pins.values() for i, full in held.items()}

    def drop(self, places: Sequence[int]) -> None:
        """Free these: nothing is likely to read them again soon."""
        for place in places:
            if place not in self.pinned:
                self.here.pop(place, None)

    def turn(self) -> None:
        """An update begins: what is gathered from now on is new, in an order that is known."""
        self.reshard()
        self.expected, self.order = self.order, []

    def _bring(self, unit: int) -> None:
        if not self.keep:
            self.here.clear()
            self.here.update(self.pinned)
        flight = self.flying.pop(unit, None)
        if flight is None:
            flight = self._launch(unit)
        for place, full in zip(self.plan[unit], flight.wait(), strict=True):
            self.here[place] = full
        self.order.append(unit)
        at = len(self.order)
        if self.expected[at - 1 : at] == [unit]:
            for ahead in self.expected[at : at + self.prefetch]:
                if ahead not in self.flying and self.plan[ahead][0] not in self.here:
                    self.flying[ahead] = self._launch(ahead)

    def _launch(self, unit: int) -> Flight:
        places = self.plan[unit]
        return self.traffic.gather(
            [self.shards[i] for i in places], [self.leaves[i] for i in places]
        )


def _is_around(outer: str, inner: str) -> bool:
    return outer == "" or inner == outer or inner.startswith(outer + ".")


def _full(x: LazyParameter) -> Tensor:
    full = x.units.full(x.place)
    return full if x.geometry is None else full.as_strided(*x.geometry)


def _inner(x: Any) -> Any:
    if type(x) in (list, tuple) and any(type(y) is LazyParameter for y in x):
        return [_full(y) if type(y) is LazyParameter else y for y in x]
    return x


def _view(x: LazyParameter, func: Callable[..., Any], rest: tuple[Any, ...], kwargs: Any) -> Any:
    """A view that is lazy: computed on the full parameter, of which only the geometry is kept."""

    def lazy(y: Tensor) -> Tensor:
        if y.dtype != x.dtype:
            raise FzeroError(
                f"the parameter {x.leaf.name!r} was viewed as {y.dtype}, and what is written to "
                "such a view would be lost at stage 3. View a copy: p.clone().view(dtype)."
            )
        return LazyParameter(x.units, x.place, (y.size(), y.stride(), y.storage_offset()))  # pyright: ignore

    view = func(_full(x), *rest, **(kwargs or {}))
    return lazy(view) if type(view) is Tensor else pytree.tree_map_only(Tensor, lazy, view)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for x in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(x, LazyParameter):
                    raise FzeroError(
                        f"{func} would change the parameter {x.leaf.name!r} in place, and at stage "
                        "3 what is gathered is a copy: the change would be lost. Change parameters "
                        "through engine.state, or train at stage 2."
                    )
