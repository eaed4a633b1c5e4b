"""What a program may do without thinking of it, and an engine has to."""

import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.engine import outputs
from tests.ranks import fake_ranks, run_ranks

SGD = fzero.optim.sgd(0.1)


class Sum(nn.Module):
    """Two parameters whose gradients autograd puts into one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(4.0))
        self.b = nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a.view(2, 2) + self.b.view(2, 2)) * x).sum()


def shared_memory(world: int, **cfg: Any) -> list[list[float]]:
    engine = fzero.Engine(Sum(), SGD, fzero.Config(bucket_mb=1e-6, **cfg))
    for _ in range(engine.cfg.accum_steps):
        engine(torch.arange(4.0).view(2, 2)).backward()
    found = [engine.full_grad(name) for name in ("a", "b")]
    return [grad.tolist() for grad in found if grad is not None]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_gradients_in_one_memory(stage: int, accum_steps: int) -> None:
    expected = [[0.0, 1.0, 2.0, 3.0]] * 2
    assert shared_memory(1, stage=stage, accum_steps=accum_steps) == expected
    found = run_ranks(2, _shared_memory, stage, accum_steps)
    assert found == [expected, expected]


def _shared_memory(stage: int, accum_steps: int) -> list[list[float]]:
    return shared_memory(2, stage=stage, accum_steps=accum_steps)


class View(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(x).squeeze(-1)


@dataclass(slots=True)
class Slotted:
    y: Tensor


class InSlots(nn.Linear):
    def forward(self, x: Tensor) -> Slotted:  # pyright: ignore
        return Slotted(super().forward(x))


class Keeps(nn.Linear):
    loss: Tensor

    def forward(self, x: Tensor) -> None:  # pyright: ignore
        self.loss = super().forward(x).square().sum()


def in_place(engine: fzero.Engine, x: Tensor) -> None:
    engine(x).sub_(1.0).square().sum().backward()


def in_slots(engine: fzero.Engine, x: Tensor) -> None:
    engine(x).y.sum().backward()


def left_on_the_module(engine: fzero.Engine, x: Tensor) -> None:
    engine(x)
    engine.module.loss.backward()  # pyright: ignore


def penalty_alone(engine: fzero.Engine, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(engine(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.parametrize(
    ("module", "program"),
    [
        (View, in_place),
        (InSlots, in_slots),
        (Keeps, left_on_the_module),
        (nn.Linear, penalty_alone),
    ],
)
def test_every_micro_batch_is_counted(
    module: type[nn.Module], program: Callable[[fzero.Engine, Tensor], None]
) -> None:
    engine = fzero.Engine(module(3, 1), SGD, fzero.Config(accum_steps=2))  # pyright: ignore
    steps = []
    for _ in range(6):
        program(engine, torch.ones(2, 3))
        engine.step()
        steps.append(int(engine.state[1].step))
    assert steps == [0, 1, 1, 2, 2, 3]


class Tiled(torch.autograd.Function):
    """A loss that knows its gradients when forward is over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:  # pyright: ignore
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            loss = fn(x).square().sum()
        torch.autograd.backward(loss)
        ctx.save_for_backward(x.grad)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return ctx.saved_tensors[0] * grad, None


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Tiled.apply(x, self.linear)  # pyright: ignore


def test_a_backward_inside_forward_that_is_all_there_is() -> None:
    torch.manual_seed(0)
    model, plain = Head(), nn.Linear(3, 3)
    plain.load_state_dict(model.linear.state_dict())
    engine = fzero.Engine(model, SGD)
    x = torch.ones(2, 3, requires_grad=True)
    engine(x).backward()
    plain(torch.ones(2, 3)).square().sum().backward()
    torch.testing.assert_close(engine.full_grad("linear.weight"), plain.weight.grad)
    (_,) = torch.autograd.grad(engine(x), x)  # whose gradients are the caller's
    torch.testing.assert_close(engine.full_grad("linear.weight"), plain.weight.grad)
    engine.step()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.quick("0-False", "3-True", "2-False")
def test_a_module_has_one_engine(stage: int, frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    model[0].requires_grad_(not frozen)
    engine: Any = fzero.Engine(model, SGD, fzero.Config(stage))
    with pytest.raises(fzero.ShardError, match="weight' belongs to another engine"):
        fzero.Engine(nn.Sequential(model[0], nn.Linear(1, 1)), SGD)
    del engine
    gc.collect()
    again = fzero.Engine(model, SGD, fzero.Config(stage))  # that one is gone
    again(torch.ones(1, 2)).sum().backward()
    again.step()


@pytest.mark.parametrize("lazy", [False, True])
def test_an_engine_is_freed(lazy: bool) -> None:
    precision = "bf16" if lazy else None
    engine = fzero.Engine(nn.Linear(2, 1), SGD, fzero.Config(precision=precision))
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    watched = weakref.ref(engine)
    del engine
    gc.collect()
    assert watched() is None


def test_what_was_frozen_from_the_start_stays_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    engine = fzero.Engine(model, SGD)
    model[0].requires_grad_(True)
    engine(torch.ones(1, 2)).sum().backward()
    with pytest.raises(fzero.FzeroError, match=r"requires_grad=True, and had False.*no room"):
        engine.step()
    model[0].requires_grad_(False)  # as a GAN does between its steps
    engine.step()


def test_an_engine_in_a_reentrant_checkpoint_commits_once() -> None:
    engine = fzero.Engine(nn.Linear(2, 2), SGD)
    x = torch.ones(1, 2, requires_grad=True)

    def twice() -> Tensor:
        h: Any = checkpoint(engine, x, use_reentrant=True)
        return checkpoint(engine, h, use_reentrant=True).sum()  # pyright: ignore

    loss, late = twice(), Raises.apply(x)
    with pytest.raises(ValueError, match="on purpose"):
        (late.sum() + loss).backward()  # pyright: ignore
    assert engine.full_grad("weight") is None
    twice().backward()
    assert engine.full_grad("weight") is not None


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        raise ValueError("on purpose")


def test_two_scales_in_one_backward_are_refused() -> None:
    a, b = (
        fzero.Engine(nn.Linear(2, 2), SGD, fzero.Config(loss_scale=scale)) for scale in (8.0, 2.0)
    )
    h = a(torch.ones(1, 2))
    once = a.scale(b.scale(b(h).sum()))
    with pytest.raises(fzero.BackwardError, match="two different loss scales"):
        (once + a.scale(h.sum())).backward()
    for engine in (a, b):
        assert engine.full_grad("weight") is None


def test_a_refused_update_keeps_the_gradients() -> None:
    model = nn.Linear(2, 1)
    engine = fzero.Engine(model, SGD, fzero.Config(on_nonfinite="raise", accum_steps=2))
    for x in (1.0, torch.inf):
        engine(torch.full((1, 2), x)).sum().backward()
    before = engine.full_grad("weight")
    with pytest.raises(fzero.FzeroError, match="NaN or infinity in"):
        engine.step()
    assert before is not None
    assert torch.equal(before, engine.full_grad("weight"))  # pyright: ignore
    engine.zero_grad()


def test_the_metric_is_no_view_of_the_loss() -> None:
    engine = fzero.Engine(nn.Linear(1, 1), SGD)
    loss = engine(torch.ones(1, 1)).sum()
    value = loss.item()
    engine.backward(loss, scale_wrt_gas=False).mul_(100.0)
    loss.detach().mul_(100.0)
    engine.step()
    assert engine.state[1].metrics["loss"].item() == pytest.approx(value)


def test_inputs_of_every_container_are_cast() -> None:
    given = OrderedDict(x=torch.ones(1), rest=[torch.ones(1), torch.tensor(1)])
    low = outputs.cast(given, torch.bfloat16)
    assert type(low) is OrderedDict
    assert [x.dtype for x in outputs.tensors_in(low)] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.int64,
    ]
    assert given["x"].dtype == torch.float32
    assert outputs.cast(Slotted(torch.ones(1)), torch.float16).y.dtype == torch.float16


def test_bits_of_a_sharded_parameter_are_not_for_writing() -> None:
    with fake_ranks(2):
        engine = fzero.Engine(nn.Linear(4, 4), SGD)
        weight: Any = engine.module.weight
        with pytest.raises(fzero.FzeroError, match=r"p\.clone\(\) first"):
            weight.view(torch.int32).zero_()


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(2))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        return x @ self.w if uses else x * 1


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_whose_backward_reaches_nothing_brings_zeros(who: int) -> None:
    assert run_ranks(2, _reaches_nothing, who) == [[[0.5, 0.5], [0.5, 0.5]]] * 2


def _reaches_nothing(who: int) -> Any:
    for stage in range(3):
        engine = fzero.Engine(Sometimes(), SGD, fzero.Config(stage))
        x = torch.ones(1, 2, requires_grad=True)
        engine(x, torch.distributed.get_rank() == who).sum().backward()
        grad = engine.full_grad("w")
        engine.step()
        assert grad is not None
    return grad.tolist()  # pyright: ignore


class Shares(nn.Module):
    """A weight that one rank alone also uses inside a re-entrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, inside: bool) -> Tensor:
        if inside:
            x = checkpoint(self.multiply, x, use_reentrant=True)  # pyright: ignore
        return (x * self.w).sum()

    def multiply(self, x: Tensor) -> Tensor:
        return x * self.w


def test_gradients_that_come_late_on_one_rank() -> None:
    for results in run_ranks(2, _late_on_one_rank):
        assert results == [[1.5, 1.5]] * 3


def _late_on_one_rank() -> list[Any]:
    engine = fzero.Engine(Shares(), fzero.optim.sgd(0.0), fzero.Config(stage=2))
    grads = []
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        engine(x, torch.distributed.get_rank() == 1).backward()
        grads.append(engine.full_grad("w").tolist())  # pyright: ignore
        engine.step()
    return grads


def test_one_rank_may_look_at_parameters_that_are_whole() -> None:
    run_ranks(2, _looks_alone)


def _looks_alone() -> None:
    for stage in range(3):
        engine = fzero.Engine(nn.Linear(2, 1), SGD, fzero.Config(stage))
        for _ in range(2):
            engine(torch.ones(1, 2)).sum().backward()
            engine.step()
            if torch.distributed.get_rank() == 0:  # to save or print them
                assert engine.full_params()["weight"].shape == (1, 2)


class _Turned(nn.Module):
    """A frozen complex parameter, read through its conjugate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
        turn = torch.randn(5, 4, dtype=torch.complex128)
        self.turn = nn.Parameter(turn, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.w) * (1 + 2j)
        return (
            (h @ self.turn.conj()).imag.mean()
            + (self.turn.mH @ h.mT).real.sum()
            + (h @ self.turn).imag.mean()
            # elementwise kernels do not look at the bit that says so
            + (h[:1].mT * self.turn.conj()).imag.sum()
            + (h[:1] * (self.turn * 2).conj().t()[:1]).imag.sum()
            + (h[:1] * self.turn.conj().t()[1:2]).imag.sum()
        )


def _conjugates() -> float:
    x = [torch.randn(3, 6, dtype=torch.float64, generator=_seeded(r)) for r in range(2)]
    plain = _Turned()
    (sum(map(plain, x)) / 2).backward()  # pyright: ignore
    engine = fzero.Engine(_Turned(), fzero.optim.sgd(0.1), fzero.Config(3))
    mine = x[dist.get_rank()]
    loss = engine(mine)
    torch.testing.assert_close(loss, plain(mine))
    loss.backward()
    found = engine.full_grad("w")
    assert found is not None
    assert plain.w.grad is not None
    return (found - plain.w.grad).abs().max().item()


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_a_view_keeps_its_conjugation() -> None:
    assert max(run_ranks(2, _conjugates)) < 1e-12


@pytest.mark.parametrize("stage", [0, 3])
def test_forwards_of_one_loss_that_count_as_micro_batches_are_told_of(stage: int) -> None:
    def engine() -> Any:
        torch.manual_seed(0)
        cfg = fzero.Config(stage, accum_steps=4)
        return fzero.Engine(nn.Linear(3, 2), fzero.optim.sgd(0.1), cfg)

    x = torch.ones(4, 3)
    siamese = engine()
    for i in range(4):  # one loss of two forwards, with the boundary by word
        (siamese(x) * siamese(-x)).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            siamese.step(i % 4 == 3)
    assert int(siamese.state[1].step) == 1
    early = engine()
    for i in range(4):
        (early(x) * early(-x)).sum().backward()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            early.step()
        said = [str(w.message) for w in told if "reached 2 forwards" in str(w.message)]
        assert len(said) == (i == 0)  # once, with the line of the call
        assert all(w.filename == __file__ for w in told if "reached 2" in str(w.message))
    assert int(early.state[1].step) == 2
    carried, hidden = engine(), torch.zeros(4, 2)  # backward through time: each adds one forward
    for _ in range(4):
        hidden = hidden + carried(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hidden.sum().backward(retain_graph=True)
            carried.step()
    one_by_one = engine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            one_by_one(x).sum().backward()
            one_by_one.step()
    assert int(one_by_one.state[1].step) == 1
