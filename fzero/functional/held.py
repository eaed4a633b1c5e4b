"""What calls leave in a module's attributes, until the function that calls them ends.

[Note: held] What `forward` leaves in attributes of its module (`self.aux = ...`, a list of losses)
is put back, so that each call of a function of parameters begins alike. But a model function may
call `apply` and then read what was left, as it would read what `module(x)` leaves: a loss term of a
mixture of experts. Whoever runs a function of the user's therefore puts back when that ends, and
not after each `apply` inside: see `held_over`.

A call with other parameters (a teacher's) finds nothing of that: a cache made of the first ones'
would be taken for its own. After it, what it has not left itself is there again. Attributes that
every module has (hooks, `training`) are put back after each call.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fzero.errors import users_line
from fzero.functional.leftovers import CONTAINERS, TORCHS, note, same_items, set_attribute
from fzero.functional.reads import MISSING
from fzero.functional.slots import SlotTable, kind_of, site_of
from fzero.functional.turns import Turn, Turns, actor

Saved = list[tuple[Any, Any]]
"""Attributes and containers of modules, each with a shallow copy."""


def snapshot(modules: tuple[nn.Module, ...]) -> Saved:
    """Shallow copies of every module's attributes and of the plain containers among them.

    The containers stay the same objects during the call, since others may hold them too: a list
    of auxiliary losses that two modules share must still be one list.
    """
    saved: Saved = []
    seen: set[int] = set()
    for module in modules:
        attrs = module.__dict__
        saved.append((attrs, attrs.copy()))
        for value in attrs.values():
            if type(value) in CONTAINERS and id(value) not in seen:
                seen.add(id(value))
                saved.append((value, value.copy() if value else ()))
    return saved


def restore(saved: Saved) -> None:
    """Put all back as a snapshot has it."""
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


def holder() -> "Held | None":
    """Who holds what calls leave now; None: they put it back."""
    return _HELD.get()


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
    saved: Saved = field(default_factory=list)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    attrs: list[_Attribute] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    names: set[tuple[int, str]] = field(default_factory=set)


class Held:
    """What the calls inside of one function have left in modules."""

    def __init__(self) -> None:
        self.calls: list[_Kept] = []  # as they began: calls may nest
        self.turns: list[Turn | Turns] = []  # of modules in which something is left
        self.actor = actor()

    def enter(self, plan: SlotTable, params: Mapping[str, Tensor]) -> _Kept:
        """A call begins. It finds no attribute of calls with other parameters."""
        hidden = []
        for call in reversed(self.calls):
            if call.plan is plan and any(x is not params[k] for k, x in call.params.items()):
                for attrs, name, before in call.attrs:
                    hidden.append(_Attribute(attrs, name, attrs.get(name, MISSING)))
                    set_attribute(attrs, name, before)
        self.calls.append(_Kept(plan, params, hidden))
        return self.calls[-1]

    def show(self, call: _Kept) -> None:
        """What was hidden from a call is there again, but for what it has left itself."""
        own = {(id(attrs), name) for attrs, name, _ in call.attrs}
        for attrs, name, value in reversed(call.hidden):
            if (id(attrs), name) not in own:
                set_attribute(attrs, name, value)

    def leave(
        self, call: _Kept, saved: Saved, buffers: Mapping[str, Tensor], *, over: bool
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
        self._stay(call)
        try:
            note_left(call.plan, saved, buffers, but=call.names)
        finally:
            lists = {id(live) for live, _ in call.containers}
            restore([(live, copy) for live, copy in saved if id(live) not in lists])
            for one in left:
                set_attribute(*one)

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
                    note_left(call.plan, [*first.values()], dict(named), only=call.names)
        finally:
            try:
                self._forget(0)
            finally:
                while self.turns:
                    self.turns.pop().__exit__()

    def _stay(self, call: _Kept) -> None:
        """Keep the turn with a module of which something is left to read: [Note: turns]."""
        turn = call.plan.turn
        # a thread that was given this one's context can't give back for it
        if call.names and turn not in self.turns and self.actor is actor():
            turn.__enter__()
            self.turns.append(turn)

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
                set_attribute(attrs, name, before)
                _order(attrs, order[id(attrs)])
            restore(call.containers)
        del self.calls[start:]


def _left_by(call: _Kept, saved: Saved) -> list[_Attribute]:
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


def _order(attrs: dict[str, Any], names: Iterable[str]) -> None:
    """Have the attributes in this order again, if they are these."""
    names = list(names)
    if list(attrs) != names and attrs.keys() == set(names):
        values = attrs.copy()
        attrs.clear()
        attrs.update((name, values[name]) for name in names)


def note_left(
    plan: SlotTable,
    saved: Saved,
    buffers: Mapping[str, Tensor],
    *,
    only: Set[tuple[int, str]] | None = None,
    but: Set[tuple[int, str]] = frozenset(),
) -> None:
    """Note what a call leaves that is about to be put back, if somebody wants to know.

    Args:
        plan: whose call.
        saved: attributes and containers as they were.
        buffers: of the call.
        only: attributes that count, by the number of the module; None: all.
        but: those that don't.
    """
    ours = {(index, attr) for index, attr, _ in plan.caches} | but

    def named(index: int) -> str:
        return _named(plan, index)

    def ignored(index: int, name: str) -> bool:
        return (index, name) in ours or (only is not None and (index, name) not in only)

    note(plan.modules, named, saved, buffers, ignored)


def _named(plan: SlotTable, index: int) -> str:
    return f"{site_of(plan.prefixes[index])} ({kind_of(plan.modules[index])})"


_HELD: ContextVar[Held | None] = ContextVar("fzero_held", default=None)
