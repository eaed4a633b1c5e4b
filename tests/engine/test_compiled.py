"""Blocks that a user has compiled: plain torch's numbers, no graph break of ours, freed memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.engine import compiled
from tests.engine.parity import data
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.up(self.norm(x)))
        self.aux = h.square().mean()
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(6, 2)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x, use_reentrant=False) if self.around else block(x)
        aux = sum(getattr(block, "_orig_mod", block).aux for block in self.blocks)
        return self.head(x).square().mean() + aux


def _module(how: str = "") -> Net:
    torch.manual_seed(3)
    net = Net(checkpoint if how == "checkpoint" else None).double()
    if how == "frozen":
        net.blocks[1].requires_grad_(False)
    return net


def _compile(net: nn.Module, how: str) -> None:
    blocks: Any = net.get_submodule("blocks")
    if how == "whole":
        net.compile(backend="aot_eager")
    for i, block in enumerate(blocks):
        if how == "wrapped":
            blocks[i] = torch.compile(block, backend="aot_eager")
        else:  # inside of `whole`, too
            block.compile(backend="aot_eager")


def _train(stage: int, how: str, before: bool, more: dict[str, Any]) -> None:
    torch._dynamo.reset()
    counters.clear()
    rank, plain, net = dist.get_rank(), _module(how), _module(how)
    if before:
        _compile(net, how)
    cfg = fzero.Config(stage, bucket_mb=0.0003, **more)
    engine = fzero.Engine(net, fzero.optim.sgd(0.1), cfg)
    if not before:
        _compile(net, how)
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        loss = engine(data(rank, step))
        loss.backward()
        engine.step()
        opt.zero_grad()
        sum(plain(data(r, step)) / 2 for r in range(2)).backward()  # pyright: ignore
        opt.step()
        with torch.no_grad():
            torch.testing.assert_close(engine(data(0, 9)), plain(data(0, 9)))
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] > 0
    for name, value in engine.state_dict().items():
        found = plain.get_parameter(name.replace("_orig_mod.", ""))
        torch.testing.assert_close(value, found.detach())
    module = engine.release()
    assert not any(
        isinstance(x, compiled._Call) for part in module.modules() for x in vars(part).values()
    )
    torch.testing.assert_close(module(data(0, 9)), plain(data(0, 9)))


@pytest.mark.parametrize(
    ("how", "before"),
    [
        ("", False),
        pytest.param("", True, marks=pytest.mark.slow),
        pytest.param("wrapped", False, marks=pytest.mark.slow),
        pytest.param("wrapped", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_train_as_plain_ones(how: str, before: bool) -> None:
    run_ranks(2, _train, 3, how, before, {}, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "how", "more"),
    [
        (2, "", {}),
        (3, "whole", {}),
        (3, "frozen", {}),
        (3, "checkpoint", {}),
        (3, "", {"reshard_after_forward": False}),
    ],
)
def test_so_does_a_compiled_whole_and_what_surrounds_them(
    stage: int, how: str, more: dict[str, Any]
) -> None:
    run_ranks(2, _train, stage, how, True, more, timeout=200)


def _frees(how: str) -> None:
    torch._dynamo.reset()
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        real = compiled._Memory.make

        def make(self: Any) -> Any:
            made.append(self)
            return real(self)

        patch.setattr(compiled._Memory, "make", make)
        net = _module(how)
        _compile(net, how)
        engine = fzero.Engine(net, fzero.optim.sgd(0.1), fzero.Config(3))
        loss = engine(data(dist.get_rank()))
        assert len(made) == 3
        assert [_held(memory) for memory in made] == [0] * 3
        loss.backward(retain_graph=True)
        assert [_held(memory) for memory in made] == [0] * 3
        grad = engine.full_grad("head.weight")
        loss.backward()  # filled once more
        torch.testing.assert_close(engine.full_grad("head.weight"), 2 * grad)


def _held(memory: Any) -> int:
    return sum(full.untyped_storage().nbytes() for full in memory.full)


@pytest.mark.parametrize("how", ["", pytest.param("frozen", marks=pytest.mark.slow)])
def test_full_parameters_are_there_only_while_the_block_runs(how: str) -> None:
    run_ranks(2, _frees, how, timeout=200)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight)


class _Raw(nn.Module):
    """A function compiled as one graph, which is given the parameter itself or a copy of it."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.weight, self.copies = nn.Parameter(torch.ones(6, 2)), copies
        self.product = torch.compile(_product, backend="aot_eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight.clone() if self.copies else self.weight)


def _raw() -> str:
    torch._dynamo.reset()
    x = data(0).float()
    engine = fzero.Engine(_Raw(copies=True), fzero.optim.sgd(0.1), fzero.Config(3))
    engine(x).sum().backward()
    engine.step()
    torch._dynamo.reset()
    engine = fzero.Engine(_Raw(copies=False), fzero.optim.sgd(0.1), fzero.Config(3))
    with pytest.raises(fzero.FzeroError) as told:
        engine(x)
    return str(told.value)


def test_a_compiled_function_of_raw_parameters_says_what_to_compile() -> None:
    for said in run_ranks(2, _raw, timeout=200):
        assert "in forward: a function compiled by torch.compile" in said


def _outside(how: str) -> None:
    torch._dynamo.reset()
    rank, plain, net = dist.get_rank(), nn.Linear(6, 2).double(), nn.Linear(6, 2).double()
    net.load_state_dict(plain.state_dict())
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = fzero.Engine(net, fzero.optim.sgd(0.1), fzero.Config(3))
    product = torch.compile(_product, backend="aot_eager")
    run: Callable[[Tensor], Tensor] = {
        "module": torch.compile(net, backend="aot_eager"),
        "call": torch.compile(lambda x: engine(x), backend="aot_eager"),
        "function": lambda x: product(x, net.weight.t()) + net.bias,
    }[how]
    same = (lambda x: _product(x, plain.weight.t()) + plain.bias) if how == "function" else plain
    for step in range(2):
        run(data(rank, step)).square().mean().backward()
        engine.step()
        opt.zero_grad()
        sum(same(data(r, step)).square().mean() / 2 for r in range(2)).backward()  # pyright: ignore
        opt.step()
    assert engine.global_steps == 2
    for name, value in engine.full_params().items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())


@pytest.mark.parametrize(
    "how", ["module", pytest.param("call", marks=pytest.mark.slow), "function"]
)
def test_what_is_compiled_outside_of_the_engines_modules_reads_gathered_values(how: str) -> None:
    run_ranks(2, _outside, how, timeout=200)
