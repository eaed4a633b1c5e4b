"""Recording with symbols in place of sizes: torch's `ShapeEnv`, behind one door.

torch.fx.experimental.symbolic_shapes is where `torch.export` and `torch.compile` keep their dynamic
shapes; it has no public face for a recording that is one's own. Whatever fails here costs speed
alone: a function that can't be recorded with symbols is recorded for each size, as ever.
"""

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from fzero.functional.warned import warned_here
from fzero.numerics.fakes import without_addresses


def new_env() -> Any:
    """What learns what is asked of symbols."""
    return ShapeEnv()


def fake_inputs(
    inputs: Sequence[Tensor], dims: Collection[tuple[int, int]], env: Any
) -> list[Tensor]:
    """Fake tensors with a symbol in place of the size of each of these dims.

    Args:
        inputs: examples; those with symbols are dense.
        dims: (input, dim).
        env: of the symbols.
    """
    mode = without_addresses(_Mode, allow_non_fake_inputs=True, shape_env=env)
    return [_fake(x, i, mode, dims) for i, x in enumerate(inputs)]


class _Mode(FakeTensorMode):
    """Fake tensors, also of what asks for the numbers that symbols stand for without need."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.constant_pad_nd.default:
            x, pad = args[:2]
            if isinstance(x, FakeTensor) and x.dim() < 4:  # images have memory formats
                sizes = list(x.shape)
                for i in range(len(pad) // 2):
                    sizes[-1 - i] = sizes[-1 - i] + pad[2 * i] + pad[2 * i + 1]
                with self:
                    return torch.empty(sizes, dtype=x.dtype, device=x.device)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _fake(x: Tensor, index: int, mode: FakeTensorMode, dims: Collection[tuple[int, int]]) -> Any:
    free = [(index, dim) in dims for dim in range(x.dim())]
    if not any(free):
        # as where there are no symbols: a number is made anew
        if isinstance(x, FakeTensor) or (x.dim() == 0 and type(x) is Tensor):
            with mode:
                return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
        return mode.from_tensor(x, static_shapes=True)
    # in memory of its own: what it is a part of has other sizes, of no account here
    dense = torch.empty_like(x, device="meta", memory_format=torch.contiguous_format)
    context = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC if one else DimDynamic.STATIC for one in free],
        constraint_sizes=[None] * x.dim(),  # pyright: ignore
    )
    made = mode.from_tensor(
        dense,
        static_shapes=False,
        symbolic_context=context,
        source=ConstantSource(f"input{index}"),
    )
    with mode:
        return torch.empty(made.shape, dtype=x.dtype, device=x.device)


class ByParts(TorchFunctionMode):
    """Functions whose kernels ask for the numbers that symbols stand for, written out as they are.

    `linear` of rows of rows does under `torch.func` transforms, `matmul` of them in torch 2.11,
    `dropout` always. What is recorded so is compared with what was recorded of the kernels
    themselves.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = None
        if func is torch.nn.functional.linear:
            made = _linear(*args, **kwargs)
        elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            made = _matmul(*args, **kwargs)
        elif func is torch.nn.functional.dropout:
            made = _dropout(*args, **kwargs)
        return func(*args, **kwargs) if made is None else made


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if bias is None or input.dim() != 3 or not input.is_contiguous():
        return None
    turned, (*rows, width) = weight.t(), input.shape
    flat = input.view(rows[0] * rows[1], width)
    return torch.addmm(bias, flat, turned).view(*rows, weight.shape[0])


def _matmul(input: Any, other: Any, *, out: Any = None) -> Any:
    if out is not None or input.dim() != 3 or other.dim() != 2 or not input.is_contiguous():
        return None
    *rows, width = input.shape
    flat = input.view(rows[0] * rows[1], width)
    return torch.ops.aten._unsafe_view(torch.mm(flat, other), (*rows, other.shape[1]))


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or not training or not 0 < p < 1 or input.device.type != "cpu":
        return None
    aten = torch.ops.aten
    options = {"dtype": input.dtype, "layout": input.layout, "device": input.device}
    noise = aten.bernoulli.p(aten.empty.memory_format([], **options).expand(input.shape), 1 - p)
    return input * aten.div_.Scalar(noise, 1 - p)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What torch tells its log of a failure inside, in this thread, stays untold."""
    mine, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def other(record: logging.LogRecord) -> bool:
        return record.thread != mine

    logger.addFilter(other)
    try:
        with warned_here("ignore"):
            yield
    finally:
        logger.removeFilter(other)
