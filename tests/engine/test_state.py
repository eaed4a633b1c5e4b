"""Full parameters and gradients, and the way to the functional path and back."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fzero
from fzero import ShardError
from tests.engine.models import Net
from tests.engine.parity import STAGES, build, data, here
from tests.ranks import fake_ranks, run_ranks

Trees = tuple[Any, Any]


def loss_fn(out: Tensor, x: Tensor) -> Tensor:
    return F.mse_loss(out, x[:, :5].tanh())


def five(start: Trees | None, cfg: fzero.Config, opt: Any, way: str, first: int) -> Trees:
    """Five steps from a state, in one way or the other; the state after."""
    rank, _ = here()
    module = build(Net)
    frozen = ("frozen.*",)
    if way == "engine":
        engine = fzero.Engine(module, opt, cfg)
        if start is not None:
            engine.state = start
        for step in range(first, first + 5):
            for micro in range(cfg.accum_steps):
                x = data(rank, 10 * step + micro)
                engine.backward(loss_fn(engine(x), x))
            engine.step()
        return copy.deepcopy(engine.state)
    apply, params = fzero.functionalize(module)
    step_fn = fzero.make_train_step(
        lambda params, x: loss_fn(apply(params, x), x),
        opt,
        cfg.replace(frozen=frozen, donate=False),
    )
    params, opt_state = step_fn.init(params) if start is None else start
    for step in range(first, first + 5):
        micro = [data(rank, 10 * step + i) for i in range(cfg.accum_steps)]
        params, opt_state = step_fn(params, opt_state, torch.cat(micro))
    return params, opt_state


def ten_steps_either_way(opt_of: Callable[[], Any], tol: float, stages: dict[int, int]) -> None:
    for stage, accum in stages.items():
        cfg = fzero.Config(stage=stage, accum_steps=accum)
        ends = []
        for ways in (("engine", "step"), ("step", "engine"), ("step", "step")):
            half = five(None, cfg, opt_of(), ways[0], 0)
            params, opt_state = five(half, cfg, opt_of(), ways[1], 5)
            assert int(opt_state.step) == 10
            ends.append((fzero.unshard(params), opt_state.metrics))
        for params, metrics in ends[:2]:
            for name, want in ends[2][0].items():
                torch.testing.assert_close(params[name], want, rtol=tol, atol=tol)
            for key in ("loss", "grad_norm"):
                torch.testing.assert_close(metrics[key], ends[2][1][key], rtol=1e-5, atol=1e-6)


def sgd() -> Any:
    return fzero.optim.sgd(0.1, momentum=0.9)


def adamw() -> Any:
    return fzero.optim.adamw(1e-2, weight_decay=0.1)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.quick("2")
def test_five_steps_in_each_are_ten_in_either(world: int) -> None:
    accum = {0: 1, 1: 2, 2: 2, 3: 1}
    if world == 1:
        ten_steps_either_way(sgd, 1e-10, accum)
    else:
        run_ranks(world, ten_steps_either_way, sgd, 1e-10, accum, timeout=120)


def test_a_state_travels_with_adam() -> None:
    run_ranks(2, ten_steps_either_way, adamw, 1e-8, {3: 2}, timeout=120)


def reads_change_nothing() -> None:
    rank, _ = here()
    for stage in STAGES:
        seen, unseen = (
            fzero.Engine(build(Net), sgd(), fzero.Config(stage=stage, accum_steps=2))
            for _ in range(2)
        )
        for engine in (seen, unseen):
            for i in range(2):
                out = engine(data(rank, i))
                if engine is seen:
                    engine.full_params()
                loss = out.square().mean()
                if engine is seen:
                    before = engine.full_grad("up.weight")
                loss.backward()
                if engine is seen:
                    grads = [engine.full_grad("up.weight") for _ in range(3)]
                    assert all(torch.equal(grads[0], grad) for grad in grads)  # pyright: ignore
                    assert before is None or not torch.equal(before, grads[0])  # pyright: ignore
                    grads[0].zero_()  # pyright: ignore
                    engine.full_params()["up.weight"].zero_()
                    assert engine.full_grad("tied.weight") is not None
                    assert engine.full_grad("unused") is None
                    assert engine.state is not None
            engine.step()
        ours, theirs = seen.full_params(), unseen.full_params()
        for name, want in theirs.items():
            torch.testing.assert_close(ours[name], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [1, 2])
def test_looking_changes_nothing(world: int) -> None:
    if world == 1:
        reads_change_nothing()
    else:
        run_ranks(world, reads_change_nothing)


def names_and_values() -> None:
    for stage in STAGES:
        module = build(Net)
        want = {name: p.detach().clone() for name, p in module.named_parameters()}
        engine = fzero.Engine(module, sgd(), fzero.Config(stage=stage))
        found = engine.full_params()
        assert list(found) == list(want)
        assert all(torch.equal(found[name], p) for name, p in want.items())
        assert [name for name, _ in engine.module.named_parameters()] == list(want)
        assert engine.module is module
        assert engine.is_gradient_accumulation_boundary()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_full_params_are_the_modules_own(world: int) -> None:
    if world == 1:
        names_and_values()
    else:
        run_ranks(world, names_and_values)


def boundaries() -> None:
    engine = fzero.Engine(build(Net), sgd(), fzero.Config(stage=1, accum_steps=3))
    seen = []
    for i in range(7):
        loss = engine(data(here()[0], i)).mean()
        seen.append(engine.is_gradient_accumulation_boundary())
        loss.backward()
        seen.append(engine.is_gradient_accumulation_boundary())
        before = int(engine.state[1].step)
        engine.step()
        assert (int(engine.state[1].step) > before) == seen[-1]
    assert seen == [(i // 2 + 1) % 3 == 0 for i in range(14)]


def test_the_boundary_is_every_third_micro_batch() -> None:
    boundaries()


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_that_does_not_fit(stage: int) -> None:
    engine = fzero.Engine(build(Net), sgd(), fzero.Config(stage=stage))
    params, opt_state = engine.state
    for wrong in (None, params, (params, None), ({}, opt_state), (opt_state, params)):
        with pytest.raises((fzero.ShardError, fzero.RankMismatchError)):
            engine.state = wrong  # pyright: ignore


def test_a_function_of_the_engines_module_is_no_forward_of_the_engines() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Tanh())
    engine = fzero.Engine(module, fzero.optim.sgd(0.1), fzero.Config(accum_steps=2))
    apply, _ = fzero.functionalize(module)
    theirs = {"0.weight": torch.ones(1, 3, requires_grad=True), "0.bias": torch.zeros(1)}
    for _ in range(3):
        apply(theirs, torch.ones(2, 3)).mean().backward()
    assert engine.full_grad("0.weight") is None
    module(torch.ones(2, 3)).mean().backward()
    engine.step()  # one micro-batch of two
    assert int(engine.state[1].step) == 0


def hessian_products(stage: int) -> None:
    """Of the mean loss at an engine's parameters, through the functional path and plain torch."""
    rank, world = here()
    engine = fzero.Engine(build(Net), sgd(), fzero.Config(stage=stage))
    x = data(rank)
    engine(x).square().mean().backward()
    engine.step()
    apply, _ = fzero.functionalize(engine.module)
    params, _ = engine.state
    vectors = fzero.tree_map(torch.ones_like, params)
    cfg = engine.cfg
    _, products = fzero.hvp(lambda p, x: apply(p, x).square().mean(), cfg)(params, vectors, x)

    plain = build(Net)
    plain.load_state_dict(engine.state_dict())
    some = {
        name: p
        for name, p in plain.named_parameters()
        if p.requires_grad and name not in ("unused", "outside")
    }
    loss = torch.stack([plain(data(r)).square().mean() for r in range(world)]).mean()
    grads = torch.autograd.grad(loss, list(some.values()), create_graph=True)
    total = torch.stack([grad.sum() for grad in grads]).sum()
    found = fzero.unshard(products)
    for name, want in zip(some, torch.autograd.grad(total, list(some.values())), strict=True):
        torch.testing.assert_close(found[name], want, rtol=0, atol=1e-8, msg=f"{stage} {name}")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.quick("3")
def test_hessian_products_at_an_engines_state(stage: int) -> None:
    hessian_products(stage)
    run_ranks(2, hessian_products, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_of_before_a_step_is_no_way_back(stage: int) -> None:
    """Its tensors are the engine's own, so a step has written over them; a copy is one."""
    with fake_ranks(2):
        engine = fzero.Engine(nn.Linear(3, 2), fzero.optim.adam(0.1), fzero.Config(stage=stage))

        def step() -> None:
            engine(torch.ones(1, 3)).sum().backward()
            engine.step()

        step()
        held, kept = engine.state, fzero.tree_map(torch.clone, engine.state)
        before = kept[1].inner
        engine.state = engine.state  # of now it is none
        step()
        with pytest.raises(ShardError, match=r"that of an earlier step, 1, .*engine\.state"):
            engine.state = held
        assert engine.global_steps == 2
        engine.state = kept
        assert engine.global_steps == 1
        now = engine.state[1].inner
        assert all(map(torch.equal, *map(local_leaves, (now, before))))


def local_leaves(tree: Any) -> list[Tensor]:
    leaves = fzero.tree.leaves(tree)
    return [x.to_local() if isinstance(x, DTensor) else x for x in leaves]


def test_a_state_that_a_step_function_trained_is_assigned_before_the_engine_goes_on() -> None:
    engine = fzero.Engine(nn.Linear(3, 2), fzero.optim.adam(0.1))
    apply, _ = fzero.functionalize(nn.Linear(3, 2))
    batch = torch.ones(1, 3)
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).sum(), fzero.optim.adam(0.1), engine.cfg
    )
    engine(batch).sum().backward()
    params, opt_state = step_fn(*engine.state, batch)
    with pytest.raises(ShardError, match=r"engine\.step\(\) was called, and engine\.state was"):
        engine.step()
    with pytest.raises(ShardError, match=r"a forward began.*engine\.state = step_fn"):
        engine(batch)
    with torch.no_grad():
        engine(batch)  # reads parameters alone
    engine.state = params, opt_state
    engine.step()
    assert engine.global_steps == 2
