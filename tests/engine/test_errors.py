"""What a user does out of order is told, with what to do instead, before anything is written."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import BackwardError, ConfigError
from tests.engine.models import Net
from tests.engine.parity import SGD, STAGES, build, data, here
from tests.ranks import run_ranks

every_stage = pytest.mark.parametrize("stage", STAGES)


def engine_of(stage: int, **fields: Any) -> fzero.Engine:
    return fzero.Engine(build(Net), SGD(), fzero.Config(stage=stage, **fields))


def loss_of(engine: fzero.Engine, i: int = 0) -> Tensor:
    return engine(data(here()[0], i)).square().mean()


@every_stage
def test_what_is_no_loss(stage: int) -> None:
    engine = engine_of(stage)
    out = engine(data(0))
    with torch.no_grad():
        without = engine(data(0)).sum()
    for wrong in (out, out.mean().detach(), without, torch.tensor(1.0), 3.0, None, {"loss": out}):
        with pytest.raises(BackwardError, match=r"scalar tensor.*\.mean\(\)"):
            engine.backward(wrong)  # pyright: ignore
    for wrong in (out.detach(), 1.0):
        with pytest.raises(BackwardError, match="scale"):
            engine.scale(wrong)  # pyright: ignore
    assert engine.full_grad("gain") is None


@every_stage
def test_step_without_backward(stage: int) -> None:
    engine = engine_of(stage)
    for _ in range(2):
        with pytest.raises(BackwardError, match=r"no backward.*loss\.backward\(\)"):
            engine.step()
    loss_of(engine).backward()
    engine.step()
    with pytest.raises(BackwardError, match="no backward"):
        engine.step()
    loss_of(engine).backward()
    engine.zero_grad()
    with pytest.raises(BackwardError, match="no backward"):
        engine.step()
    x = data(0).requires_grad_()
    torch.autograd.grad(engine(x).sum(), x)
    with pytest.raises(BackwardError, match="no backward"):
        engine.step()


@every_stage
def test_a_boundary_is_a_flag(stage: int) -> None:
    engine = engine_of(stage, accum_steps=4)
    loss = loss_of(engine)
    loss.backward()
    for wrong in (lambda: loss, loss, loss.detach() * 0, 1, "now"):
        with pytest.raises(
            ConfigError, match=r"boundary=.*True, False or None.*loss\.backward\(\)"
        ):
            engine.step(wrong)  # pyright: ignore
    engine.step()
    assert engine.global_steps == 0
    loss_of(engine).backward()
    engine.step(True)
    assert engine.global_steps == 1


@every_stage
def test_a_boundary_by_word_takes_what_earlier_steps_have_left(stage: int) -> None:
    left, straight = engine_of(stage, accum_steps=2), engine_of(stage, accum_steps=2)
    for i in range(3):  # the last one is half of an accumulation
        loss_of(left, i).backward()
        left.step()
        loss_of(straight, i).backward()
        straight.step(True if i == 2 else None)
    left.step(True)
    assert left.global_steps == straight.global_steps == 2
    wanted = dict(straight.full_params())
    assert all(torch.equal(x, wanted[name]) for name, x in left.full_params().items())
    with pytest.raises(BackwardError, match="no backward has brought a gradient"):
        left.step(True)


def test_flags_are_no_other_objects() -> None:
    engine = engine_of(0)
    loss = loss_of(engine)
    for call, said in (
        (lambda: engine.backward(loss, torch.ones(())), r"backward: retain_graph=.*bool\(\.\.\.\)"),  # pyright: ignore
        (lambda: engine.zero_grad(engine.module), "zero_grad: set_to_none="),  # pyright: ignore
        (lambda: engine.load_state_dict({}, "no"), "load_state_dict: strict='no'"),  # pyright: ignore
        (lambda: fzero.Engine(build(Net), SGD(), broadcast=0), "Engine: broadcast=0"),  # pyright: ignore
    ):
        with pytest.raises(ConfigError, match=said):
            call()
    engine.backward(loss)


@every_stage
def test_step_without_optimizer(stage: int) -> None:
    engine = fzero.Engine(build(Net), cfg=fzero.Config(stage=stage))
    loss_of(engine).backward()
    with pytest.raises(BackwardError, match=r"optimizer.*fzero\.Engine\(model, "):
        engine.step()
    assert engine.full_grad("gain") is not None


def step_inside() -> None:
    for stage in STAGES:
        engine = engine_of(stage)
        before = engine.full_params()
        with engine.no_sync():
            loss_of(engine).backward()
            grad = engine.full_grad("up.weight")
            with pytest.raises(BackwardError, match="no_sync"):
                engine.step()
        again = engine.full_grad("up.weight")
        assert grad is not None
        assert again is not None
        assert torch.equal(grad, again)
        engine.step()
        moved = before["up.weight"] - 0.1 * grad
        torch.testing.assert_close(engine.full_params()["up.weight"], moved, rtol=0, atol=1e-10)


@pytest.mark.parametrize("world", [1, 2])
def test_step_inside_no_sync(world: int) -> None:
    if world == 1:
        step_inside()
    else:
        run_ranks(world, step_inside)


@every_stage
def test_between_passes_only(stage: int) -> None:
    engine = engine_of(stage)
    calls = (engine.step, engine.zero_grad, lambda: setattr(engine, "state", engine.state))

    def refused(*_: Any) -> None:
        for call in calls:
            with pytest.raises(BackwardError, match="inside"):
                call()

    hook = engine.module.inner.register_forward_hook(refused)
    out = engine(data(0))
    hook.remove()
    out.register_hook(lambda grad: engine.module.inner.weight.register_hook(refused) and None)
    out.sum().backward()
    engine.step()


@every_stage
def test_an_unknown_name_lists_near_ones(stage: int) -> None:
    engine = engine_of(stage)
    with pytest.raises(fzero.ShardError, match=r"inner\.weight"):
        engine.full_grad("inner.weigth")
    with pytest.raises(fzero.ShardError, match=r"full_grad\(None\): the module has no parameter"):
        engine.full_grad(None)  # pyright: ignore[reportArgumentType]


def test_what_is_no_loader_and_no_state() -> None:
    engine = engine_of(2)
    with pytest.raises(BackwardError, match=r"engine.join takes .* was given a NoneType"):
        engine.join(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BackwardError, match=r"load_state_dict takes .* was given a NoneType"):
        engine.optimizer.load_state_dict(None)  # pyright: ignore[reportArgumentType]


@every_stage
def test_gradients_that_wait_are_no_part_of_the_state(stage: int) -> None:
    engine = engine_of(stage, accum_steps=2)
    state = copy.deepcopy(engine.state)
    loss_of(engine).backward()
    waiting = engine.full_grad("inner.weight")
    engine.state = state
    found = engine.full_grad("inner.weight")
    assert waiting is not None
    assert found is not None
    assert torch.equal(found, waiting)
    engine.zero_grad()
    assert engine.full_grad("inner.weight") is None


def scaled(engine: fzero.Engine, i: int = 0) -> None:
    engine.backward(loss_of(engine, i))


def bare(engine: fzero.Engine, i: int = 0) -> None:
    loss_of(engine, i).backward()


def needs_its_scale(fields: dict[str, Any], tol: float) -> None:
    """A bare backward is refused before anything is written, wherever a scaled one was."""
    plain = engine_of(0)
    for stage in STAGES:
        engine = engine_of(stage, accum_steps=1, **fields)
        before = engine.full_params()
        with pytest.raises(BackwardError, match="scale"):
            bare(engine)
        assert all(engine.full_grad(name) is None for name in before)
        with pytest.raises(BackwardError, match="no backward"):
            engine.step()
        scaled(engine)
        first = engine.full_grad("inner.weight")
        with pytest.raises(BackwardError, match="scale"):  # what came before is no excuse
            bare(engine, 1)
        kept = engine.scale(loss_of(engine, 1))  # nor is a scale that no backward has used
        with pytest.raises(BackwardError, match="scale"):
            bare(engine, 2)
        with pytest.raises(BackwardError, match="scale"):
            engine.module.outside.sum().backward()
        again = engine.full_grad("inner.weight")
        assert first is not None
        assert again is not None
        assert torch.equal(first, again)
        kept.backward()
        engine.zero_grad()
        out = engine(data(here()[0]))
        engine.scale(out).backward(torch.ones_like(out))
        found = engine.full_grad("inner.weight")
        assert found is not None
        plain.zero_grad()
        plain(data(here()[0])).sum().backward()
        want = plain.full_grad("inner.weight")
        assert want is not None
        assert (found - want).abs().max() < tol * want.abs().max()
        engine.step()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("fields", "tol"),
    [({"loss_scale": 128.0}, 1e-10), ({"precision": "fp16", "loss_scale": 128.0}, 2e-2)],
    ids=["static", "fp16"],
)
def test_a_backward_without_the_scale(world: int, fields: dict[str, Any], tol: float) -> None:
    if world == 1:
        needs_its_scale(fields, tol)
    else:
        run_ranks(world, needs_its_scale, fields, tol)


def test_meta_parameters() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(fzero.ShardError, match=r"meta.*Engine\(lambda: Model\(\), opt, cfg\)"):
        fzero.Engine(module)


def outdated() -> None:
    for stage in STAGES:
        engine = engine_of(stage)
        for change in (engine.step, lambda e=engine: setattr(e, "state", e.state)):
            old, used = loss_of(engine), loss_of(engine, 1)
            used.backward()
            change()
            engine.zero_grad()
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                old.backward()
            assert engine.full_grad("up.weight") is None
            loss_of(engine, 2).backward()


@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_through_parameters_that_have_changed_since(world: int) -> None:
    if world == 1:
        outdated()
    else:
        run_ranks(world, outdated)


def changes_in_place() -> None:
    engine = engine_of(3)
    with torch.no_grad(), pytest.raises(fzero.FzeroError, match=r"'gain'.*engine\.state"):
        engine.module.gain.mul_(2)


def test_a_sharded_parameter_cannot_be_changed_in_place() -> None:
    run_ranks(2, changes_in_place)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("to", r"before its engine is made: Engine\(module\.to\("),
        ("half", r"Engine\(module\.half\("),
        ("param_groups", r"engine\.optimizer"),
        ("save_checkpoint", r"fzero\.checkpoint\.save\(path, \*engine\.state\)"),
        ("named_parameters", r"engine\.module\.named_parameters"),
        ("nothing", r"no attribute 'nothing'\.$"),
        ("_private", r"no attribute '_private'\.$"),
    ],
)
def test_an_attribute_that_is_elsewhere_is_told_of(name: str, said: str) -> None:
    engine = fzero.Engine(nn.Linear(2, 1))
    with pytest.raises(AttributeError, match=said):
        getattr(engine, name)
    assert not hasattr(engine, name)
