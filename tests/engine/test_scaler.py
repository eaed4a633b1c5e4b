"""`torch.amp.GradScaler` with `engine.optimizer`; see [Note: a scaler's gradients]."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from fzero.errors import BackwardError, FzeroError, RankMismatchError
from tests.ranks import run_ranks

STAGES = (0, 1, 2, 3)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).double()


def batch(step: int, rank: int, *, bad: bool = False) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)).double()
    if bad:
        x[0, 0] = math.inf
    return x


def scaler(**more: Any) -> Any:
    return torch.amp.GradScaler("cpu", **{"init_scale": 1000.0, "growth_interval": 2, **more})


def me() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def follows(stage: int, accum: int, *, unscales: bool, zeroes: bool) -> None:
    """Steps under scalers: scales, gradients, parameters as plain torch on all ranks' rows."""
    rank, world = me()
    plain, theirs = net(), scaler()
    torchs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    cfg = fzero.Config(stage=stage, accum_steps=accum)
    engine, ours = fzero.Engine(net(), fzero.optim.sgd(0.1, momentum=0.9), cfg), scaler()
    for step in range(6):
        torchs.zero_grad()
        bad = step == 1  # on the last rank alone
        for micro in range(step * accum, (step + 1) * accum):
            rows = [batch(micro, r, bad=bad and r == world - 1) for r in range(world)]
            theirs.scale(plain(torch.cat(rows)).square().mean() / accum).backward()
            ours.scale(engine(rows[rank]).square().mean()).backward()
        if unscales:
            theirs.unscale_(torchs)
            ours.unscale_(engine.optimizer)
            for name, p in plain.named_parameters():
                torch.testing.assert_close(engine.full_grad(name), p.grad, equal_nan=True)
        theirs.step(torchs)
        ours.step(engine.optimizer)
        theirs.update()
        ours.update()
        if zeroes:
            engine.optimizer.zero_grad()
        assert ours.get_scale() == theirs.get_scale()
    assert engine.global_steps == 5
    assert ours.get_scale() != 1000.0, "it never moved"
    for name, value in engine.full_params().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_it_steps_an_engine_as_a_torch_optimizer(stage: int, accum: int) -> None:
    follows(stage, accum, unscales=False, zeroes=True)
    follows(stage, accum, unscales=True, zeroes=False)


def on_ranks(stage: int) -> None:
    for accum in (1, 2):
        follows(stage, accum, unscales=True, zeroes=False)
    follows(stage, 1, unscales=False, zeroes=True)


@pytest.mark.parametrize("stage", STAGES)
def test_it_steps_the_engines_of_several_ranks(stage: int) -> None:
    run_ranks(2, on_ranks, stage)


class OneSided(nn.Module):
    """A part that only rank 0 trains."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.one = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.both(x) + self.one(x) if both else self.both(x)


def one_sided(stage: int) -> None:
    rank, _ = me()
    torch.manual_seed(0)
    plain, ours = OneSided().double(), scaler()
    torch.manual_seed(0)
    cfg = fzero.Config(stage=stage)
    engine = fzero.Engine(OneSided().double(), fzero.optim.sgd(0.1), cfg)
    torchs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        torchs.zero_grad()
        # rank 1 has no finite gradient at the second step, and none of `one` at any
        bad = step == 1
        losses = [plain(batch(step, r, bad=bad and r == 1), r == 0).square().mean() for r in (0, 1)]
        (sum(losses) / 2).backward()  # pyright: ignore
        if not bad:
            torchs.step()
        loss = engine(batch(step, rank, bad=bad and rank == 1), rank == 0).square().mean()
        ours.scale(loss).backward()
        ours.step(engine.optimizer)
        ours.update()
    for name, value in engine.full_params().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    assert engine.global_steps == 2


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_have_gradients_of_other_leaves_skip_together(stage: int) -> None:
    run_ranks(2, one_sided, stage)


def other_scales() -> None:
    rank, _ = me()
    engine = fzero.Engine(net(), fzero.optim.sgd(0.1))
    mine = scaler(init_scale=(1.0, 2.0, 3.0)[rank])
    mine.scale(engine(batch(0, rank)).square().mean()).backward()
    before = {name: engine.full_grad(name) for name, _ in net().named_parameters()}
    with pytest.raises(RankMismatchError, match="GradScalers have different scales"):
        mine.step(engine.optimizer)
    assert all(torch.equal(engine.full_grad(name), x) for name, x in before.items())  # pyright: ignore


def test_scales_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    run_ranks(3, other_scales)  # the middle one's scale is about the mean


def test_a_step_that_overflowed_leaves_gradients_to_look_at_until_the_next_forward() -> None:
    engine, mine = fzero.Engine(net(), fzero.optim.sgd(0.1)), scaler()
    mine.scale(engine(batch(0, 0, bad=True)).square().mean()).backward()
    mine.unscale_(engine.optimizer)
    seen = engine.full_grad("0.weight")
    assert seen is not None
    assert not seen.isfinite().all()
    mine.step(engine.optimizer)
    mine.update()
    assert engine.global_steps == 0
    with torch.no_grad():
        engine(batch(0, 0))  # an evaluation changes nothing
    assert engine.full_grad("0.weight") is not None
    loss = engine(batch(0, 0)).square().mean()
    assert engine.full_grad("0.weight") is None
    loss.backward()
    grad = engine.full_grad("0.weight")
    assert grad is not None
    assert grad.isfinite().all()


def test_a_backward_of_before_a_step_that_overflowed_is_told_the_way_on() -> None:
    engine, mine = fzero.Engine(net(), fzero.optim.sgd(0.1)), scaler()
    early = engine(batch(1, 0)).square().mean()
    mine.scale(engine(batch(0, 0, bad=True)).square().mean()).backward()
    mine.step(engine.optimizer)
    mine.update()
    with pytest.raises(BackwardError, match=r"not finite.* call engine.zero_grad\(\) after"):
        mine.scale(early).backward(retain_graph=True)
    engine.zero_grad()
    mine.scale(early).backward()
    mine.step(engine.optimizer)
    assert engine.global_steps == 1


def backward_in_between() -> None:
    rank, _ = me()
    engine, mine = fzero.Engine(net(), fzero.optim.sgd(0.1)), scaler()
    for step in range(3):
        mine.scale(engine(batch(step, rank)).square().mean()).backward()
        mine.unscale_(engine.optimizer)
        before = engine.full_grad("2.weight")
        with pytest.raises(BackwardError, match="after a GradScaler had divided"):
            mine.scale(engine(batch(step, rank)).square().mean()).backward()
        assert torch.equal(engine.full_grad("2.weight"), before)  # pyright: ignore
        mine.step(engine.optimizer)
        mine.update()
    assert engine.global_steps == 3


def test_a_backward_in_between_is_refused_where_gradients_are_reduced_as_they_come() -> None:
    run_ranks(2, backward_in_between)


def test_what_would_mix_scales_is_refused() -> None:
    engine, mine = fzero.Engine(net(), fzero.optim.sgd(0.1)), scaler()
    mine.scale(torch.ones(()))
    with pytest.raises(BackwardError, match="no backward has brought a gradient"):
        mine.unscale_(engine.optimizer)
    mine = scaler()
    mine.scale(engine(batch(0, 0)).square().mean()).backward()
    mine.unscale_(engine.optimizer)
    before = engine.full_grad("0.weight")
    with pytest.raises(BackwardError, match="after a GradScaler had divided"):
        mine.scale(engine(batch(1, 0)).square().mean()).backward()
    assert torch.equal(engine.full_grad("0.weight"), before)  # pyright: ignore
    second = scaler()
    second.scale(torch.ones(()))
    with pytest.raises(BackwardError, match="twice in one step"):
        second.unscale_(engine.optimizer)
    mine.step(engine.optimizer)
    mine.update()
    assert engine.global_steps == 1

    engine = fzero.Engine(net(), fzero.optim.sgd(0.1), fzero.Config(accum_steps=2))
    mine = scaler()
    mine.scale(engine(batch(0, 0)).square().mean()).backward()
    with pytest.raises(BackwardError, match=r"after 1 of 2 micro-batches"):
        mine.step(engine.optimizer)


@pytest.mark.parametrize("cfg", [{"loss_scale": 8.0}, {"precision": "fp16"}])
def test_two_loss_scales_are_refused(cfg: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    engine, mine = fzero.Engine(model, fzero.optim.sgd(0.1), fzero.Config(**cfg)), scaler()
    engine.backward(mine.scale(engine(batch(0, 0).float()).float().square().mean()))
    with pytest.raises(BackwardError, match="has a loss scale of its own"):
        mine.step(engine.optimizer)


def test_losses_that_were_given_are_reported_without_the_scale() -> None:
    engine, mine = fzero.Engine(net(), fzero.optim.sgd(0.1)), scaler()
    loss = engine(batch(0, 0)).square().mean()
    engine.backward(mine.scale(loss))
    mine.step(engine.optimizer)
    torch.testing.assert_close(engine.metrics["loss"], loss.detach())


def test_clipping_bounds_the_norm_without_the_scale() -> None:
    plain, theirs = net(), scaler()
    torchs = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine, ours = fzero.Engine(net(), fzero.optim.sgd(0.1), fzero.Config(clip_norm=0.01)), scaler()
    theirs.scale(plain(batch(0, 0)).square().mean()).backward()
    theirs.unscale_(torchs)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    theirs.step(torchs)
    ours.scale(engine(batch(0, 0)).square().mean()).backward()
    ours.step(engine.optimizer)
    torch.testing.assert_close(engine.metrics["grad_norm"], norm)
    for name, value in engine.full_params().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_another_optimizer_of_the_same_parameters_is_refused() -> None:
    module = net()
    engine, mine = fzero.Engine(module, fzero.optim.sgd(0.1)), scaler()
    mine.scale(engine(batch(0, 0)).square().mean()).backward()
    with pytest.raises(BackwardError, match=r"engine\.full_grad"):
        mine.step(torch.optim.SGD(module.parameters(), lr=0.1))


def test_a_scaler_that_goes_another_way_is_refused_by_name() -> None:
    class Own(torch.amp.GradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.div_(2.0)

    engine, mine = fzero.Engine(net(), fzero.optim.sgd(0.1)), Own("cpu")
    mine.scale(engine(batch(0, 0)).square().mean()).backward()
    with pytest.raises(FzeroError, match=r"a GradScaler was to run aten\.div_"):
        mine.unscale_(engine.optimizer)


def test_everybody_else_sees_the_modules_parameters() -> None:
    module = net()
    engine = fzero.Engine(module, fzero.optim.sgd(0.1))
    (group,) = engine.optimizer.param_groups
    assert [*map(id, group["params"])] == [*map(id, module.parameters())]


def test_one_that_is_switched_off_steps_an_engine() -> None:
    # as a loop for every precision has it: GradScaler(enabled=args.fp16)
    engine, mine = fzero.Engine(net(), fzero.optim.sgd(0.1)), scaler(enabled=False)
    for step in range(2):
        engine.optimizer.zero_grad()
        mine.scale(engine(batch(step, 0)).square().mean()).backward()
        mine.unscale_(engine.optimizer)
        mine.step(engine.optimizer)
        mine.update()
    assert engine.global_steps == 2


def test_an_optimizer_without_one_rate_has_a_face_for_it() -> None:
    """Of what a scaler asks nothing is a rate; who does ask is told that there is none."""
    opt = fzero.optim.multi_transform(
        {"w": fzero.optim.sgd(0.1), "b": fzero.optim.sgd(0.2)},
        lambda params: {name: "b" if "bias" in name else "w" for name in params},
    )
    engine, x = fzero.Engine(net(), opt), batch(0, 0)
    scales = scaler()
    before = engine.full_params()
    scales.scale(engine(x).square().mean()).backward()
    scales.step(engine.optimizer)
    scales.update()
    assert engine.global_steps == 1
    assert not any(torch.equal(x, before[name]) for name, x in engine.full_params().items())
    assert "lr" not in engine.optimizer.param_groups[0]
    assert repr(engine.optimizer) == "EngineOptimizer(4 parameters)"
    with pytest.raises(FzeroError, match=r"\['lr'\]: the optimizer has the rates .*'w': 0\.1"):
        engine.optimizer.param_groups[0]["lr"]
    with pytest.raises(FzeroError, match=r"\['lr'\]: the optimizer has the rates .*'w': 0\.1"):
        torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
