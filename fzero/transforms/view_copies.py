"""Views of DTensors that torch gives in memory of their own, kept as if they shared their base's.

A view across the dim that is split (`x[0]`, `x[1:3]`, `x.diagonal()`) has elements that lie on
other ranks. Torch's rule gathers them first, and gives a view of what it has gathered: what is
written into that, or into its base afterwards, the other doesn't see.

Which views those are is told by the memory of local tensors, and it is the same ones on all ranks.
What is written into one comes back into its base by the view itself, taken of the full base; what
is written into its base it gets anew when it is next used. Both cost all-gathers.

[Note: outdated views] Not all that uses a view is an operator: `full_tensor`, a norm of a tree, a
step read its local tensor. So from a write into its base on a view is of a class where reading that
brings it up to date, and makes it what it was. Not at once: whether a view that nobody uses is
still there is up to the collector, and may differ between ranks. So who reads it must do so on all
of them, `to_local` included; what is returned is brought up to date at once.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from fzero.distributed.dtensor import beside, dtensor_spec, from_spec
from fzero.distributed.ragged import redistribute


class ViewCopies:
    """The views in use that are copies; what is run on DTensors is told to it, before and after."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()  # and the views of each, which share its memory

    def refresh(self, given: Any) -> None:
        """Before an operator: what was written into bases comes into the views that it gets."""
        if self._copies:
            for x in dtensors(given):
                if (copy := self._copies.get(x)) is not None:
                    copy.refresh()

    def note(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """After an operator: it may have given a view, or written into one or its base."""
        if self._copies:
            for x in dtensors(written(func, args, kwargs)):
                self._outdate(x)
                if (copy := self._copies.get(x)) is not None:
                    self._bring_back(copy)
        if not gives_views(func) or not isinstance(base := args[0], DTensor):
            return
        # what is kept is no key itself, which would never go
        alias = torch.ops.aten.detach.default
        for i, out in enumerate(tree_leaves(found)):
            if not isinstance(out, DTensor) or out is base:
                continue
            above = self._copies.get(base)
            if _memory(out) != _memory(base):
                above = _Copy(alias(out), alias(base), func, args[1:], kwargs, i, above)
            if above is not None:
                self._copies[out] = above
                above.views[out] = None

    def _outdate(self, base: DTensor) -> None:
        memory = _memory(base)
        for copy in self._all():
            if not copy.outdated and _memory(copy.base) == memory:
                copy.outdate()
                self._outdate(copy.itself)  # and the copies of what it has

    def _all(self) -> Iterable["_Copy"]:
        found: dict[_Copy, None] = {}
        for one in self._copies.values():
            copy: _Copy | None = one
            while copy is not None and copy not in found:
                found[copy] = None
                copy = copy.above
        return list(found)

    def _bring_back(self, copy: "_Copy") -> None:
        whole = full_local(copy.base)
        copy.view_of(whole).copy_(full_local(copy.itself))
        copy.base.copy_(beside(whole_dtensor(whole, copy.base.device_mesh), copy.base))
        self._outdate(copy.base)
        copy.renewed()
        if copy.above is not None:
            self._bring_back(copy.above)


@dataclass(eq=False)
class _Copy:
    itself: DTensor
    base: DTensor
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int  # among the views that `func` gives
    above: Optional["_Copy"]  # of which its base is a view
    outdated: bool = False
    views: Any = field(default_factory=WeakTensorKeyDictionary)  # that users have of its memory

    def view_of(self, base: Any) -> Any:
        return tree_leaves(self.func(base, *self.args, **self.kwargs))[self.place]

    def refresh(self) -> None:
        if self.above is not None:
            self.above.refresh()
            # what it has got anew it has for those below, too
        if self.outdated:
            local = self.itself._local_tensor
            # what was made under inference mode may be written there alone
            with torch.inference_mode(local.is_inference()), torch.no_grad():
                local.copy_(self.view_of(self.base)._local_tensor)
            self.renewed()

    def outdate(self) -> None:
        """Its base has been written into; see [Note: outdated views]."""
        self.outdated = True
        for view in self.views:
            kind: Any = type(view)
            if not issubclass(kind, _Outdated):
                vars(view)[_COPY] = self
                view.__class__ = _outdated(kind)

    def renewed(self) -> None:
        """It has what its base has."""
        self.outdated = False
        for view in self.views:
            kind: Any = type(view)
            if issubclass(kind, _Outdated):
                view.__class__ = kind.was
                vars(view).pop(_COPY, None)


_COPY = "fzero_view_copy"


def _slot() -> Any:
    """The descriptor of a DTensor's local tensor: private, as is the attribute that it is of.

    Looked up when it is used: where a torch has none, what needs it says so, and nothing else does.
    """
    return DTensor._local_tensor


class _Outdated:
    __slots__ = ()
    was: type[DTensor]


@functools.cache
def _outdated(kind: type[DTensor]) -> Any:
    """A class of DTensors like `kind` that are brought up to date when they are read."""

    def read(self: Any) -> Tensor:
        vars(self)[_COPY].refresh()
        return _slot().__get__(self)

    def shown(self: Any, **_: Any) -> str:
        # by one rank alone, as in a message or a debugger
        return f"{kind.__name__}(outdated: {_slot().__get__(self)}, {self._spec})"

    members: dict[str, Any] = {"__slots__": (), "was": kind, "__repr__": shown}
    members["_local_tensor"] = property(read, _slot().__set__)
    return type(kind.__name__, (_Outdated, kind), members)


# --------------------------------------------------------------------------- what operators do
@functools.cache
def gives_views(func: Any) -> bool:
    """Whether an operator's results share their memory with what it gets.

    >>> gives_views(torch.ops.aten.select.int), gives_views(torch.ops.aten.add_.Tensor)
    (True, False)
    """
    return any(out.alias_info and not out.alias_info.is_write for out in func._schema.returns)


@functools.cache
def _writes(func: Any) -> list[tuple[int, str]]:
    found = enumerate(func._schema.arguments)
    return [(i, arg.name) for i, arg in found if arg.alias_info and arg.alias_info.is_write]


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes into.

    >>> written(torch.ops.aten.add_.Tensor, (1, 2), {})
    [1]
    """
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in _writes(func)]


def dtensors(given: Any) -> Iterable[DTensor]:
    """The DTensors among arguments.

    >>> list(dtensors([1, torch.ones(2)]))
    []
    """
    return [x for x in tree_leaves(given) if isinstance(x, DTensor)]


def _memory(x: DTensor) -> int:
    local = _slot().__get__(x)  # as it is: see [Note: outdated views]
    # of a collective on its way, that of what it will have written
    return getattr(local, "elem", local).untyped_storage()._cdata


# ------------------------------------------------------------------------- from and to full tensors
def full_local(x: DTensor) -> Tensor:
    """The full tensor outside of autograd, by one all-gather; all ranks must call it.

    >>> from fzero.distributed.mesh import resolve_mesh
    >>> mesh = resolve_mesh(None, "cpu").device_mesh
    >>> full_local(whole_dtensor(torch.ones(2), mesh))
    tensor([1., 1.])
    """
    with torch.no_grad():
        detached: Any = x.detach()
        return redistribute(detached, x.device_mesh, _replicated(x.device_mesh))._local_tensor


def whole_dtensor(x: Any, mesh: DeviceMesh) -> Any:
    """A tensor that every rank has, as a DTensor; what is none as it is.

    >>> whole_dtensor(3, None)
    3
    """
    if not isinstance(x, Tensor):
        return x
    return from_spec(x, dtensor_spec(mesh, _replicated(mesh), x.shape, x.stride(), x.dtype))


def _replicated(mesh: DeviceMesh) -> list[Replicate]:
    return [Replicate()] * mesh.ndim
