"""Functions of ours that run while torch.compile runs a compiled part, and are no part of it.

On Python 3.12 and later what a compiled part calls through a `TorchFunctionMode` has a frame that
torch.compile takes up by itself: it compiled the mode, and the numbers drawn in it were others.
Between the graphs of a part that breaks it takes up all that is called, a gather too.

Private in torch. The public alternative, `torch.compiler.disable`, breaks the graph at every call
that passes through the mode, which leaves the part uncompiled; and it imports all that compiles.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
P = ParamSpec("P")

_REASON = (
    "fzero runs its collectives and Programs as they are, and a graph that torch.compile makes can "
    "hold none of them: compile the model, or parts of it"
)

try:
    from torch._C._dynamo.eval_frame import set_eval_frame
except ImportError:
    set_eval_frame = None


def not_compiled_alone(fn: F) -> F:
    """`fn`, whose frame torch.compile leaves alone where it meets it while a program runs.

    What torch.compile traces may still call it.
    """
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:
        disabled: Any = torch.compiler.disable(fn)
        return disabled
    skip_code(fn.__code__)
    return fn


def never_compiled(fn: Callable[P, T]) -> Callable[P, T]:
    """`fn`, which breaks the graph of what torch.compile traces: it runs as it is.

    As `torch.compiler.disable` does it, without frames of torch's between `fn` and its caller,
    whose line warnings name.
    """
    if set_eval_frame is None:
        disabled: Any = torch.compiler.disable(fn, reason=_REASON)
        return disabled

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return uncompiled(fn, *args, **kwargs)

    found: Any = not_compiled_alone(run)
    # what torch.compile looks for before it traces a call
    found._torchdynamo_disable, found._torchdynamo_disable_msg = True, _REASON
    return found


@not_compiled_alone
def uncompiled(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `fn` returns; torch.compile takes up no frame of it, whoever calls."""
    if set_eval_frame is None:
        disabled: Any = torch.compiler.disable(fn)
        return disabled(*args, **kwargs)
    before = set_eval_frame(None)
    try:
        return fn(*args, **kwargs)
    finally:
        set_eval_frame(before)
