"""What `torch.func` does not tell in public: whether a transform is active, what is left of one.

The public alternative is none: `torch._C._functorch` is what `torch.func` is made of. What is asked
of it is seen in tests/functional/test_transforms.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,  # pyright: ignore[reportAttributeAccessIssue]
    get_interpreter_stack,  # pyright: ignore[reportAttributeAccessIssue]
    get_unwrapped,
    is_dead_tensor_wrapper,  # pyright: ignore[reportAttributeAccessIssue]
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_level,
    peek_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fzero.errors import TransformOverError


def in_transform() -> bool:
    """Whether a `torch.func` transform is active."""
    return peek_interpreter_stack() is not None


def in_forward_mode() -> bool:
    """Whether any `torch.func` transform that is active is a forward-mode one.

    Examples:
        >>> x = torch.ones(1)
        >>> seen = []
        >>> _ = torch.func.jvp(lambda x: seen.append(in_forward_mode()) or x, (x,), (x,))
        >>> seen, in_forward_mode()
        ([True], False)
    """
    return any(one.key() == TransformType.Jvp for one in get_interpreter_stack() or ())


def levels_of(x: Tensor) -> Iterator[Tensor]:
    """A tensor as each `torch.func` transform has it, and at last as it is without them.

    Examples:
        >>> w, graphs = torch.ones(1, requires_grad=True), []
        >>> def loss(x):
        ...     graphs.extend(y.requires_grad for y in levels_of(w.sum() + x.detach()))
        ...     return x
        >>> _ = torch.func.grad(loss)(torch.tensor(1.0))
        >>> graphs  # not of what is differentiated, but of what is outside of it
        [False, True]
    """
    yield x
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
        yield x


def is_recorded(x: object) -> bool:
    """Whether a tensor was made while something was recorded: it has no values.

    Examples:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> seen = [torch.ones(2)]
        >>> _ = make_fx(lambda x: seen.append(x * 2) or x, tracing_mode="fake")(torch.ones(2))
        >>> [is_recorded(x) for x in seen]
        [False, True]
    """
    return isinstance(x, Tensor) and isinstance(list(levels_of(x))[-1], FakeTensor)


def is_over(x: Tensor) -> bool:
    """Whether `x` was made for a transform that is over, such as `vjp` when its function returned.

    Examples:
        >>> kept = []
        >>> _ = torch.func.grad(lambda x: kept.append(x) or x * is_over(x))(torch.tensor(1.0))
        >>> _, is_over(kept[0])
        (tensor(0.), True)
    """
    level = maybe_get_level(x)
    return is_dead_tensor_wrapper(x) or (level or 0) > (maybe_current_level() or 0)


class Over(Tensor):
    """In place of a tensor of a transform that is over: its values are there, its gradient is not.

    Raises:
        TransformOverError: an operator reads it.
    """

    what: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls, x: Tensor, what: str) -> "Over":
        self: Over = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, x.shape, dtype=x.dtype, device=x.device
        )
        self.what = what
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = pytree.tree_leaves((args, kwargs))
        what = next(x.what for x in flat if isinstance(x, Over))
        raise TransformOverError(
            f"backward reads {what} of a functionalised module, and the torch.func transform that "
            "the module was called in is over: a gradient that is computed there could not reach "
            "the transform's. Use torch.autograd.grad for a module whose backward runs parts of it "
            "again, or save for backward (ctx.save_for_backward) what backward needs."
        )

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"Over({self.what!r}, {tuple(self.shape)}, {self.dtype})"
