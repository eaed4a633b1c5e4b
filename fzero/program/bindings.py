"""Which of torch's Python functions an operator of a Program is called through.

An overload is called through the dispatcher's own converter of arguments, which looks each up in a
schema: `torch.ops.aten.mm.default(x, w)` takes 0.4 to 1 us more than `torch.mm(x, w)`, whose parser
was generated for it. Which is most of what small operators cost, and a step has thousands.

What a function makes of its arguments is its own affair (it may choose another overload, or do
more), so each is tried before it is taken: called with a node's own operands it must give the
dispatcher exactly what the overload itself does, and give back the same kind of value. A try takes
as long as recording the node did, so what was found is kept: it depends on torch and on the key.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fzero.functional.warned import warned_here


class Binding(NamedTuple):
    """A function of torch's, and whether it takes the numbers of a last list one by one."""

    function: Callable[..., Any]
    spreads: bool = False

    def arguments(self, args: Sequence[Any]) -> list[Any]:
        """What it is called with for an overload's positional arguments."""
        return [*args[:-1], *args[-1]] if self.spreads else [*args]


Known = dict[Any, Binding | None]
"""What was found, by what it depends on."""


def binding_of(node: fx.Node, known: Known | None = None) -> Binding | None:
    """What of torch's calls a node's overload with its arguments; None if nothing does.

    Args:
        node: with fake values; its target is an overload.
        known: of nodes before, and added to; None: of all this process has asked for.

    Examples:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(lambda x: (x @ x).t(), tracing_mode="fake")(torch.ones(2, 2)).graph
        >>> [binding_of(n).function for n in graph.nodes if n.op == "call_function"]
        [<built-in method mm of type object at ...>, <built-in method t of type object at ...>]
    """
    target: Any = node.target
    found = _candidate(target)
    if found is None:
        return None
    known = _of_process() if known is None else known
    try:
        key = target, _kind(node.args), _kind(tuple(sorted(node.kwargs.items())))
        binding = known.get(key, _UNKNOWN)
        if binding is _UNKNOWN:
            ways = Binding(found, spreads=True), Binding(found)
            tried = ways if _ends_in_sizes(found, node.args) else ways[1:]
            binding = next((one for one in tried if _are_same(node, one)), None)
            if len(known) >= _MOST:
                known.clear()
            known[key] = binding
    except (TypeError, KeyError):  # an argument that can't be hashed, or has no recorded value
        return None
    return binding


@functools.cache
def _of_process() -> Known:
    return {}


_UNKNOWN: Any = object()
_MOST = 10_000  # sizes are part of a key: there is no end of them


def _candidate(target: Any) -> Callable[..., Any] | None:
    schema = target._schema
    space, _, name = schema.name.partition("::")
    # what makes tensors of none is told the device by `torch.device(...)` around it
    if space != "aten" or not any("Tensor" in str(arg.type) for arg in schema.arguments):
        return None
    # a try would have it done: to the strides of a recorded value, or to a generator
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if schema.is_mutable and target._overloadname != "out":
        return None
    for owner in (torch, F, Tensor):
        found = getattr(owner, name, None)
        if type(found) in _GENERATED:
            return found
    return None


_METHOD = type(Tensor.view)
_GENERATED = type(torch.mm), _METHOD


def _ends_in_sizes(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    # x.view(2, 3) takes half a microsecond less than x.view([2, 3]): a method's parser tries its
    # other signatures on a list first
    last = args[-1] if args else None
    return type(function) is _METHOD and isinstance(last, list) and bool(last)


def _kind(value: Any) -> Any:
    """What of a value the choice of an overload may depend on."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
        if isinstance(value, Tensor):
            return Tensor, value.dtype, value.device, value.dim() == 0
    if isinstance(value, list | tuple):
        return type(value), *map(_kind, value)
    return type(value), value


def _are_same(node: fx.Node, binding: Binding) -> bool:
    target: Any = node.target
    given, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    heard = []
    for call, args in ((target._op, given), (binding.function, binding.arguments(given))):
        with (
            _disable_current_modes(),
            _Hears() as hears,
            torch.no_grad(),
            warned_here("error"),  # what an overload does without a word
        ):
            try:
                result = call(*args, **kwargs)
            except Exception:  # it takes no such arguments
                return False
        heard.append((hears.calls, type(result)))
    (one, kind), (other, same) = heard
    return kind is same and len(one) == len(other) == 1 and _equal(one, other)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(x, b[key]) for key, x in a.items())
    return a is b or (not isinstance(a, Tensor) and a == b)


class _Hears(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.prim.device.default:  # what fake tensors ask each other
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
