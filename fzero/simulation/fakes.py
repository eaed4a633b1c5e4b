"""Tensors without memory that stand for a model's, on the one device that every build has.

[Note: simulated on the CPU] Meta tensors would do for shapes, but torch chooses operators by
device: attention on `meta` is written out as products with the whole square of scores, which no GPU
ever holds. On the CPU it is one fused operator, as on a GPU. So everything is recorded there.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from fzero import tree
from fzero.functional.owners import noted_like
from fzero.transforms.frames import take_apart
from fzero.tree import PyTree

T = TypeVar("T")


def fakes_of(leaves: PyTree, mode: FakeTensorMode) -> PyTree:
    """The same tree with fake tensors on the CPU; nothing is copied."""
    return tree.map(lambda x: _fake(x, mode), leaves)


def batch_on_cpu(batch: PyTree) -> PyTree:
    """The same batch on the CPU. What is elsewhere gets memory that nobody writes to.

    No fake tensors: micro-batches are views of a batch, and fake ones would forget of what.
    """
    flat, frame = take_apart(batch)
    return frame.unflatten([_there(x) if _elsewhere(x.device) else x for x in flat])


def _there(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")


def _fake(x: Any, mode: FakeTensorMode) -> Any:
    if type(x) not in (Tensor, torch.nn.Parameter):  # what others refuse, they refuse by name
        return x
    with mode:
        made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")
    return noted_like(made, x)


class WithoutMemory(TorchFunctionMode):
    """Tensors that are made from a shape alone are fake ones of `mode`.

    `mode` itself would do the same to all tensors, and what the process knows about its ranks is
    read from tensors, too.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with self.mode if func in _FACTORIES else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


_FACTORIES = (torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.full)


def on_cpu(model_fn: Callable[..., T]) -> Callable[..., T]:
    """A model function for which all that it reads from outside is on the CPU."""

    @functools.wraps(model_fn, updated=())
    def inside(*args: Any) -> T:
        with _OnCpu():
            return model_fn(*args)

    return inside


class _OnCpu(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options: dict[str, Any] = dict(kwargs or {})
        # the shapes of fake tensors are kept on `meta`, by code that lets no mode see it
        if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
            return func(*args, **options)
        if options.get("device") is not None and _elsewhere(options["device"]):
            options["device"] = torch.device("cpu")
        # an attribute is asked for: which device a tensor is on, say
        if getattr(func, "__name__", "") != "__get__":
            args, options = (tree_map(self._here, x) for x in (args, options))
        return func(*args, **options)

    def _here(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, FakeTensor) or not _elsewhere(x.device):
            return x
        if id(x) not in self.made:
            # one element, seen as many: no memory; and not recorded, as `x` itself is not
            with _disable_current_modes():
                self.made[id(x)] = (x, torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape))
        return self.made[id(x)][1]


def _elsewhere(device: Any) -> bool:
    return torch.device(device).type != "cpu"
