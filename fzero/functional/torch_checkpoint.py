"""`torch.utils.checkpoint`, however it was imported, under fzero's rules.

Models call it from their own code, and its recomputation would go wrong in two places: while a
function is staged out (masks drawn anew, or refused by `torch.func`), and after a functionalised
module was called (its slots hold its own weights again). There is no public hook for its callers;
the public alternative is `fzero.remat` in place of `torch.utils.checkpoint.checkpoint`. So the
names that `checkpoint` looks up in its module at each call are replaced for as long as somebody
needs it. No name is trusted: `check_checkpoints` records a checkpoint of two lines once per process
and looks at what came of it, since a torch may keep a name that it no longer calls (2.14 does).

In a functionalised call more is needed than this module gives, or less: `functional.callbacks` lets
whatever is called back in backward run with the tensors of its call, by public names. Here is what
makes that cheap for checkpoints, and what a recording needs.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from fzero.errors import TraceError
from fzero.functional.callbacks import Wrap, already_wrapped, is_wrapping, wrapped, wrapping
from fzero.functional.patch import Patch
from fzero.functional.remat import Saves, is_recording, region, regions_of, verdict
from fzero.functional.transforms import in_transform

REENTRANT = "CheckpointFunction"
# of torch 2.11 to 2.13, and of 2.14 on, which keeps the first as a stub that it does not call
NON_REENTRANT = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)


@contextlib.contextmanager
def checkpoints_as_regions() -> Iterator[None]:
    """While a function is recorded: `torch.utils.checkpoint` marks a region, as `remat` does.

    Raises:
        TraceError: this torch's checkpoint goes another way.
    """
    check_checkpoints("traced")
    with _PATCH:
        yield


@contextlib.contextmanager
def recomputing(wrap: Wrap) -> Iterator[None]:
    """Let checkpoints that are made meanwhile recompute `wrap(function)`; see `callbacks.wrapping`.

    Under a `torch.func` transform, where torch's checkpoint raises, the function runs as it is.
    """
    with wrapping(wrap), _PATCH:
        yield


@functools.cache
def check_checkpoints(executor: str) -> None:
    """Raise unless a checkpoint of one line is seen to go our way, in both of its forms.

    Args:
        executor: "traced": it must become a region of the graph that is recorded. "eager": it must
            recompute what it was told to, and leave no gradient out that `torch.autograd.grad`
            asks for.

    Raises:
        TraceError: it does not.
    """
    for reentrant in (False, True):
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            try:
                fits = (_is_recorded if executor == "traced" else _recomputes)(reentrant)
            except Exception:  # whatever a torch of another make raises
                fits = False
        if not fits:
            raise TraceError(
                f"torch {torch.__version__} runs torch.utils.checkpoint.checkpoint(use_reentrant="
                f"{reentrant}) in a way that executor={executor!r} does not know: gradients could "
                "be wrong without an error. Use a torch that fzero's README names."
            )


def _is_recorded(reentrant: bool) -> bool:
    def function(x: Tensor) -> Any:
        return torch_checkpoint.checkpoint(torch.sin, x, use_reentrant=reentrant)

    with _PATCH:
        nodes = make_fx(function)(torch.ones(1, device="cpu")).graph.nodes
    return [bool(regions_of(node)) for node in nodes if node.op == "call_function"] == [True]


def _recomputes(reentrant: bool) -> bool:
    calls: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: calls.append("again") or function(*args)

    x, w = (torch.ones(1, requires_grad=True, device="cpu") for _ in range(2))
    with recomputing(noting):
        y: Any = torch_checkpoint.checkpoint(lambda x: (x * w).sin(), x, use_reentrant=reentrant)
    (grad,) = torch.autograd.grad(y, w, allow_unused=True)
    return calls == ["again"] and grad is not None


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
        if is_wrapping():  # its backward refuses torch.autograd.grad; the other form has no limits
            return torch_checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve
            )
        return self.original.apply(function, preserve, *args)


def _non_reentrant(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the generator around whose one `yield` `checkpoint` calls the function."""
    signature = inspect.signature(original)

    def generator(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        given = signature.bind(*args, **kwargs).arguments
        if is_recording():
            with region(_selected(given.get("context_fn", torch_checkpoint.noop_context_fn))):
                yield
        elif is_wrapping() and in_transform():
            yield
        elif is_wrapping() and torch.is_grad_enabled():  # or nothing will be computed again
            yield from _around(original(wrapped(args[0]), *args[1:], **kwargs))
        else:
            yield from original(*args, **kwargs)

    return generator


def _around(torchs: Generator[None, None, None]) -> Generator[None, None, None]:
    """The same generator, whose hooks on saved tensors call back what is wrapped already."""
    with already_wrapped():
        next(torchs)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(StopIteration):
            torchs.throw(error)
    else:
        yield from torchs


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


_PATCH = Patch(
    (torch_checkpoint, REENTRANT, _Reentrant),
    *((torch_checkpoint, name, _non_reentrant) for name in NON_REENTRANT),
)
