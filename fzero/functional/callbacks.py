"""What autograd calls back in backward runs as if the call that gave it were not over.

[Note: called back] The backward of a user's `autograd.Function`, a tensor's hook and the unpack
hook of a saved tensor are Python that runs long after the call of a functionalised module that made
them. By then the module's slots hold its own tensors again. Megatron's and DeepSpeed's
`CheckpointFunction`, reversible layers and adjoint methods run parts of the module there: silently
on the wrong weights. So whoever changes something for the time of a call gives a `Wrap`, which
makes that change again around a function, and what is handed to autograd meanwhile is wrapped.

Autograd has no hook for "a node was made here" (torch 2.15 has the first). What is replaced, while
somebody needs it, are public names: `autograd.Function.apply`, `Tensor.register_hook` and
`register_post_accumulate_grad_hook`, `saved_tensors_hooks.__enter__`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fzero.functional.patch import Patch

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def wrapping(wrap: Wrap) -> Iterator[None]:
    """Inside, autograd gets `wrap(function)` for each function to call back: [Note: called back].

    Examples:
        >>> def loudly(fn):
        ...     return lambda *args: print("called back") or fn(*args)
        >>> x = torch.ones(1, requires_grad=True)
        >>> with wrapping(loudly):
        ...     y = (2 * x)
        ...     _ = y.register_hook(lambda grad: grad + 1)
        >>> y.sum().backward()
        called back
        >>> x.grad
        tensor([4.])
    """
    token = _WRAPS.set((wrap, *_WRAPS.get()))
    try:
        with _PATCH:
            yield
    finally:
        _WRAPS.reset(token)


def is_wrapping() -> bool:
    """Whether this thread is inside `wrapping`."""
    return bool(_WRAPS.get())


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as it is to be called back."""
    for wrap in _WRAPS.get():  # the innermost call's first: the outermost is entered first
        function = wrap(function)
    return function


_WRAPS: ContextVar[tuple[Wrap, ...]] = ContextVar("fzero_wraps", default=())


# ----------------------------------------------------------------------------- autograd.Function
def _apply(original: Any) -> Any:
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if not (_WRAPS.get() and torch.is_grad_enabled()):  # or nothing will call back
            return original.__get__(None, cls)(*args, **kwargs)
        token = _SURROUNDINGS.set(wrapped(_call))
        try:
            return original.__get__(None, _called_back(cls))(*args, **kwargs)
        finally:
            _SURROUNDINGS.reset(token)

    return classmethod(apply)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# of the `Function.apply` that is under way: how its backward is to be called
_SURROUNDINGS: ContextVar[Callable[..., Any]] = ContextVar("fzero_surroundings", default=_call)


# Kept, as making a class is slow; not for ever, as users may make Functions at each call.
@functools.lru_cache(maxsize=256)
def _called_back(cls: type[Function]) -> type[Function]:
    """A Function like `cls` whose context knows the surroundings that its backward runs in."""
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}

    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.fzero_surroundings = _SURROUNDINGS.get()
        return cls.forward(ctx, *args, **kwargs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        ctx.fzero_surroundings = _SURROUNDINGS.get()
        return cls.setup_context(ctx, inputs, output)

    if cls.setup_context is Function.setup_context:
        body["forward"] = staticmethod(forward)
    else:
        body["setup_context"] = staticmethod(setup_context)
    for name in ("backward", "vjp"):  # torch takes either, and refuses both
        own = getattr(cls, name)
        if own is not getattr(Function, name):
            body[name] = staticmethod(_in_surroundings(own))
    return type(cls.__name__, (cls,), body)


def _in_surroundings(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def called_back(ctx: Any, *grads: Any) -> Any:
        return ctx.fzero_surroundings(backward, ctx, *grads)

    return called_back


# ----------------------------------------------------------------------------------------- hooks
def _register(original: Any) -> Any:
    @functools.wraps(original)
    def register(self: Tensor, hook: Callable[..., Any]) -> Any:
        return original(self, wrapped(hook))

    return register


@contextlib.contextmanager
def already_wrapped() -> Iterator[None]:
    """What saved tensors' hooks that are set meanwhile call back is wrapped, or no user's code."""
    token = _ALREADY.set(True)
    try:
        yield
    finally:
        _ALREADY.reset(token)


_ALREADY: ContextVar[bool] = ContextVar("fzero_already_wrapped", default=False)


def _push(original: Any) -> Any:
    def push(self: saved_tensors_hooks) -> None:
        # a copy in the host's memory is fetched once per tensor, and calls no user's code
        if _WRAPS.get() and not _ALREADY.get() and not isinstance(self, save_on_cpu):
            self = saved_tensors_hooks(self.pack_hook, wrapped(self.unpack_hook))
        original(self)

    return push


_PATCH = Patch(
    (Function, "apply", _apply),
    (Tensor, "register_hook", _register),
    (Tensor, "register_post_accumulate_grad_hook", _register),
    (saved_tensors_hooks, "__enter__", _push),
)
