"""Tensors without memory have no address either, and torch's own operators do without."""

import copy
import ctypes
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fzero
from fzero.errors import TraceError
from fzero.numerics.fakes import asks_for_memory, recorded_on, without_addresses


class _Mode(FakeTensorMode):
    pass


@pytest.mark.parametrize("kind", [FakeTensorMode, _Mode])
def test_nobody_is_told_an_address(kind: Any) -> None:
    with without_addresses(kind, allow_non_fake_inputs=True) as mode:
        x = torch.empty(3)
        y = (x[1:] * 2 + torch.ones(2)).sum()
    assert type(mode) is kind
    for made in (x, y):
        with pytest.raises(RuntimeError) as told:
            made.data_ptr()
        assert asks_for_memory(told.value)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.empty(3).data_ptr() == 0  # torch's default is as it was


def _thrice(x: Tensor) -> Tensor:
    """By a kernel that is told addresses, as those of numba, ctypes and Triton are."""
    x = x.contiguous()
    out = torch.empty_like(x)
    read, written = ((ctypes.c_float * x.numel()).from_address(y.data_ptr()) for y in (x, out))
    for i in range(x.numel()):
        written[i] = 3 * read[i]
    return out


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _thrice(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return _thrice(grad)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Any = Thrice.apply(self.first(x))
        return self.last(found)


def _trained(cfg: fzero.Config) -> dict[str, Tensor]:
    torch.manual_seed(0)
    apply, params = fzero.functionalize(Net())
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).square().mean(), fzero.optim.sgd(0.1), cfg
    )
    params, state = step_fn.init(params)
    for _ in range(2):
        params, state = step_fn(params, state, torch.ones(3, 4))
    return fzero.unshard(params)


def _plain() -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Net()
    opt = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        module(torch.ones(3, 4)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return {k: x.detach() for k, x in module.named_parameters()}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_kernel_of_the_users_is_refused_by_name_and_runs_in_an_island(stage: int) -> None:
    with pytest.raises(TraceError, match="address of a tensor is asked for") as told:
        _trained(fzero.Config(stage))
    assert "y.data_ptr()" in str(told.value)  # the line
    assert "triton_op" in str(told.value)
    wanted = _plain()
    for cfg in (fzero.Config(stage, opaque="auto"), fzero.Config(stage, executor="eager")):
        for name, x in _trained(cfg).items():
            torch.testing.assert_close(x, wanted[name])


def test_a_kernel_in_an_island_alone() -> None:
    """Which is tried on tensors without memory first, and then on ones."""
    island = fzero.opaque(Thrice.apply)

    def loss(params: Any, x: Tensor) -> Tensor:
        found: Any = island(x @ params["w"])
        return found.square().mean()

    step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.0), fzero.Config(3))
    params, state = step_fn.init({"w": torch.eye(3)})
    _, state = step_fn(params, state, torch.full((2, 3), 2.0))
    assert float(state.metrics["loss"]) == 36.0


@pytest.mark.parametrize("stage", [0, 3])
def test_deep_copies_in_the_model_function(stage: int) -> None:
    """Torch asks for an address there, to see whether a tensor has memory."""

    def loss(params: Any, batch: Any) -> Tensor:
        mine = copy.deepcopy(batch)
        assert mine["both"][0] is mine["both"][1]
        mine["x"].mul_(2)
        return (mine["x"] @ params["w"] + mine["both"][0]).sum()

    step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.0), fzero.Config(stage))
    params, state = step_fn.init({"w": torch.ones(3)})
    x, both = torch.ones(2, 3), torch.ones(())
    for _ in range(2):
        params, state = step_fn(params, state, {"x": x, "both": [both, both]})
        assert float(state.metrics["loss"]) == 14.0
    assert torch.equal(x, torch.ones(2, 3))


def test_a_recording_is_made_on_the_tensors_that_there_are() -> None:
    with without_addresses(FakeTensorMode):
        x = torch.empty(2)
    seen = []

    def fn(x: Tensor) -> Tensor:
        seen.append(x)
        return torch.ones(2) + x  # made in the same mode

    graph = recorded_on([x], fn).graph
    assert seen[0] is x
    assert len(graph.find_nodes(op="get_attr")) == 0
    assert [node.op for node in graph.nodes].count("placeholder") == 1


def test_a_function_of_nothing_is_recorded() -> None:
    (made,) = recorded_on([], lambda: torch.ones(2)).graph.find_nodes(
        op="call_function", target=torch.ops.aten.ones.default
    )
    assert isinstance(made.meta["val"], FakeTensor)
