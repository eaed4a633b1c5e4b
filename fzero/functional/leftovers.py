"""What a call leaves in a module's attributes, and `apply` puts back.

[Note: leftovers] In plain PyTorch a module may carry something from one call to the next in an
attribute (`self.hidden = h.detach()`, `self.calls += 1`). A function of parameters can't: `apply`
puts the attribute back, so each call would begin anew, without a word. Most of what modules leave
is never read by the next call, or is a cache of something that is the same each time. So who
records a call notes what it leaves, and records once more with that in place: another graph tells
that the next call depends on it. Tensors are stood in for, as those of a recording have no values;
a module that leaves one which depends on no input has a cache, and is left alone.

Where nothing is recorded there is no such proof. There only a number that a call has changed is
told of, and with a warning: it may be a counter that warms something up, or one that nobody reads.
"""

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.functional.carried import Doubt
from fzero.functional.outside import GLOBAL_HOOKS
from fzero.functional.reads import MISSING
from fzero.functional.transforms import Over, is_over

CONTAINERS = frozenset({list, dict, set, deque, defaultdict, OrderedDict})
Saved = Sequence[tuple[Any, Any]]  # attributes and containers, each with a shallow copy


class Leftover(NamedTuple):
    """An attribute that is another than before the call.

    Args:
        module: whose.
        place: how messages name it.
        name: of the attribute.
        before: its value, or MISSING; the container itself where its items are others.
        after: what stands for its new value, or for the items of the container.
        items: whether it is the items that are others.
    """

    module: nn.Module
    place: str
    name: str
    before: Any
    after: Any
    items: bool

    def put(self, doubt: Doubt) -> Callable[[], None]:
        """Put what was left in place, as the next call would find it; gives what undoes that.

        Args:
            doubt: whose numbers stand for those that were left.
        """
        attrs, after = self.module.__dict__, _doubted(self.after, doubt)
        if not self.items:
            attrs[self.name] = after
            return lambda: set_attribute(attrs, self.name, self.before)
        then = self.before.copy()
        _fill(self.before, after)
        return lambda: _fill(self.before, then)


@contextlib.contextmanager
def leftovers() -> Iterator[dict[tuple[int, str], Leftover]]:
    """Those of the calls inside, by module and attribute; of each the last."""
    found: dict[tuple[int, str], Leftover] = {}
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)


def note(
    modules: Sequence[nn.Module],
    named: Callable[[int], str],
    saved: Saved,
    buffers: Mapping[str, Tensor],
    ignored: Callable[[int, str], bool],
) -> None:
    """Note what the call leaves that is about to be put back, if somebody wants to know.

    Args:
        modules: of the call.
        named: how messages name that of a number.
        saved: their attributes and containers as they were.
        buffers: those of the call.
        ignored: whether an attribute, of the module of that number, isn't the user's.
    """
    found = _FOUND.get()
    if found is None:
        return
    copies = {id(live): copy for live, copy in saved}
    mode = get_proxy_mode()
    if mode is None:  # no second recording will tell what counts, and most of it does not
        _note_counters(modules, named, copies, ignored, found)
        return
    graph = mode.tracer.graph
    constant: set[fx.Node | None] = set()

    def varies(x: Tensor) -> bool:
        return _varies(x, graph, constant)

    for index, module in enumerate(modules):
        changed = [
            change
            for change in _changes(module.__dict__, copies)
            if change[0] not in _OWN
            and not ignored(index, change[0])
            and not (change[0] in _HOOKS and _by_hooks_of_all(change[2], copies))
        ]
        if changed and not constant:
            constant.update({_node_of(x, graph) for x in buffers.values()} | {None})
        try:
            for name, before, after, items in changed:
                place = f"the attribute {name!r} of {named(index)}"
                # hooks stay as they are
                stand_in = after if name in _HOOKS else _stand_in(after, varies)
                found[id(module), name] = Leftover(module, place, name, before, stand_in, items)
        except _Cache:
            for name, *_ in changed:
                found.pop((id(module), name), None)


def _by_hooks_of_all(after: Any, copies: Mapping[int, Any]) -> bool:
    """Whether what is new in a module's table of hooks comes of who has hooks on all modules.

    A mode such as torch's `CommDebugMode` is told of each call by these, and puts others onto the
    module that is called. It would at the next call, too: that is not forward's doing.
    """
    every = (vars(nn.modules.module).get(name, {}) for name in GLOBAL_HOOKS)
    owners = {id(_owner(hook)) for hooks in every for hook in hooks.values()} - {id(None)}
    if not owners:
        return False
    known = {id(x) for copy in copies.values() if isinstance(copy, dict) for x in copy.values()}
    return all(id(x) in known or id(_owner(x)) in owners for x in after.values())


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", None)


def _note_counters(
    modules: Sequence[nn.Module],
    named: Callable[[int], str],
    copies: Mapping[int, Any],
    ignored: Callable[[int, str], bool],
    found: dict[tuple[int, str], Leftover],
) -> None:
    """Of what a call leaves, the numbers that were numbers before."""
    for index, module in enumerate(modules):
        for name, before, after, _ in _changes(module.__dict__, copies):
            numbers = {type(before), type(after)} <= {int, float}
            if numbers and before != after and not ignored(index, name):
                place = f"the attribute {name!r} of {named(index)}"
                found[id(module), name] = Leftover(module, place, name, before, after, False)


class _Cache(Exception):
    """A value that would be the same at each call, or that nobody can stand in for."""


def _changes(
    attrs: dict[str, Any], copies: Mapping[int, Any]
) -> Iterator[tuple[str, Any, Any, bool]]:
    """Of each attribute that is another: its name, its values before and after, and whether these
    are items of the same container."""
    then = copies[id(attrs)]
    for name, value in attrs.items():
        before = then.get(name, MISSING)
        if value is not before:
            yield name, before, value, False
        elif type(value) in CONTAINERS and not same_items(value, copies.get(id(value), value)):
            yield name, value, value.copy(), True


def same_items(live: Any, copy: Any) -> bool:
    """Whether a container has the items that its copy has, or () if it had none."""
    if len(live) != len(copy):
        return False
    if isinstance(live, set) or not copy:
        return not copy or live == copy
    if isinstance(live, dict):
        return list(live) == list(copy) and all(live[key] is copy[key] for key in live)
    return all(map(lambda x, y: x is y, live, copy))


def _stand_in(value: Any, varies: Callable[[Tensor], bool], depth: int = 4) -> Any:
    """What stands for a value that was left."""
    if isinstance(value, Tensor):
        if is_over(value):  # of a transform inside of the function: nobody can compute with it
            return Over(value, "what an earlier call left")
        if value.layout is not torch.strided or not varies(value):
            raise _Cache
        return stand_in(value)
    if value is None or isinstance(value, _PLAIN):
        return value
    if type(value) not in (*CONTAINERS, tuple) or not depth:
        raise _Cache
    if isinstance(value, dict):
        made = value.copy()
        made.update({key: _stand_in(x, varies, depth - 1) for key, x in value.items()})
        return made
    return type(value)(_stand_in(x, varies, depth - 1) for x in value)


def _doubted(value: Any, doubt: Doubt) -> Any:
    """The same with numbers that tell whether they are compared."""
    if type(value) in (int, float):
        return doubt.number(value)
    if type(value) is tuple:
        return tuple(_doubted(x, doubt) for x in value)
    if type(value) in (list, set, deque):
        made = value.copy()
        _fill(made, [_doubted(x, doubt) for x in value])
        return made
    if type(value) in CONTAINERS:
        made = value.copy()
        made.update({key: _doubted(x, doubt) for key, x in value.items()})
        return made
    return value


def _varies(x: Tensor, graph: fx.Graph, constant: set[fx.Node | None]) -> bool:
    """Whether a tensor depends on an input of the recording beside those that are constant."""
    return depends_on_inputs([_node_of(x, graph)], constant)


def depends_on_inputs(nodes: Iterable[fx.Node | None], constant: Iterable[Any] = ()) -> bool:
    """Whether a value of these nodes does, and not only its shape.

    Args:
        nodes: of a recording.
        constant: inputs that do not count.
    """
    open_, seen = list(nodes), set(constant)
    while open_:
        node = open_.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if node.op == "placeholder":
            return True
        if getattr(node.target, "overloadpacket", None) not in _SHAPES_ALONE:
            open_.extend(node.all_input_nodes)
    return False


def stand_in(x: Tensor) -> Tensor:
    """What stands for a tensor of a recording in another one: who reads it makes another graph."""
    # of any size without memory
    empty = torch.zeros((), dtype=x.dtype, device=x.device)
    return empty.expand([int(size) for size in x.shape])


def _node_of(x: Tensor, graph: fx.Graph) -> fx.Node | None:
    """The node of a tensor in the recording; None if it is none of it."""
    last = next(iter(reversed(graph.nodes)))
    with torch.no_grad():
        x.view(x.shape)  # what records this says whose view it is
    made = next(iter(reversed(graph.nodes)))
    if made is last or not isinstance(made.args[0], fx.Node):
        return None
    found = made.args[0]
    while made is not last:
        before = made.prev
        if made is not found:
            graph.erase_node(made)
        made = before
    return found


def set_attribute(attrs: dict[str, Any], name: str, value: Any) -> None:
    """Give an attribute this value; MISSING: take it away."""
    if value is MISSING:
        attrs.pop(name, None)
    else:
        attrs[name] = value


def _fill(live: Any, items: Any) -> None:
    live.clear()
    live.extend(items) if isinstance(live, (list, deque)) else live.update(items)


_FOUND: ContextVar[dict[tuple[int, str], Leftover] | None] = ContextVar(
    "fzero_leftovers", default=None
)
_HOOKS = frozenset(
    {"_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs"}
    | {"_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"}
)
TORCHS = frozenset(nn.Module().__dict__) | {"forward"}  # attributes that every module has
_OWN = TORCHS - _HOOKS - {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_aten = torch.ops.aten
_SHAPES_ALONE = frozenset(
    {_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like, _aten.new_zeros}
    | {_aten.new_ones, _aten.new_full, _aten.new_empty, _aten.new_empty_strided}
)
