"""Tensors without memory, for code of the user's that is run to see which operators it calls.

Whoever asks one of torch's fake tensors for its address is told 0, by default. A kernel that is
started with that (Triton's launchers ask, ctypes and numba do) reads there: on a CPU the process
ends by a signal, on a GPU the device can't be used any more. So here asking raises an error.

Private in torch: the switch that is read when a mode is made. There is no public one, and a
`data_ptr` in Python would not be what kernels' launchers call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch._functorch.config
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.errors import FzeroError

Mode = TypeVar("Mode", bound=FakeTensorMode)


def without_addresses(kind: Callable[..., Mode], *args: Any, **words: Any) -> Mode:
    """A mode whose tensors have no address.

    Args:
        kind: `FakeTensorMode`, or a class of its.
        args, words: as it takes them.

    Raises:
        FzeroError: this torch gives an address none the less.

    Examples:
        >>> with without_addresses(FakeTensorMode):
        ...     torch.empty(2).data_ptr()
        Traceback (most recent call last):
        ...
        RuntimeError: Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor)...
    """
    _check()
    return _made(kind, *args, **words)


def recorded_on(fakes: Sequence[Tensor], fn: Callable[..., Any]) -> fx.GraphModule:
    """What a function does to fake tensors, of one mode, recorded by `make_fx`.

    On these tensors: `tracing_mode="fake"` would make each of them once more, a fake of a fake,
    which is a sixth of the time that it takes to record an update.
    """
    mode = next((x.fake_mode for x in fakes if isinstance(x, FakeTensor)), None)
    with mode or without_addresses(FakeTensorMode, allow_non_fake_inputs=True):
        return make_fx(fn)(*fakes)


def asks_for_memory(error: BaseException) -> bool:
    """Whether an error says that the address of a tensor without memory was asked for."""
    return "Cannot access data pointer of Tensor" in str(error)


def _made(kind: Callable[..., Mode], *args: Any, **words: Any) -> Mode:
    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return kind(*args, **words)


@functools.cache
def _check() -> None:
    with _made(FakeTensorMode):
        x = torch.empty(2, device="cpu")
    try:
        x.data_ptr()
    except RuntimeError as error:
        if asks_for_memory(error):
            return
    raise FzeroError(
        f"torch {torch.__version__} gives tensors without memory an address: a kernel that a model "
        "starts with it would read there. Use a torch that fzero's README names."
    )
