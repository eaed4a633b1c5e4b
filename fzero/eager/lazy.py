"""Tensors that look like full parameters and hold no memory: what reads them has them gathered.

[Note: lazy leaves] A `LazyLeaf` looks like the full leaf and holds no memory. Autograd takes it for
a leaf of its graph; below autograd, any operator that reads it gathers it. So whatever PyTorch can
do with a tensor works on it, old-style `autograd.Function`s and `torch.func` inside the model
function included, and its gradient is the full one, which the executor reduces. `fzero.stage` goes
past it, to the shard: that is the second leaf of the graph, whose gradient arrives reduced.

[Note: lazy parameters] A `LazyParameter` looks like the full parameter and holds no memory. It is a
leaf of autograd's graph. Below autograd, an operator that reads it gathers the unit that it belongs
to. A view of it (`weight.t()`) is lazy again, so what autograd and checkpoints save for backward
holds no memory either: backward gathers when it reads. A full parameter may therefore be freed at
any time; that costs another gather, never a value. Only the views that autograd's own nodes make in
backward are plain: the next line of their formula reads them, and nobody keeps them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fzero.eager.memoryless import Memoryless
from fzero.eager.owned import grad_of_owned, refuse_accumulate_hook
from fzero.errors import FzeroError
from fzero.functional.tasks import runs_own_node
from fzero.functional.uncompiled import uncompiled
from fzero.inference import outside_inference
from fzero.layout import LeafLayout

Geometry = tuple[torch.Size, tuple[int, ...], int]  # sizes, strides and offset


class Source(Protocol):
    """What brings full parameters."""

    def full(self, index: int, /) -> Tensor:
        """The full parameter, gathered unless it is there."""
        ...


class ParameterSource(Source, Protocol):
    """The same for the parameters of a module."""

    leaves: Sequence[LeafLayout]
    device: torch.device

    def is_writable(self, index: int, /) -> bool:
        """Whether what is written to the full parameter will count."""
        ...


L = TypeVar("L", bound=Tensor)


class Viewed:
    """Where a view of a parameter lies in it.

    Args:
        geometry: its sizes, strides and offset.
        conjugate: torch keeps this bit beside its geometry.

    Attributes:
        views: those of this view, by the operator that makes them of nothing else.
    """

    def __init__(self, geometry: Geometry, conjugate: bool) -> None:
        self.geometry, self.conjugate = geometry, conjugate
        self.views: dict[Any, Any] = {}

    @classmethod
    def of(cls, view: Tensor, x: "LazyParameter") -> "Viewed":
        """Of a view that was made of the full parameter in the place of `x`."""
        if view.dtype != x.dtype:
            raise FzeroError(
                f"the parameter {x.leaf.name!r} was viewed as {view.dtype}, and what is written to "
                "such a view would be lost at stage 3. Call p.clone() first, then the same on that."
            )
        return cls((view.size(), view.stride(), view.storage_offset()), view.is_conj())  # pyright: ignore

    def lazy(self, x: "LazyParameter") -> "LazyParameter":
        """A tensor that lies there and is lazy."""
        view = LazyParameter(x.source, x.leaf_index, self.geometry)
        view.conjugate, view.views = self.conjugate, self.views
        return view


class LazyLeaf(Memoryless):
    """A full leaf that is gathered by the first operator that reads it; see [Note: lazy leaves].

    Attributes:
        shard: this rank's part; it asks for a gradient if the leaf is trained.
        leaf: how the leaf is split.
        leaf_index: its index in the tree.
        source: whatever gathers it.
    """

    shard: Tensor
    leaf: LeafLayout
    leaf_index: int
    source: Source
    geometry: Geometry | None = None  # views of it are plain tensors: it is gathered first
    conjugate = False

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls, shard: Tensor, leaf: LeafLayout, index: int, source: Source) -> "LazyLeaf":
        self: LazyLeaf = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls,
            leaf.shape,
            dtype=leaf.compute or leaf.dtype,
            device=shard.device,
            requires_grad=leaf.trainable,
        )
        # a leaf of its own: `stage` computes with the shard, and its gradient arrives reduced
        self.shard = shard.detach().requires_grad_(leaf.trainable)
        self.leaf, self.leaf_index, self.source = leaf, index, source
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        if schema is not None and schema.is_mutable:
            for x in _written(func, args, kwargs, LazyLeaf):
                raise changed_in_place(x.leaf.name)
        with outside_inference():  # autograd gives every view of a leaf a count of versions
            args, kwargs = pytree.tree_map_only(LazyLeaf, _full, (args, kwargs))
            if getattr(func, "is_view", False):
                return func(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        if schema is not None and torch.is_inference_mode_enabled():
            with _as_called(func, args):
                return func(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        return func(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    @property
    def data(self) -> Tensor:  # pyright: ignore
        """The same values outside of autograd's graph; who writes to them is counted."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # pyright: ignore
        raise changed_in_place(self.leaf.name)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"LazyLeaf({self.leaf.name!r}, {tuple(self.shape)}, {self.dtype})"


class GivenLeaf(Tensor):
    """A full leaf whose `.data` counts writes: torch's own would hide them.

    Attributes:
        leaf_name: as messages name it.
    """

    leaf_name: str

    @classmethod
    def of(cls, x: Tensor, name: str) -> "GivenLeaf":
        """A leaf of this name."""
        self = x.as_subclass(cls)
        self.leaf_name = name
        return self

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @property
    def data(self) -> Tensor:  # pyright: ignore
        """The same values outside of autograd's graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # pyright: ignore
        raise changed_in_place(self.leaf_name)


def changed_in_place(name: str, *, written: bool = False) -> FzeroError:
    """What to say of a parameter that the model function wrote to; `written`: the caller's own."""
    more = written_already(f"the parameter {name!r}") if written else ""
    return FzeroError(
        f"the model function changed the parameter {name!r} in place. Parameters are inputs of a "
        "pure function: the change would be lost on some ranks and kept on others. Compute a new "
        "tensor (w * 2 instead of w.mul_(2)); return what must live on as model state, and change "
        f"parameters between steps only.{more}"
    )


def written_already(what: str) -> str:
    """What else to say of a caller's tensor, where nothing was staged out."""
    return (
        f" Config(executor='eager') sees that after the call, so {what} holds what was written to "
        "it: make it anew before you go on."
    )


class LazyParameter(Memoryless):
    """A full parameter, or a view of one; see [Note: lazy parameters].

    Attributes:
        leaf: how the parameter is split.
        leaf_index: its index among all parameters.
        source: what gathers it.
        geometry: sizes, strides and offset of a view; None for the parameter itself.
        views: where its views lie, by the operator that makes them of nothing else.
    """

    leaf: LeafLayout
    leaf_index: int
    source: ParameterSource
    geometry: Geometry | None
    conjugate = False  # of a view: torch keeps this bit beside its geometry
    views: dict[Any, Any]

    fzero_plain = True
    grad = grad_of_owned  # pyright: ignore[reportAssignmentType]
    register_post_accumulate_grad_hook = refuse_accumulate_hook  # pyright: ignore

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(
        cls,
        source: ParameterSource,
        index: int,
        geometry: Geometry | None = None,
        requires_grad: bool = False,
    ) -> "LazyParameter":
        leaf = source.leaves[index]
        size, stride, offset = geometry or (leaf.shape, None, None)
        self: LazyParameter = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls,
            size,
            strides=stride,
            storage_offset=offset,
            dtype=leaf.compute or leaf.dtype,
            device=source.device,
            requires_grad=requires_grad,
        )
        self.leaf, self.leaf_index, self.source, self.geometry = leaf, index, source, geometry
        if geometry is None:
            self._is_param = True  # what isinstance(x, nn.Parameter) asks for
            self.views = {}
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # a view of what is gathered would keep that alive; operators of higher order have no such
        # attributes
        if getattr(func, "is_view", False) and isinstance(args[0], LazyParameter):
            if runs_own_node():  # which reads the view at once and keeps nothing of it
                return func(_placed(args[0]), *args[1:], **(kwargs or {}))
            return _view(args[0], func, args[1:], kwargs)
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            written = list(_written(func, args, kwargs or {}, LazyParameter))
            for x in written:
                if not x.source.is_writable(x.leaf_index):
                    raise FzeroError(
                        f"{func} would change the parameter {x.leaf.name!r} in place, and at stage "
                        "3 what is gathered is a copy: the change would be lost. Change it inside "
                        f"`with engine.gathered([{x.leaf.name!r}], modifier_rank=0):`, or through "
                        "engine.state or engine.load_state_dict."
                    )
            if written:
                args, kwargs = pytree.tree_map_only(LazyParameter, _full, (args, kwargs))
                func(*args, **(kwargs or {}))
                # an operator that writes returns what it wrote to, or nothing
                return written[0] if schema.returns else None
        # not tree_map: this runs once an operator that reads a parameter, and lists of tensors are
        # the only containers that operators take by position
        args = tuple(
            [
                x if type(x) is Tensor else _full(x) if type(x) is LazyParameter else _inner(x)
                for x in args
            ]
        )
        if kwargs:
            kwargs = pytree.tree_map_only(LazyParameter, _full, kwargs)
        if schema is not None and torch.is_inference_mode_enabled():
            with _as_called(func, args):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"LazyParameter({self.leaf.name!r}, {tuple(self.shape)}, {self.dtype})"

    @property
    def data(self) -> Tensor:  # pyright: ignore
        """The same values outside of autograd's graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # pyright: ignore
        # module.to() assigns what it was given if it has nothing to do, and `p.data += x`, at its
        # end, the view that it has written to
        if not (value is self or (isinstance(value, LazyParameter) and self._is_all_of(value))):
            raise FzeroError(
                f"the parameter {self.leaf.name!r} is sharded, and was to be replaced by a tensor "
                f"of {tuple(value.shape)}, {value.dtype}, {value.device}. Call .to() or .half(), "
                "and load weights, before the module gets its engine; or assign engine.state."
            )

    def _is_all_of(self, view: "LazyParameter") -> bool:
        place, mine = (
            (x.leaf_index, x.conjugate, x.shape, x.stride(), x.storage_offset())
            for x in (view, self)
        )
        return view.source is self.source and place == mine

    def __deepcopy__(self, memo: Any) -> Any:
        raise FzeroError(
            f"the parameter {self.leaf.name!r} is sharded, and a copy of the module would share "
            "its engine. Build a second module, and on every rank call "
            "second.load_state_dict(engine.state_dict())."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FzeroError(
            f"the parameter {self.leaf.name!r} is sharded and holds no values to save. Save "
            "engine.state_dict(), which every rank must call and a plain module loads; or "
            "engine.state, with fzero.checkpoint.save."
        )


def _as_called(func: Any, args: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
    """What an operator runs in that autocast has not seen in parts.

    Under inference_mode one that is made of others arrives whole, and runs below autocast, which
    would have seen those others. Whether the caller is under autocast is private in torch there,
    as is which operators are made of others; there is no public alternative.
    """
    composite = "CompositeImplicitAutograd"
    made_of = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)
    kinds = [x.device.type for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
    if not made_of or not kinds:
        return contextlib.nullcontext()
    (kind, *_) = kinds
    with torch._C._RestorePythonTLSSnapshot():  # pyright: ignore[reportAttributeAccessIssue]
        if not torch.is_autocast_enabled(kind):
            return contextlib.nullcontext()
        dtype = torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype)


def _full(x: "LazyLeaf | LazyParameter") -> Tensor:
    """What an operator reads."""
    view = _placed(x)
    # below autograd no operator looks at the bit that says so
    return view.resolve_conj() if x.conjugate else view


def _placed(x: "LazyLeaf | LazyParameter") -> Tensor:
    """What a view is taken of: in the full parameter's memory, a conjugate as a bit."""
    full = uncompiled(x.source.full, x.leaf_index)
    # a view is taken anew every time: what was gathered for the operator before may be freed by now
    if x.geometry is None:
        return full
    view = full.as_strided(*x.geometry)
    return view.conj() if x.conjugate else view


def _written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[L]
) -> Iterator[L]:
    """The tensors of this kind that an operator writes to, in its own words: its schema's."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for x in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(x, kind):
                    yield x


def _inner(x: Any) -> Any:
    if type(x) in (list, tuple) and any(type(y) is LazyParameter for y in x):
        return [_full(y) if type(y) is LazyParameter else y for y in x]
    return x


def _view(x: LazyParameter, func: Callable[..., Any], rest: tuple[Any, ...], kwargs: Any) -> Any:
    """A view that is lazy: computed on the full parameter, of which only the geometry is kept."""
    plain = not rest and not kwargs  # `t()`, `detach()`: once for each operator of a forward pass
    known = x.views.get(func) if plain else None
    if type(known) is Viewed and not torch.is_inference_mode_enabled():
        return known.lazy(x)  # as below, without its calls: this runs once an operator, too
    with outside_inference():  # autograd gives every view a count of versions
        if known is None:
            full = _placed(x)
            view = func(full, *rest, **(kwargs or {}))
            # under inference_mode operators arrive whole that may copy: reshape, contiguous, to
            held = full.untyped_storage()._cdata
            if any(y.untyped_storage()._cdata != held for y in pytree.tree_leaves(view)):
                return view
            known = pytree.tree_map_only(Tensor, lambda y: Viewed.of(y, x), view)
            if plain:
                x.views[func] = known
        if type(known) is Viewed:
            return known.lazy(x)
        return pytree.tree_map_only(Viewed, lambda viewed: viewed.lazy(x), known)
