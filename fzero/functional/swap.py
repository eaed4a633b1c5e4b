"""A module with other tensors in its slots, for one call. See [Note: slots] in slots.py.

[Note: held] What `forward` leaves in attributes of its module (`self.aux = ...`, a list of losses)
is put back, so that each call of a function of parameters begins alike. But a model function may
call `apply` and then read what was left, as it would read what `module(x)` leaves: a loss term of a
mixture of experts. Whoever runs a function of the user's therefore puts back when that ends, and
not after each `apply` inside: see `held_over`.
"""

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fzero.errors import TraceError, users_line
from fzero.functional.fit import check_fit, check_structure, rebuilt, shown
from fzero.functional.leftovers import CONTAINERS, TORCHS, note, same_items
from fzero.functional.reads import MISSING
from fzero.functional.slots import Buffers, SlotTable, fill_template, kind_of, site_of
from fzero.functional.torch_checkpoint import recomputing
from fzero.functional.transforms import Over, is_over


@contextlib.contextmanager
def swapped(
    plan: SlotTable,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    *,
    again: bool = False,
) -> Iterator[None]:
    """The module with these tensors in its slots; as it was before on the way out.

    `buffers` are copies of `given`, which the module may change. What a part leaves that is
    computed `again` has been left before: nobody reads it.
    """
    check_fit(plan, params, plan.params, "params")
    check_structure(plan)
    held = None if again else _HELD.get()
    entry = None if held is None else held.enter(plan, params)
    saved = _snapshot(plan.modules)
    call: _Call | None = None
    over = False
    try:
        for tensors, slots in ((params, plan.params), (buffers, plan.buffers)):
            for name, _, entries in slots:
                for index, table, key in entries:
                    plan.modules[index].__dict__[table][key] = tensors[name]
        if plan.caches:
            tensors = {**params, **buffers}
            for index, attr, template in plan.caches:
                attrs = plan.modules[index].__dict__
                try:
                    attrs[attr] = fill_template(attrs[attr], template, tensors)
                # forward has rebuilt the attribute in another form since its template was made
                except (LookupError, TypeError):
                    raise rebuilt(plan, index, f"its attribute {attr!r}") from None
        # what tells, when something is called back, whether forward has written into a copy
        versions = {name: buffer._version for name, buffer in buffers.items()}
        call = _Call(plan, params, buffers, versions, given)
        _wrap_hooks(plan, call.again)
        with recomputing(call.again):
            yield
        over = True
    finally:
        if call is not None and call.goes_on:
            call.left.extend(_left(plan, saved))
        try:
            if held is not None and entry is not None:
                held.leave(entry, saved, buffers, over=over)
            elif over and not again:
                _note_left(plan, saved, buffers)
        finally:
            if held is None or not over:
                _restore(saved)
            if held is not None and entry is not None:
                held.show(entry)


@contextlib.contextmanager
def held_over() -> Iterator["Held"]:
    """A function of the user's runs inside: what its calls leave stays until it ends.

    See [Note: held].
    """
    held = Held()
    token = _HELD.set(held)
    over = False
    try:
        yield held
        over = True
    finally:
        _HELD.reset(token)
        held.end(noted=over)


@contextlib.contextmanager
def held_by_nobody() -> Iterator[None]:
    """A part of a call runs inside, later on: what it leaves is put back at once."""
    token = _HELD.set(None)
    try:
        yield
    finally:
        _HELD.reset(token)


class _Attribute(NamedTuple):
    attrs: dict[str, Any]
    name: str
    value: Any  # MISSING: none


@dataclass(eq=False)
class _Kept:
    """What one call has left.

    Args:
        plan: whose call.
        params: of the call.
        saved: attributes and containers as it found them.
        hidden: what calls with other parameters had left: this one is not to compute with it.
        buffers: of the call.
        attrs: those that are others now, as they were.
        containers: of attributes, with their former items.
        names: of these attributes, by the number of the module.
    """

    plan: SlotTable
    params: Mapping[str, Tensor]
    hidden: list[_Attribute]
    saved: "_Saved" = field(default_factory=list)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    attrs: list[_Attribute] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    names: set[tuple[int, str]] = field(default_factory=set)


class Held:
    """What the calls inside of one function have left in modules."""

    def __init__(self) -> None:
        self.calls: list[_Kept] = []  # as they began: calls may nest

    def enter(self, plan: SlotTable, params: Mapping[str, Tensor]) -> _Kept:
        """A call begins. It finds no attribute of calls with other parameters."""
        hidden = []
        for call in reversed(self.calls):
            if call.plan is plan and any(x is not params[k] for k, x in call.params.items()):
                for attrs, name, before in call.attrs:
                    hidden.append(_Attribute(attrs, name, attrs.get(name, MISSING)))
                    _put(attrs, name, before)
        self.calls.append(_Kept(plan, params, hidden))
        return self.calls[-1]

    def show(self, call: _Kept) -> None:
        """What was hidden from a call is there again, but for what it has left itself."""
        own = {(id(attrs), name) for attrs, name, _ in call.attrs}
        for attrs, name, value in reversed(call.hidden):
            if (id(attrs), name) not in own:
                _put(attrs, name, value)

    def leave(
        self, call: _Kept, saved: "_Saved", buffers: Mapping[str, Tensor], *, over: bool
    ) -> None:
        """Restore all of a call but what is the user's to read: attributes that nn.Module lacks.

        Args:
            over: whether it has come to its end; if not, nothing is left of it.
        """
        if not over:
            self._forget(self.calls.index(call))
            return
        call.saved, call.buffers = saved, buffers
        left = _left_by(call, saved)
        try:
            _note_left(call.plan, saved, buffers, but=call.names)
        finally:
            lists = {id(live) for live, _ in call.containers}
            _restore([(live, copy) for live, copy in saved if id(live) not in lists])
            for one in left:
                _put(*one)

    def end(self, *, noted: bool) -> None:
        """Restore the rest, and note it as left if the function has come to its end."""
        calls = self.calls
        try:
            if noted and any(call.names for call in calls):
                first: dict[int, tuple[Any, Any]] = {}
                for call in calls:
                    for live, copy in call.saved:
                        first.setdefault(id(live), (live, copy))
                named = [(f"{i} {k}", x) for i, y in enumerate(calls) for k, x in y.buffers.items()]
                for call in calls:
                    _note_left(call.plan, [*first.values()], dict(named), only=call.names)
        finally:
            self._forget(0)

    def warn(self, part: str) -> None:
        """Say that nobody will find the tensors that calls have left, of a part that runs apart."""
        found = {}
        for call in self.calls:
            for index, name in sorted(call.names):
                values = pytree.tree_leaves(vars(call.plan.modules[index]).get(name))
                if any(isinstance(x, Tensor) and x.is_floating_point() for x in values):
                    found[f"{name!r} of {_named(call.plan, index)}"] = None
        if found:
            warnings.warn(
                f"{part} leaves tensors in the attribute {', '.join([*found][:3])}. It runs apart "
                "from the function around it, which gets what it returns and nothing else: the "
                "attribute is put back, and who reads it (a loss term of a mixture of experts) "
                "finds what was there before. Return such a tensor. What nobody else reads, as a "
                "cache, may stay.",
                stacklevel=users_line(),
            )

    def _forget(self, start: int) -> None:
        """Restore what is left of the calls from this one on."""
        for call in reversed(self.calls[start:]):
            order = {id(live): copy for live, copy in call.saved}
            for attrs, name, before in call.attrs:
                _put(attrs, name, before)
                _order(attrs, order[id(attrs)])
            _restore(call.containers)
        del self.calls[start:]


def _left_by(call: _Kept, saved: "_Saved") -> list[_Attribute]:
    """The user's attributes that a call has changed, as they are; fills in what they were."""
    copies = {id(live): copy for live, copy in saved}
    ours = {(index, attr) for index, attr, _ in call.plan.caches}
    left = []
    for index, module in enumerate(call.plan.modules):
        attrs = module.__dict__
        then = copies[id(attrs)]
        found = {x: y for x, y in attrs.items() if y is not then.get(x, MISSING)}
        if len(attrs) - len(found) < len(then):  # less than there was
            found.update({x: MISSING for x in then if x not in attrs})
        for x, value in found.items():
            if x not in TORCHS and (index, x) not in ours:
                call.attrs.append(_Attribute(attrs, x, then.get(x, MISSING)))
                left.append(_Attribute(attrs, x, value))
                call.names.add((index, x))
        for x, items in then.items():
            if type(items) not in CONTAINERS or x in TORCHS or (index, x) in ours:
                continue
            if not same_items(items, copies[id(items)]):
                call.containers.append((items, copies[id(items)]))
                call.names.add((index, x))
    return left


def _put(attrs: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        attrs.pop(name, None)
    else:
        attrs[name] = value


def _order(attrs: dict[str, Any], names: Iterable[str]) -> None:
    """Have the attributes in this order again, if they are these."""
    names = list(names)
    if list(attrs) != names and attrs.keys() == set(names):
        values = attrs.copy()
        attrs.clear()
        attrs.update((name, values[name]) for name in names)


def _there(name: str, value: Any) -> Any:
    """`value` for a computation in backward, or what raises when it is read."""
    return Over(value, repr(name)) if isinstance(value, Tensor) and is_over(value) else value


@dataclass(eq=False)
class _Call:
    """What one call of `apply` put into the slots, and the buffers it was given.

    Args:
        goes_on: whether something of it will be called back.
        left: once it is over and goes on, the attributes that forward has set.
    """

    plan: SlotTable
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    versions: Mapping[str, int]
    given: Mapping[str, Tensor]
    goes_on: bool = False
    left: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def again(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, a part of this call, as it will be called back in backward.

        By then the slots hold the module's own tensors again, so it swaps for itself. The buffers
        are those of now; what a recomputation changes in them is lost, as it was done before.
        Attributes are as forward has left them, such as the seeds of a reversible layer. See
        [Note: called back] in `fzero.functional.callbacks`.
        """
        self.goes_on = True
        buffers_then = {
            name: self.given[name]
            if value is self.buffers[name] and value._version == self.versions[name]
            else clone(value)
            for name, value in read_buffers(self.plan, self.buffers).items()
        }

        def called_back(*args: Any, **kwargs: Any) -> Any:
            params, buffers = (
                {name: _there(name, value) for name, value in tensors.items()}
                for tensors in (self.params, buffers_then)
            )
            clones = {name: x if isinstance(x, Over) else clone(x) for name, x in buffers.items()}
            with held_by_nobody(), swapped(self.plan, params, clones, buffers, again=True):
                for attrs, values in self.left:
                    attrs.update({name: _there(name, x) for name, x in values.items()})
                return fn(*args, **kwargs)

        return called_back


def _wrap_hooks(plan: SlotTable, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let hooks on the modules' backward see the tensors of this call, too."""
    for module in plan.modules:
        attrs = module.__dict__
        for table in ("_backward_hooks", "_backward_pre_hooks"):
            if hooks := attrs.get(table):
                # a dict of the call's own: the module's stays as it is, for the calls around this
                # one
                attrs[table] = OrderedDict((key, wrap(hook)) for key, hook in hooks.items())


_Saved = list[tuple[Any, Any]]


def _snapshot(modules: tuple[nn.Module, ...]) -> _Saved:
    """Shallow copies of every module's attributes and of the plain containers among them.

    The containers stay the same objects during the call, since others may hold them too: a list
    of auxiliary losses that two modules share must still be one list.
    """
    saved: _Saved = []
    seen: set[int] = set()
    for module in modules:
        attrs = module.__dict__
        saved.append((attrs, attrs.copy()))
        for value in attrs.values():
            if type(value) in CONTAINERS and id(value) not in seen:
                seen.add(id(value))
                saved.append((value, value.copy() if value else ()))
    return saved


def _left(plan: SlotTable, saved: _Saved) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes that are others than before the call, but for what `swapped` has put there."""
    before = {id(attrs): copy for attrs, copy in saved if isinstance(copy, dict)}
    ours = {(index, attr) for index, attr, _ in plan.caches}
    for index, module in enumerate(plan.modules):
        attrs = module.__dict__
        then = before[id(attrs)]
        found = {
            name: value
            for name, value in attrs.items()
            if value is not then.get(name) and name not in _PUT and (index, name) not in ours
        }
        if found:
            yield attrs, found


def _note_left(
    plan: SlotTable,
    saved: _Saved,
    buffers: Mapping[str, Tensor],
    *,
    only: Set[tuple[int, str]] | None = None,
    but: Set[tuple[int, str]] = frozenset(),
) -> None:
    ours = {(index, attr) for index, attr, _ in plan.caches} | but

    def named(index: int) -> str:
        return _named(plan, index)

    def ignored(index: int, name: str) -> bool:
        return (index, name) in ours or (only is not None and (index, name) not in only)

    note(plan.modules, named, saved, buffers, ignored)


def _named(plan: SlotTable, index: int) -> str:
    return f"{site_of(plan.prefixes[index])} ({kind_of(plan.modules[index])})"


_HELD: ContextVar[Held | None] = ContextVar("fzero_held", default=None)
_PUT = frozenset({"_backward_hooks", "_backward_pre_hooks", "forward"})


def _restore(saved: _Saved) -> None:
    for target, copy in saved:
        if not copy:
            if target:
                target.clear()
        elif isinstance(target, dict):
            target.update(copy)
            if len(target) != len(copy) or list(target) != list(copy):
                target.clear()
                target.update(copy)
        elif isinstance(target, set):
            target.clear()
            target.update(copy)
        else:
            target.clear()
            target.extend(copy)


def clone(tensor: Tensor) -> Tensor:
    """A copy that knows whether it was written to, in inference mode, too."""
    # Inference tensors have no version counter, which is what tells a changed buffer.
    if torch.is_inference_mode_enabled() or tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone()
    return tensor.clone()


def read_buffers(plan: SlotTable, given: Mapping[str, Tensor]) -> Buffers:
    """The buffers after the call: changed in place, or replaced (`self.ema = 0.9 * self.ema`)."""
    new: Buffers = {}
    for name, shape, entries in plan.buffers:
        found = [plan.modules[index].__dict__[table].get(key) for index, table, key in entries]
        # of a tied buffer forward may have replaced one slot only: that one is the new value
        replaced = {id(value): value for value in found if value is not given[name]}
        value = next(iter(replaced.values())) if replaced else given[name]
        if len(replaced) > 1 or not isinstance(value, Tensor) or value.shape != shape:
            found = ", ".join(shown(v) for v in replaced.values())
            raise TraceError(
                f"The call replaced buffer {name!r} ({tuple(shape)}) by {found}. A buffer must "
                "stay one tensor of the same shape: reset it outside the call, or keep such "
                "state as an input and output of forward."
            )
        new[name] = value
    return new
