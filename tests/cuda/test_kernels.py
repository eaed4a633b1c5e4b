"""Kernels that users write in Triton, called by themselves and as operators of torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.cuda.test_models import assert_as, numbers, objective, plain, trained
from tests.cuda.test_one_device import DEVICE, nccl

__all__ = ["nccl"]

triton: Any = pytest.importorskip("triton", reason="Triton is not installed")
tl: Any = pytest.importorskip("triton.language")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(180),
]


@triton.jit
def _scaled_kernel(x_ptr, out_ptr, factor, n, BLOCK: tl.constexpr):  # pyright: ignore
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask) * factor, mask=mask)


def launched(x: Tensor, factor: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _scaled_kernel[(triton.cdiv(x.numel(), 256),)](x, out, factor, x.numel(), BLOCK=256)
    return out


class Scaled(torch.autograd.Function):
    """A kernel of the user's, as the fused layers of many libraries launch theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return launched(x, 3.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return launched(grad, 3.0)


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Any = Scaled.apply(self.first(x).tanh())
        return self.last(found)


def _kernels(cfg: fzero.Config) -> None:
    torch.manual_seed(0)
    module = Kernel().to(DEVICE)
    steps = [numbers(4, 16, dtype=torch.float32)(i) for i in range(3)]
    found, _ = trained(module, steps, cfg)
    assert_as("float attention", found, plain(module, steps))


@pytest.mark.parametrize("config", [{"executor": "eager"}, {"opaque": "auto"}], ids=str)
def test_kernels_of_the_users(config: dict[str, Any]) -> None:
    _kernels(fzero.Config(3, **config))


def test_kernels_of_the_users_in_a_program() -> None:
    """Refused with what to do; the device can be used as before."""
    with pytest.raises(fzero.TraceError, match="address of a tensor is asked for"):
        _kernels(fzero.Config(3))
    torch.cuda.synchronize()


def test_kernels_of_the_users_in_an_engine() -> None:
    torch.manual_seed(0)
    module = Kernel().to(DEVICE)
    steps = [numbers(4, 16, dtype=torch.float32)(i) for i in range(3)]
    wanted = plain(module, steps)
    engine: Any = fzero.Engine(module, fzero.optim.sgd(0.1), fzero.Config(3))
    for x in steps:
        objective(engine(x)).backward()
        engine.step()
    assert_as("float attention", engine.full_params(), wanted)


@torch.library.triton_op("fzero_tests::thrice", mutates_args={})
def thrice(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.library.wrap_triton(_scaled_kernel)[(triton.cdiv(x.numel(), 256),)](
        x, out, 3.0, x.numel(), BLOCK=256
    )
    return out


thrice.register_autograd(lambda ctx, grad: thrice(grad.contiguous()))


class Operator(Kernel):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(thrice(self.first(x).tanh()))


@pytest.mark.parametrize(
    "config", [{}, {"executor": "eager"}, {"cuda_graph": True}, {"executor": "inductor"}], ids=str
)
def test_operators_of_the_users(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Operator().to(DEVICE)
    steps = [numbers(4, 16, dtype=torch.float32)(i) for i in range(4)]
    found, _ = trained(module, steps, fzero.Config(3, **config))
    assert_as("float attention", found, plain(module, steps))
