"""`torch.utils.checkpoint`, however it was imported, under fzero's rules.

Models call it from their own code, and its recomputation would go wrong in two places: while a
function is staged out (masks drawn anew, or refused by `torch.func`), and after a functionalised
module was called (its slots hold its own weights again). There is no public hook for its callers;
the public alternative is `fzero.remat` in place of `torch.utils.checkpoint.checkpoint`. So the two
names that `checkpoint` looks up in its module at each call are replaced for as long as somebody
needs it. A torch without these names fails tests/test_remat.py; what runs there is torch's own
checkpoint, and a Program that would draw a second mask is refused by `number_sites`.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from fzero.errors import TraceError
from fzero.functional.remat import Saves, in_transform, is_recording, region, verdict

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

REENTRANT = "CheckpointFunction"
NON_REENTRANT = "_checkpoint_without_reentrant_generator"


@contextlib.contextmanager
def checkpoints_taken_over() -> Iterator[None]:
    """While a function is recorded: `torch.utils.checkpoint` marks a region, as `remat` does."""
    _PATCH.install()
    try:
        yield
    finally:
        _PATCH.uninstall()


@contextlib.contextmanager
def recomputing(wrap: Wrap) -> Iterator[None]:
    """Let checkpoints that are made meanwhile recompute `wrap(function)`.

    Under a `torch.func` transform, where torch's checkpoint raises, the function runs as it is.
    """
    token = _WRAPS.set((wrap, *_WRAPS.get()))
    try:
        with checkpoints_taken_over():
            yield
    finally:
        _WRAPS.reset(token)


_WRAPS: ContextVar[tuple[Wrap, ...]] = ContextVar("fzero_checkpoint_wraps", default=())


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    if torch.is_grad_enabled():  # or nothing will be computed again
        for wrap in _WRAPS.get():
            function = wrap(function)
    return function


class _Reentrant:
    """In place of `CheckpointFunction`."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if is_recording():
            with region():
                return function(*args)
        if _WRAPS.get():  # its backward refuses torch.autograd.grad; the other form has no limits
            return torch_checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve
            )
        return self.original.apply(function, preserve, *args)


def _non_reentrant(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the generator around whose one `yield` `checkpoint` calls the function."""

    def generator(
        function: Callable[..., Any],
        preserve: bool = True,
        context_fn: Callable[[], Any] = torch_checkpoint.noop_context_fn,
        *rest: Any,
        **kwargs: Any,
    ) -> Generator[None, None, None]:
        if is_recording():
            with region(_selected(context_fn)):
                yield
        elif _WRAPS.get() and in_transform():
            yield
        else:
            yield from original(_wrapped(function), preserve, context_fn, *rest, **kwargs)

    return generator


def _selected(context_fn: Callable[[], Any]) -> Saves | None:
    """The policy of `create_selective_checkpoint_contexts`."""
    if context_fn is torch_checkpoint.noop_context_fn:
        return None
    forward, _ = context_fn()
    policy = getattr(forward, "policy_fn", None)
    if not callable(policy):
        raise TraceError(
            "torch.utils.checkpoint was called with a context_fn whose contexts are "
            f"{type(forward).__name__}; a step that is staged out can honour those of "
            "torch.utils.checkpoint.create_selective_checkpoint_contexts only. Use "
            "fzero.remat(fn, policy=...), or Config(executor='eager')."
        )

    def saves(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        if op in torch_checkpoint.SAC_IGNORED_OPS:
            return False
        ctx: Any = torch_checkpoint.SelectiveCheckpointContext(is_recompute=False)
        ctx.op_output = out
        return verdict(policy(ctx, op, *args, **kwargs))

    return saves


class _Patch:
    """The replaced names of torch's module, counted: several threads may need them at once.

    What stands in the module is the process's, so the count is too. Threads that record nothing
    and called no functionalised module meet torch's own behaviour.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.originals: dict[str, Any] = {}

    def install(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                for name, replace in ((REENTRANT, _Reentrant), (NON_REENTRANT, _non_reentrant)):
                    original = getattr(torch_checkpoint, name, None)
                    if original is not None:
                        self.originals[name] = original
                        setattr(torch_checkpoint, name, replace(original))

    def uninstall(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                for name, original in self.originals.items():
                    setattr(torch_checkpoint, name, original)
                self.originals.clear()


_PATCH = _Patch()
