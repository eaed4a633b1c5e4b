"""Operators that have no derivative: where one is asked for it is refused, and is not zero.

[Note: no derivative] An operator of a library's or a user's own need not say how it is
differentiated. Run as it is, its kernel may be made of operators that do say. Recorded, it is one
node whose kernel does not run, and torch takes what it returns for a constant: backward warns, and
goes on with zeros. In forward mode a tangent ends there without a word, even where backward is told
how (custom operators, functional collectives). So results of such operators are looked at as they
are made. One that would hand back zeros raises when a gradient comes to it: what is only read may
stay. One that drops a tangent raises at once.

A backward that says of itself that it has no derivative (`once_differentiable`) is such a constant
where a transform of `torch.func` differentiates it once more.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Private: what `torch.func` calls an autograd.Function through; modes meet it in no other way.
from torch._functorch.autograd_function import CustomFunctionHigherOrderOperator
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fzero.errors import FzeroError, TraceError
from fzero.functional.transforms import in_forward_mode, levels_of
from fzero.functional.uncompiled import not_compiled_alone, uncompiled


def refuse_underived(func: Any, given: Iterable[Any], result: Any, line: Callable[[], str]) -> None:
    """Refuse to go on with a constant in the place of a derivative: see [Note: no derivative].

    Args:
        func: what was called, as a `TorchFunctionMode` meets it.
        given: its arguments, flat.
        result: what it returned.
        line: gives the user's line, as " at file:line", or "".

    Raises:
        FzeroError: a tangent ends here.
    """
    if isinstance(func, CustomFunctionHigherOrderOperator):
        _refuse_twice(given, result, line)
        return
    name = _name(func)
    if name.partition("::")[0] in _KNOWN:
        return
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and _may_vary(x)]
    if not made:
        return
    operands = [x for x in tree_leaves(list(given)) if isinstance(x, Tensor)]
    if in_forward_mode() and any(map(_moves, operands)) and not any(map(_moves, made)):
        raise FzeroError(
            f"the operator {name}{line()} has no derivative in forward mode, and torch would go on "
            f"with a tangent of zeros. {_WAYS} Gradients (fzero.grad, vjp) do not need it."
        )
    for x in made:
        if x.requires_grad and (name in _WRONG or _is_missing(x)):
            x.register_hook(_Refusal(f"the operator {name}{line()} has no derivative", _WAYS))


def _refuse_twice(given: Iterable[Any], result: Any, line: Callable[[], str]) -> None:
    """Refuse a second derivative of an autograd.Function whose backward says that it has none."""
    function, *operands = (x for x in tree_leaves(list(given)))
    if not _is_once(getattr(function, "backward", None)) or not any(map(_is_followed, operands)):
        return
    what = (
        f"the backward of {function.__name__}{line()} is marked as once_differentiable, and a "
        "second derivative of it is asked for"
    )
    for x in tree_leaves(result):
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(_Refusal(what, "Write its backward with operators that have one."))


def _is_once(backward: Any) -> bool:
    """Whether it is marked so, whatever is around it."""
    while backward is not None:
        if getattr(backward, "__code__", None) is _ONCE:
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False


_ONCE = once_differentiable(lambda ctx: None).__code__


def _is_followed(x: Any) -> bool:
    """Whether a gradient of a tensor is one that a transform further out differentiates."""
    if not isinstance(x, Tensor) or not x.requires_grad:
        return False
    around = list(levels_of(x))[1:-1]
    return any(y.requires_grad or _has_tangent(y) for y in around)


class Derived(TorchFunctionMode):
    """Refuses what has no derivative where one is asked for.

    Args:
        line: gives the user's line.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__()
        self.line = line

    @not_compiled_alone
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(func) in OPERATORS and not torch.compiler.is_compiling():
            uncompiled(refuse_underived, func, (args, kwargs), result, self.line)
        return result


class _Refusal:
    """A hook on a result that is no function of its operands, as backward has it.

    Args:
        what: has no derivative, and where it was called.
        ways: out of it.
    """

    def __init__(self, what: str, ways: str) -> None:
        self.what, self.ways = what, ways

    @not_compiled_alone
    def __call__(self, grad: Tensor | None) -> None:
        if grad is None:  # none comes, after all
            return
        raise TraceError(
            f"{self.what}: what it is called with is differentiated, and torch would go on with "
            f"zeros, or with the derivative of something else. {self.ways}"
        )


_WAYS = (
    "Give it one (torch.library.register_autograd, or a torch.autograd.Function around it), write "
    "it with operators that have one, or call it with x.detach() if none is meant."
)
OPERATORS = (
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    CustomFunctionHigherOrderOperator,
)
"""What calls one operator or autograd.Function, and nothing else, in a `TorchFunctionMode`."""

_KNOWN = frozenset(("aten", "prims", "prim", "fzero"))
# its kernel copies and then writes in place, which autograd takes for the identity
_WRONG = frozenset(("_c10d_functional::broadcast", "_c10d_functional::broadcast_"))


def _name(func: Any) -> str:
    """Of an operator, as in "aten::mm"."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name
    return func._qualified_op_name


def _may_vary(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_missing(x: Tensor) -> bool:
    """Whether torch has put into the graph what warns and returns nothing."""
    node = x.grad_fn
    # by its name: torch says it in no other way
    return node is not None and node.name().endswith("::WarnNotImplemented")


def _moves(x: Tensor) -> bool:
    """Whether a tensor has a tangent, in any transform that is active."""
    return any(map(_has_tangent, levels_of(x)))


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None
