"""Blocks that a user has compiled: plain torch's numbers, no graph break of ours, freed memory."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import fzero
from fzero import tree
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


def _loop(stage: int, made_inside: bool) -> None:
    torch._dynamo.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    net, plain = _module(""), _module("")
    engine = fzero.Engine(net, fzero.optim.sgd(0.1), fzero.Config(stage, clip_norm=0.5))
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def iteration(x: Tensor) -> Tensor:
        loss = engine(2 * x)
        (engine.backward(loss) if made_inside else loss.backward())
        engine.step()
        return loss

    for i in range(3):
        loss = iteration(data(rank, i))
        opt.zero_grad()
        losses = [plain(2 * data(r, i)) for r in range(world)]
        (sum(losses) / world).backward()  # pyright: ignore
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        opt.step()
        torch.testing.assert_close(loss, losses[rank])
    found = engine.full_params()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found[name], value.detach())


BREAKS_OFF = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.12"),
    reason="Dynamo of torch 2.11 breaks off inside of itself (tuple index out of range)",
)


@BREAKS_OFF
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.quick("True-3", "False-0")
def test_a_compiled_loop_trains_as_a_plain_one(stage: int, made_inside: bool) -> None:
    run_ranks(2, _loop, stage, made_inside, timeout=200)


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
        x = data(dist.get_rank()).requires_grad_()
        loss = engine(x)
        torch.autograd.grad(loss, x, retain_graph=True)  # no gradient of a parameter says its end
        assert [_held(memory) for memory in made] == [0] * 6


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
    "how",
    [
        pytest.param("module", marks=BREAKS_OFF),
        pytest.param("call", marks=pytest.mark.slow),
        "function",
    ],
)
def test_what_is_compiled_outside_of_the_engines_modules_reads_gathered_values(how: str) -> None:
    run_ranks(2, _outside, how, timeout=200)


# ---- a backward that comes elsewhere, or late

BACKENDS = ["eager", "aot_eager"]


class Keeps(nn.Module):
    """Values of the middle are kept: in a list, past a graph break, and by who hooks modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.side = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 2)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self._keep(h)
        self._keep(torch.tanh(self.side(h)))  # of what the output does not depend on
        return torch.tanh(self.down(h))

    @torch.compiler.disable
    def _keep(self, x: Tensor) -> None:
        self.kept.append(x)


def _pair(backend: str, kind: Callable[[], nn.Module], **more: Any) -> tuple[Any, Any]:
    """A plain module, and an engine of the same with one compiled block; lazy on one rank, too."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 6), kind()).double()
    net = copy.deepcopy(plain)
    net.get_submodule("1").compile(backend=backend)
    if not dist.is_initialized():
        wide = torch.float64
        low = torch.float32
        more["precision"] = fzero.Precision(param=low, master=wide, reduce=wide, output=wide)
    return plain, fzero.Engine(net, fzero.optim.sgd(0.5), fzero.Config(3, **more))


def _tail() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh())


def _same_gradients(engine: Any, plain: nn.Module) -> None:
    for name, x in plain.named_parameters():
        found = engine.full_grad(name)
        want = torch.zeros_like(x) if x.grad is None else x.grad
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def _step(engine: Any) -> None:
    engine(data(5)).square().mean().backward()
    engine.step()


def _load(engine: Any) -> None:
    engine.load_state_dict({name: 2 * x for name, x in engine.state_dict().items()})


def _gathered(engine: Any, name: str = "1.2.weight") -> None:
    with engine.gathered([name], modifier_rank=0) as params, torch.no_grad():
        params[name].mul_(2)


def _assign(engine: Any) -> None:
    engine.state = copy.deepcopy(engine.state)


def _in_state(engine: Any) -> None:
    with torch.no_grad():
        for x in tree.leaves(engine.state[0]):
            x.mul_(2)


def _in_part(engine: Any) -> None:
    with torch.no_grad():
        for x in tree.leaves(engine.state[0]):
            x.to_local().mul_(2)


WRITES = {x.__name__: x for x in (_step, _load, _gathered, _assign, _in_state, _in_part)}


def _stale(engine: Any, write: str) -> None:
    x = data(0).requires_grad_()
    loss = engine(x).square().mean()
    torch.autograd.grad(loss, x, retain_graph=True)  # what it has filled in is not left there
    WRITES[write](engine)
    engine.zero_grad()
    with pytest.raises(fzero.BackwardError, match=r"of '1' \(Sequential\).*'1\.[02]\.weight' was"):
        loss.backward()
    _step(engine)  # goes on


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_after_a_write_is_refused(backend: str, write: str) -> None:
    _, engine = _pair(backend, _tail)
    _stale(engine, write)


def _all_stale(backend: str) -> None:
    _, engine = _pair(backend, _tail)
    for write in WRITES:
        _stale(engine, write)


@pytest.mark.parametrize("backend", BACKENDS)
def test_so_it_is_on_two_ranks(backend: str) -> None:
    run_ranks(2, _all_stale, backend, timeout=200)


@pytest.mark.parametrize("backend", BACKENDS)
def test_so_it_is_where_parameters_stay_until_backward(backend: str) -> None:
    _, engine = _pair(backend, _tail, reshard_after_forward=False)
    for write in WRITES:
        _stale(engine, write)


def _again(backend: str) -> None:
    _, engine = _pair(backend, _tail)
    loss = engine(data(0)).square().mean()
    loss.backward(retain_graph=True)
    engine.step()
    with pytest.raises(fzero.BackwardError, match="was written after that forward"):
        loss.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_so_is_a_second_backward_after_a_step(backend: str) -> None:
    _again(backend)
    run_ranks(2, _again, backend, timeout=200)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reading_or_writing_what_backward_does_not_read_is_no_reason(backend: str) -> None:
    plain, engine = _pair(backend, _tail)
    loss = engine(data(0)).square().mean()
    assert engine.state_dict()
    assert copy.deepcopy(engine.state)
    with torch.no_grad():
        engine(data(1))
    _gathered(engine, "1.0.bias")
    loss.backward()
    plain(data(0)).square().mean().backward()
    _same_gradients(engine, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_written_in_place_are_refused_as_by_torch(backend: str) -> None:
    plain, engine = _pair(backend, _tail)
    for net, x in ((plain, data(0)), (engine.module, data(0).float())):
        out = net(x)
        out.detach().mul_(2)  # which the last tanh has saved
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.square().mean().backward()


def _kept(backend: str, order: str, keep: bool) -> None:
    plain, engine = _pair(backend, Keeps, reshard_after_forward=not keep)
    rank, world = (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)
    for net, module, ranks in ((plain, plain, range(world)), (engine, engine.module, [rank])):
        block: Any = module.get_submodule("1")
        block.side.hooked = []  # of the module: Dynamo of torch 2.11 forgets a function's own
        handle = block.side.register_forward_hook(lambda m, i, o: m.hooked.append(o))
        for r in ranks:
            out = net(data(r)).square().mean()
            middle, side = (x.double().square().mean() for x in block.kept)
            losses = {
                "o": out,
                "m": middle,
                "s": side,
                "h": block.side.hooked.pop().double().square().mean(),
            }
            block.kept.clear()
            for at, key in enumerate(order, 1):
                (losses[key] / len(ranks)).backward(retain_graph=at < len(order))
        handle.remove()
    _same_gradients(engine, plain)


@pytest.mark.parametrize("order", ["m", "s", "h", "oms", "smo", "hmo"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_may_begin_at_what_was_kept(backend: str, order: str) -> None:
    _kept(backend, order, keep=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_two_ranks_too_and_where_parameters_stay(backend: str) -> None:
    run_ranks(2, _kept, backend, "smo", False, timeout=200)
    _kept(backend, "smoo", keep=True)


class Inner(nn.Module):
    """A derivative inside of the block: torch refuses hooks on what is saved there."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) + torch.func.grad(lambda z: torch.tanh(z).sum())(x)


# torch refuses Inner in another's
@pytest.mark.parametrize(("kind", "around"), [(_tail, ""), (_tail, "save_on_cpu"), (Inner, "")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_where_hooks_are_refused_or_anothers(
    backend: str, kind: Callable[[], nn.Module], around: str
) -> None:
    plain, engine = _pair(backend, kind)
    hooks = torch.autograd.graph.save_on_cpu if around else contextlib.nullcontext
    for _ in range(2):
        with hooks():
            loss = engine(data(0)).square().mean()
        loss.backward(retain_graph=True)
        plain(data(0)).square().mean().backward()
        _same_gradients(engine, plain)
    with hooks():
        loss = engine(data(0)).square().mean()
    engine.step()
    if not around:  # whose hooks keep copies of the forward's values
        with pytest.raises(fzero.BackwardError, match="was written after that forward"):
            loss.backward()
    with torch.autograd.graph.save_on_cpu():  # still allowed
        (data(0).requires_grad_() ** 2).sum().backward()


def test_gradients_of_gradients() -> None:
    plain, engine = _pair("eager", _tail)  # others refuse it
    for net in (plain, engine):
        x = data(0).requires_grad_()
        (grad,) = torch.autograd.grad(net(x).square().mean(), x, create_graph=True)
        penalty = grad.square().sum()
        penalty.backward(retain_graph=True)
        penalty.backward()
    _same_gradients(engine, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_a_call_is_left_when_its_outputs_are_gone(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = compiled._Memory.make
    monkeypatch.setattr(
        compiled._Memory, "make", lambda x: (made.append(weakref.ref(x)), real(x))[1]
    )
    _, engine = _pair(backend, _tail)
    for backward in (True, False):
        loss = engine(data(0)).square().mean()
        if backward:
            loss.backward()
        del loss
    gc.collect()
    assert [x() for x in made] == [None] * 2
