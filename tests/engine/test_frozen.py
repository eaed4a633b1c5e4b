"""What is frozen and unfrozen between steps: trained as plain torch trains it, its state kept."""

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from tests.engine.parity import data
from tests.ranks import run_fresh, run_ranks

NAMES = [f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]


def _module() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def _frozen(step: int, seed: int) -> set[str]:
    """Which are frozen in a step: some, none, all but one."""
    draws = random.Random(seed * 100 + step // 2)
    return set(draws.sample(NAMES, draws.choice([0, 2, 3, 5])))


def _freeze(module: nn.Module, frozen: set[str]) -> None:
    for name, p in module.named_parameters():
        p.requires_grad_(name not in frozen)


# ours, and torch's
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (
        lambda: fzero.optim.sgd(0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "damped": (
        lambda: fzero.optim.sgd(0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    ),
    "adafactor": (lambda: fzero.optim.adafactor(0.1), lambda p: torch.optim.Adafactor(p, 0.1)),
    "adamw": (lambda: fzero.optim.adamw(0.1), lambda p: torch.optim.AdamW(p, 0.1)),
    "amsgrad": (
        lambda: fzero.optim.adam(0.1, amsgrad=True),
        lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    ),
    "chain": (
        lambda: fzero.optim.multi_transform(
            {
                "all": fzero.optim.chain(
                    fzero.optim.scale_by_adam(),
                    fzero.optim.add_decayed_weights(0.01),
                    fzero.optim.scale_by_learning_rate(0.1),
                )
            },
            lambda params: dict.fromkeys(params, "all"),
        ),
        lambda p: torch.optim.AdamW(p, 0.1),
    ),
}


def _plain(world: int, accum: int, seed: int, kind: str) -> list[dict[str, Tensor]]:
    module = _module()
    opt = OPTIMIZERS[kind][1](module.parameters())
    seen = []
    for step in range(8):
        _freeze(module, _frozen(step, seed))
        opt.zero_grad()
        for i in range(accum):
            x = torch.cat([data(rank, step * accum + i) for rank in range(world)])
            (module(x).square().mean() / accum).backward()
        opt.step()
        seen.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return seen


def _engine(stage: int, accum: int, seed: int, kind: str) -> list[dict[str, Tensor]]:
    rank = dist.get_rank()
    cfg = fzero.Config(stage, accum_steps=accum, bucket_mb=0.0003)
    engine = fzero.Engine(_module(), OPTIMIZERS[kind][0](), cfg)
    seen = []
    for step in range(8):
        frozen = _frozen(step, seed)
        _freeze(engine.module, frozen)
        for i in range(accum):
            engine(data(rank, step * accum + i)).square().mean().backward()
        reducer = engine._parts.reducer
        sent = {reducer.leaves[i].name for bucket in reducer.buckets for i in bucket}
        assert sent == {*NAMES} - frozen  # nothing travels for what is frozen
        held = {reducer.leaves[i].name for i in {**reducer.reduced, **reducer.unreduced}}
        assert held == {*NAMES} - frozen
        assert all(engine.full_grad(name) is None for name in sorted(frozen))
        engine.step()
        seen.append(engine.full_params())
    assert engine.global_steps == 8
    return seen


@pytest.mark.parametrize(
    ("kind", "stage"),
    # what an update does to frozen leaves is the same at all stages; who reduces is not
    [
        (kind, stage)
        for i, kind in enumerate(OPTIMIZERS)
        for stage in ((0, 1, 2, 3) if kind in ("sgd", "chain") else (i % 3, 3))
    ],
)
def test_training_is_plain_torchs(stage: int, kind: str) -> None:
    accum = 2 if kind in ("sgd", "chain") else 1
    expected = _plain(2, accum, stage, kind)
    for found in run_ranks(2, _engine, stage, accum, stage, kind):
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, msg=f"step {step}, {name}")


class _Branch(nn.Module):
    """Of two branches a step runs one; the third none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(6, 5).double()
        self.branches = nn.ModuleList(nn.Linear(5, 3).double() for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](torch.tanh(self.body(x))).square().mean()


def _branched(world: int, kind: str, freezes: bool) -> dict[str, Tensor]:
    """Plain torch, where what is not run gets zeros, or is passed over as it is frozen."""
    module = _Branch()
    opt = OPTIMIZERS[kind][1](module.parameters())
    for step in range(6):
        for i, branch in enumerate(module.branches):
            branch.requires_grad_(not freezes or i == step % 2)
        opt.zero_grad()
        for rank in range(world):
            (module(data(rank, step), step % 2) / world).backward()
        for p in module.parameters():
            if p.grad is None and not freezes:
                p.grad = torch.zeros_like(p)
        opt.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def _branching(stage: int, kind: str, freezes: bool) -> dict[str, Tensor]:
    engine = fzero.Engine(_Branch(), OPTIMIZERS[kind][0](), fzero.Config(stage))
    for step in range(6):
        branches: Any = engine.module.branches
        for i, branch in enumerate(branches):
            branch.requires_grad_(not freezes or i == step % 2)
        engine(data(dist.get_rank(), step), step % 2).backward()
        engine.step()
    return engine.full_params()


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.quick("3-sgd-True", "1-adamw-True", "2-adamw-False", "0-sgd-False")
def test_what_no_rank_runs_is_updated_with_zeros_unless_it_is_frozen(
    stage: int, kind: str, freezes: bool
) -> None:
    expected = _branched(2, kind, freezes)
    for found in run_ranks(2, _branching, stage, kind, freezes):
        torch.testing.assert_close(found, expected)


def test_a_rate_by_schedule_goes_on_by_all_updates() -> None:
    engine = fzero.Engine(_module(), fzero.optim.adamw(lambda step: 0.1 / (1 + step)))
    for step in range(4):
        engine.module[0].requires_grad_(step == 3)
        engine(data(0, step)).square().mean().backward()
        engine.step()
        assert engine.metrics["lr"].item() == pytest.approx(0.1 / (1 + step))
    counts = engine.state[1].inner.counts
    assert {name: int(n) for name, n in counts.items() if name < "1"} == {
        "0.weight": 1,
        "0.bias": 1,
    }


def test_who_never_freezes_keeps_one_count() -> None:
    engine = fzero.Engine(_module(), fzero.optim.adamw(0.1))
    engine(data(0)).square().mean().backward()
    engine.step()
    assert engine.state[1].inner.counts is None


def _state_of(engine: fzero.Engine, name: str) -> list[Tensor]:
    params, opt_state = fzero.unshard(engine.state)
    inner = opt_state.inner
    found = [params[name], inner.mu[name], inner.nu[name]]
    return found + ([opt_state.master[name]] if opt_state.master else [])


def _keeps(stage: int, how: dict[str, Any]) -> None:
    x = data(dist.get_rank()).float()
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    engine = fzero.Engine(module, fzero.optim.adamw(0.1), fzero.Config(stage, **how))

    def step() -> None:
        engine.backward(engine(x).float().square().mean())
        engine.step()

    step()
    before = _state_of(engine, "0.weight")
    module[0].requires_grad_(False)
    others = _state_of(engine, "2.weight")
    step()
    step()
    for old, new in zip(before, _state_of(engine, "0.weight"), strict=True):
        assert torch.equal(old, new)
    for old, new in zip(others, _state_of(engine, "2.weight"), strict=True):
        assert not torch.equal(old, new)
    module[0].requires_grad_(True)
    step()
    assert not torch.equal(before[1], _state_of(engine, "0.weight")[1])
    assert engine.global_steps == 4


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (0, {}),
        (1, {"clip_norm": 0.1}),
        (2, {"precision": "bf16"}),
        (3, {"precision": "bf16"}),
        (3, {"precision": "fp16", "loss_scale": 128.0}),
    ],
)
def test_what_is_frozen_keeps_its_values_and_state_bit_for_bit(
    stage: int, how: dict[str, Any]
) -> None:
    run_ranks(2, _keeps, stage, how)


def _alone(stage: int) -> None:
    engine = fzero.Engine(_module(), fzero.optim.sgd(0.1), fzero.Config(stage, timeout=20))
    if dist.get_rank() == 1:
        engine.module[0].requires_grad_(False)

    def train() -> None:
        for i in range(2):  # a rank may hear of it when it comes again
            engine(data(dist.get_rank(), i)).square().mean().backward()
            engine.step()

    with pytest.raises(fzero.RankMismatchError, match=r"requires_grad.* changed on rank 1 and not"):
        train()


@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2)), 3])
def test_ranks_that_freeze_different_parameters_are_told(stage: int) -> None:
    run_fresh(2, _alone, stage)


def test_what_brought_a_gradient_is_updated_as_by_torch() -> None:
    plain, module = _module(), _module()
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = fzero.Engine(module, fzero.optim.sgd(0.1))
    for net in (plain, engine):
        inner: Any = net if isinstance(net, nn.Module) else net.module
        inner[0].requires_grad_(False)
        net(data(0)).square().mean().backward()
        inner[0].requires_grad_(True)  # in the midst of a step: from the next backward on
        inner[2].requires_grad_(False)
        net(data(1)).square().mean().backward()
    opt.step()
    engine.step()
    for name, value in engine.full_params().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_a_forward_of_another_leaves_the_set_alone() -> None:
    engine = fzero.Engine(_module(), fzero.optim.sgd(0.1))
    for _ in range(2):
        engine.module.requires_grad_(False)  # a critic, while its generator is trained
        x = data(0).requires_grad_()
        engine(x).sum().backward()
        assert x.grad is not None
        engine.module.requires_grad_(True)
        before = engine.full_params()
        engine(data(1)).square().mean().backward()
        engine.step()
        assert all(not torch.equal(x, before[name]) for name, x in engine.full_params().items())


def _judged(stage: int) -> float:
    """A generator is trained through its critic, then the critic; the farthest from plain torch."""
    rank, world, accum_steps = dist.get_rank(), dist.get_world_size(), 2
    torch.manual_seed(0)
    plain: Any = nn.ModuleList([nn.Linear(6, 6).double(), _module()])
    opts = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in plain]
    cfg, sgd = fzero.Config(stage, accum_steps=accum_steps), fzero.optim.sgd(0.1, momentum=0.9)
    engines: Any = [fzero.Engine(net, sgd, cfg) for net in copy.deepcopy(plain)]

    def losses(nets: Any, module: nn.Module, r: int, number: int) -> list[Tensor]:
        generator, critic = nets
        fake = generator(data(r, number))
        module.requires_grad_(False)
        judged = critic(fake).square().mean()
        module.requires_grad_(True)
        both = critic(torch.cat([fake.detach(), data(r, number + 50)]))
        return [judged, (both[:3] - both[3:] - 1).square().mean()]

    for step in range(3):
        for i in range(accum_steps):
            for r in range(world):
                for loss in losses(plain, plain[1], r, 2 * step + i):
                    (loss / accum_steps / world).backward()
            for loss in losses(engines, engines[1].module, rank, 2 * step + i):
                loss.backward()
            for engine in engines:
                engine.step()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert [engine.global_steps for engine in engines] == [3, 3]
    return max(
        float((value - net.state_dict()[name]).abs().max())
        for net, engine in zip(plain, engines, strict=True)
        for name, value in engine.full_params().items()
    )


@pytest.mark.parametrize("stage", range(4))
def test_a_forward_of_another_is_no_micro_batch(stage: int) -> None:
    assert max(run_ranks(2, _judged, stage)) < 1e-12


def test_step_after_forwards_of_another_alone_changes_nothing() -> None:
    engine = fzero.Engine(_module(), fzero.optim.sgd(0.1, weight_decay=0.1))
    engine.module.requires_grad_(False)
    engine(data(0).requires_grad_()).sum().backward()
    with pytest.raises(fzero.BackwardError, match="no backward has brought a gradient"):
        engine.step()
    assert engine.global_steps == 0


def test_an_optimizer_of_others_is_frozen_too() -> None:
    class Signs:
        def init(self, params: Any) -> Any:
            return {"mu": {k: torch.zeros_like(p) for k, p in params.items() if p is not None}}

        def update(self, grads: Any, state: Any, params: Any = None) -> Any:
            mu = {k: 0.5 * m + grads[k] for k, m in state["mu"].items()}
            return {k: None if g is None else -0.1 * mu[k].sign() for k, g in grads.items()}, {
                "mu": mu
            }

    engine = fzero.Engine(_module(), Signs())
    engine.module[0].requires_grad_(False)
    before = engine.full_params()
    for _ in range(2):
        engine(data(0)).square().mean().backward()
        engine.step()
    after = engine.full_params()
    assert {name for name in NAMES if torch.equal(before[name], after[name])} == {
        "0.weight",
        "0.bias",
    }


def _frozen_in_between(stage: int, apart: bool) -> float:
    """Two forwards, the second with the first layer frozen; the farthest from plain torch."""
    rank = dist.get_rank()
    module = _module()
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = fzero.Engine(_module(), fzero.optim.sgd(0.1), fzero.Config(stage))

    def losses(net: Any, first: nn.Module, number: int) -> list[Tensor]:
        one = net(data(number, 0)).square().mean()
        first.requires_grad_(False)
        two = net(data(number, 1)).square().mean()
        first.requires_grad_(True)
        return [one, two]

    for number in range(2):
        sum(losses(module, module[0], number)).backward()  # pyright: ignore
    for p in module.parameters():
        assert p.grad is not None
        p.grad /= 2
    opt.step()
    mine = losses(engine, engine.module[0], rank)  # pyright: ignore
    for loss in mine if apart else [sum(mine)]:
        loss.backward()  # pyright: ignore
    engine.step()
    found = engine.full_params()
    return max((found[name] - p).abs().max().item() for name, p in module.named_parameters())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_what_an_earlier_forward_read_still_counts(stage: int, apart: bool) -> None:
    assert max(run_ranks(2, _frozen_in_between, stage, apart)) < 1e-12
