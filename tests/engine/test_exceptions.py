"""After an exception the engine is as before the call, and an exact retry is exact."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.engine.models import Lost, Raises, TiledLoss
from tests.engine.parity import SGD, STAGES, build, compare, data, here, wanted
from tests.ranks import run_ranks

WHERE = [
    ("forward", None),
    ("backward", None),
    ("forward", True),
    ("backward", True),
    ("again", True),
    ("again", False),
    ("backward", False),
]


def broken(engine: Any, where: str, reentrant: bool | None, rank: int, i: int) -> None:
    engine.module.where = where
    with pytest.raises(Lost):
        engine(data(rank, i).requires_grad_(), reentrant).square().mean().backward()
    engine.module.where = ""


def passes(net: Any, rank: int, i: int, reentrant: bool | None) -> None:
    net(data(rank, i).requires_grad_(), reentrant).square().mean().backward()


def retry_is_exact(where: str, reentrant: bool | None) -> None:
    rank, _ = here()
    accum = 3

    def whole(net: Any, rank: int) -> None:
        for i in range(accum):
            passes(net, rank, i, reentrant)

    want = wanted(Raises, whole, here()[1], accum)
    for stage in STAGES:
        cfg = fzero.Config(stage=stage, accum_steps=accum, bucket_mb=1e-4)
        engine = fzero.Engine(build(Raises), SGD(), cfg)
        before = engine.full_params()
        broken(engine, where, reentrant, rank, 0)
        assert engine.full_grad("a.weight") is None
        with pytest.raises(fzero.BackwardError, match="no backward"):
            engine.step()
        passes(engine, rank, 0, reentrant)
        first = engine.full_grad("a.weight")
        assert first is not None
        boundary = engine.is_gradient_accumulation_boundary()
        broken(engine, where, reentrant, rank, 1)
        again = engine.full_grad("a.weight")
        assert again is not None
        assert torch.equal(first, again)
        engine.step()  # one micro-batch of three: nothing happens
        assert torch.equal(engine.full_params()["b.weight"], before["b.weight"])
        with engine.no_sync():
            broken(engine, where, reentrant, rank, 1)
            passes(engine, rank, 1, reentrant)
            broken(engine, where, reentrant, rank, 2)
        assert not boundary
        passes(engine, rank, 2, reentrant)
        broken(engine, where, reentrant, rank, 2)
        compare(engine, want, f"stage {stage}, {where} {reentrant}")
        engine.step()
        assert not torch.equal(engine.full_params()["b.weight"], before["b.weight"])


@pytest.mark.parametrize(("where", "reentrant"), WHERE)
@pytest.mark.parametrize("world", [1, 2])
def test_a_retry_is_exact(world: int, where: str, reentrant: bool | None) -> None:
    if world == 1:
        retry_is_exact(where, reentrant)
    else:
        run_ranks(world, retry_is_exact, where, reentrant)


def test_a_retry_is_exact_at_world_4() -> None:
    run_ranks(4, retry_is_exact, "again", True)
    run_ranks(4, retry_is_exact, "backward", None)


def unsynced_after_a_raise() -> None:
    rank, world = here()

    def whole(net: Any, rank: int) -> None:
        for i in range(3):
            passes(net, rank, i, None)

    want = wanted(Raises, whole, world, 3)
    for stage in STAGES:
        cfg = fzero.Config(stage=stage, accum_steps=3, bucket_mb=1e-4)
        engine = fzero.Engine(build(Raises), SGD(), cfg)
        with engine.no_sync():
            passes(engine, rank, 0, None)
        broken(engine, "backward", None, rank, 1)  # some of what was there has been sent
        with engine.no_sync():
            passes(engine, rank, 1, None)
        passes(engine, rank, 2, None)
        compare(engine, want, f"stage {stage}")


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_lost_backward_sent_is_there_for_the_next(world: int) -> None:
    if world == 1:
        unsynced_after_a_raise()
    else:
        run_ranks(world, unsynced_after_a_raise)


class HeadInForward(nn.Module):
    """A head whose gradient is made inside forward, and a body that can lose its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        h.register_hook(self._hook)
        return TiledLoss.apply(h, self.head)

    def _hook(self, grad: Tensor) -> None:
        if self.fails:
            raise Lost


def backward_again() -> None:
    rank, world = here()
    want = wanted(HeadInForward, lambda net, rank: net(data(rank)).backward(), world)
    for stage in STAGES:
        engine = fzero.Engine(build(HeadInForward), SGD(), fzero.Config(stage=stage))
        loss = engine(data(rank))
        engine.module.fails = True
        for _ in range(2):
            with pytest.raises(Lost):
                loss.backward(retain_graph=True)
            assert engine.full_grad("head.weight") is None
        engine.module.fails = False
        loss.backward()
        compare(engine, want, f"stage {stage}")


@pytest.mark.parametrize("world", [1, 2])
def test_early_gradients_are_there_for_another_try_of_backward(world: int) -> None:
    if world == 1:
        backward_again()
    else:
        run_ranks(world, backward_again)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_a_forward_that_raised_are_gone(stage: int) -> None:
    def after(loss: Tensor) -> Tensor:
        raise Lost

    engine = fzero.Engine(build(HeadInForward), SGD(), fzero.Config(stage=stage))
    handle = engine.module.register_forward_hook(lambda module, args, out: after(out))
    with pytest.raises(Lost):
        engine(data(0))
    handle.remove()
    del engine(data(0, 3)).grad  # a forward that nobody goes back from
    engine(data(0)).backward()
    want = wanted(HeadInForward, lambda net, rank: net(data(rank)).backward(), 1)
    compare(engine, want, f"stage {stage}")


@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_leaves_early_gradients_alone(stage: int) -> None:
    engine = fzero.Engine(build(HeadInForward), SGD(), fzero.Config(stage=stage))
    loss = engine(data(0))
    torch.autograd.grad(loss, [engine.module.body.weight], retain_graph=True)
    assert engine.full_grad("head.weight") is None
    with pytest.raises(fzero.BackwardError, match="no backward"):
        engine.step()
    loss.backward()
    want = wanted(HeadInForward, lambda net, rank: net(data(rank)).backward(), 1)
    compare(engine, want, f"stage {stage}")


class Failing:
    """An optimizer whose update raises while it `fails`."""

    fails = True

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if self.fails:
            raise RuntimeError("no memory")
        return grads, state


def test_a_step_whose_gradients_are_used_up_is_not_taken_again() -> None:
    """The update had them, and raised: a second one would be of nothing."""
    opt = Failing()
    engine = fzero.Engine(nn.Linear(2, 1), opt, fzero.Config(stage=0))
    engine(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    opt.fails = False
    with pytest.raises(fzero.BackwardError, match="no backward has brought a gradient"):
        engine.step()
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    assert engine.global_steps == 1
