"""Errors that a function raises by itself, staged out or not: advice on staging is of no use then.

Asked on tensors of the meta device, which have shapes and dtypes and nothing of what staging adds:
no fake tensors, no transform, nobody who watches. What is raised there of the same class, at the
same line of the user's and in the same words, is the function's own.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.program.origin import raised_at


def raises_unstaged(fn: Callable[..., Any], inputs: Sequence[Tensor], error: Exception) -> bool:
    """Whether `fn` raises this error also where it is not staged out.

    Args:
        fn: of flat tensors.
        inputs: of which shapes, strides and dtypes are read.
        error: that it raised when it was staged out.

    Examples:
        >>> import torch
        >>> def wrong(x): return x @ x
        >>> def reads(x): return x.numpy()
        >>> for fn in (wrong, reads):
        ...     try:
        ...         with torch._subclasses.FakeTensorMode():
        ...             fn(torch.ones(2, 3))
        ...     except Exception as error:
        ...         print(raises_unstaged(fn, [torch.ones(2, 3)], error))
        True
        False
    """
    # what is raised because of another one may be so because of a refusal to stage out
    chained = error.__cause__ is not None or error.__context__ is not None
    if chained or _STAGED.search(str(error)):
        return False
    reads = _Reads()
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.device("meta"), reads:
            fn(*map(_meta, inputs))
    except Exception as other:
        return (
            not reads.found
            and type(other) is type(error)
            and raised_at(other) == raised_at(error)
            and not _STAGED.search(str(other))
            and (plain(other) == plain(error) or _is_of_sizes(other, error))
        )
    return False


def plain(error: BaseException) -> str:
    """What an error says, with a tensor called so whatever its class is.

    >>> plain(TypeError("unsupported operand type(s) for @: 'list' and 'FakeTensor'"))
    "unsupported operand type(s) for @: 'list' and 'Tensor'"
    """
    return re.sub(r"\b(FakeTensor|Parameter)\b", "Tensor", str(error))


def _meta(x: Tensor) -> Tensor:
    made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return made.requires_grad_(x.requires_grad)


# what a kernel for fake tensors or meta says, of what has no kernel or no values there, and what
# meets a tensor from elsewhere
_STAGED = re.compile(
    r"\b(fake|meta|functorch|numpy|device|devices|subclass|subclasses|storage|DTensor)\b"
)
_SIZES = re.compile(r"\b(sizes?|shapes?|dimensions?|dims?|broadcast\w*)\b")


def _is_of_sizes(*errors: Exception) -> bool:
    # kernels of fake tensors check sizes in words of their own
    return all(isinstance(e, RuntimeError) and _SIZES.search(str(e)) for e in errors)


class _Reads(TorchDispatchMode):
    """Notes whether values are asked for, and refuses what waits for other ranks.

    Those do not call the function once more.
    """

    found = False

    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            raise NotImplementedError(f"{func} is not run here")
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
            self.found = True
        return func(*args, **(kwargs or {}))
