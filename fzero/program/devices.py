"""Tensors that torch takes for ones on the meta device, while it records with tensors of no values.

A dual number of forward-mode AD that is batched (`vmap` of `torch.func.hessian`, which is
`jacfwd(jacrev(f))`) says of itself that it is on the meta device, where what a fake tensor stands
on really is. So autograd moves a tangent there, and what it meets next is on another device. Seen
on torch 2.11 to 2.15.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def devices_kept(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, in which nothing is made on the meta device, but where its arguments are.

    Args:
        fn: a function of tensors on one device; of others it is `fn` itself.

    Examples:
        >>> devices_kept(lambda x: x.to("meta", torch.float64))(torch.zeros(1))
        tensor([0.], dtype=torch.float64)
    """

    @functools.wraps(fn)
    def wrapped(*args: Any) -> Any:
        devices = {x.device for x in args if isinstance(x, Tensor)}
        # of several nobody could tell which one was meant
        if len(devices) != 1:
            return fn(*args)
        with _On(devices.pop()):
            return fn(*args)

    return wrapped


class _On(TorchDispatchMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # a function that means the meta device is not told apart: in a step nothing has its values
        # there
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **kwargs)
