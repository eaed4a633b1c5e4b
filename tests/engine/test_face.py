"""`engine.lr = ...` and `engine.optimizer`: torch's schedulers drive an engine."""

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

import fzero
from fzero.errors import BackwardError, ConfigError, FzeroError
from tests.ranks import run_ranks

SGD = fzero.optim.inject_hyperparams(fzero.optim.sgd)

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda i: 1 / (i + 1)),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(
        opt, max_lr=0.3, total_steps=9, cycle_momentum=False
    ),
    "warm restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0),
    "sequence": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)],
        [2],
    ),
}


def rates(name: str, stage: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    every = torch.cat(
        [torch.randn(4, 3, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
    )
    torch.manual_seed(0)
    plain, module = nn.Linear(3, 2), nn.Linear(3, 2)
    module.load_state_dict(plain.state_dict())
    torchs = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = fzero.Engine(module, SGD(lr=0.1), fzero.Config(stage=stage))
    theirs, ours = SCHEDULES[name](torchs), SCHEDULES[name](engine.optimizer)
    plateau = (1.0,) if name == "plateau" else ()
    for _ in range(6):
        torchs.zero_grad()
        plain(every).square().mean().backward()
        torchs.step()
        theirs.step(*plateau)
        engine.optimizer.zero_grad()
        engine(x).square().mean().backward()
        engine.optimizer.step()
        ours.step(*plateau)
        assert engine.lr == pytest.approx(torchs.param_groups[0]["lr"], rel=1e-6)
    for key, value in engine.full_params().items():
        torch.testing.assert_close(value, plain.state_dict()[key])
    saved = ours.state_dict(), engine.optimizer.state_dict()
    assert saved[1]["param_groups"][0]["lr"] == engine.lr
    now, engine.lr = engine.lr, 7.0
    engine.optimizer.load_state_dict(saved[1])
    assert engine.lr == pytest.approx(now)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_of_torch_drive_an_engine(name: str) -> None:
    run_ranks(2, rates, name, 3)


CYCLES: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=9),
    "up and down": lambda opt: lr_scheduler.CyclicLR(opt, 0.1, 0.3, step_size_up=2),
}


def momenta(name: str, kind: str, stage: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    every = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain, module = nn.Linear(3, 2), nn.Linear(3, 2)
    module.load_state_dict(plain.state_dict())
    options = {"momentum": 0.9} if kind == "SGD" else {}
    torchs = getattr(torch.optim, kind)(plain.parameters(), lr=0.1, **options)
    make = fzero.optim.inject_hyperparams(getattr(fzero.optim, kind.lower()), momentum=True)
    engine = fzero.Engine(module, make(0.1, **options), fzero.Config(stage=stage))
    theirs, ours = CYCLES[name](torchs), CYCLES[name](engine.optimizer)
    for _ in range(6):
        (group,) = torchs.param_groups
        momentum = group["momentum"] if kind == "SGD" else group["betas"][0]
        assert engine.momentum == pytest.approx(momentum, rel=1e-6)
        assert engine.optimizer.param_groups[0]["momentum"] == engine.momentum
        torchs.zero_grad()
        plain(every).square().mean().backward()
        torchs.step()
        theirs.step()
        engine(every.chunk(2)[rank]).square().mean().backward()
        engine.step()
        ours.step()
    for key, value in engine.full_params().items():
        torch.testing.assert_close(value, plain.state_dict()[key])
    saved, now = engine.optimizer.state_dict(), engine.momentum
    engine.momentum = 0.1
    engine.optimizer.load_state_dict(saved)
    assert engine.momentum == pytest.approx(now)


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_schedulers_that_cycle_momentum_drive_an_engine(name: str, kind: str) -> None:
    run_ranks(2, momenta, name, kind, 3 if kind == "SGD" else 1)


def test_a_momentum_that_is_not_in_the_state_says_how_it_comes_there() -> None:
    engine = fzero.Engine(nn.Linear(2, 1), SGD(lr=0.1, momentum=0.9))
    assert engine.momentum is None
    with pytest.raises(FzeroError, match=r"inject_hyperparams\(fzero.optim.sgd, momentum=True\)"):
        engine.momentum = 0.8
    with pytest.raises(ValueError, match="must support momentum"):  # torch's own
        lr_scheduler.OneCycleLR(engine.optimizer, 0.1, 9)
    injected = fzero.optim.inject_hyperparams(fzero.optim.sgd, momentum=True)
    engine = fzero.Engine(nn.Linear(2, 1), injected(lr=0.1))
    for value in (-0.1, float("nan"), "much", True):
        with pytest.raises(ConfigError, match=r"engine\.momentum = "):
            engine.momentum = value  # pyright: ignore[reportAttributeAccessIssue]
    engine.momentum = 0.5
    assert engine.momentum == 0.5
    # a number of this name that is none: nothing takes it for momentum
    mine = fzero.optim.inject_hyperparams(
        lambda lr, decay: fzero.optim.adamw(lr, weight_decay=decay)
    )
    assert fzero.Engine(nn.Linear(2, 1), mine(0.1, 0.2)).momentum is None


def test_no_scheduler_warns_where_the_engine_itself_is_stepped() -> None:
    engine = fzero.Engine(nn.Linear(3, 2), SGD(lr=0.1))
    schedule = lr_scheduler.StepLR(engine.optimizer, 1)
    engine(torch.ones(4, 3)).sum().backward()
    engine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
    assert engine.lr == pytest.approx(0.01)


def test_a_rate_that_is_set_counts_at_once_and_stays_over_a_checkpoint() -> None:
    chained = fzero.optim.chain(fzero.optim.clip_by_global_norm(9.0), SGD(lr=0.1))
    engine = fzero.Engine(nn.Linear(2, 1), chained)
    engine.lr = 0.0
    before = engine.full_params()
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    assert all(torch.equal(x, before[k]) for k, x in engine.full_params().items())
    assert float(engine.metrics["lr"]) == 0.0
    other = fzero.Engine(nn.Linear(2, 1), chained)
    other.state = engine.state
    assert other.lr == 0.0


def test_what_has_no_rate_in_its_state_says_what_has() -> None:
    engine = fzero.Engine(nn.Linear(2, 1), fzero.optim.sgd(0.1))
    fixed = r"fixed at 0\.1, .*inject_hyperparams\(fzero\.optim\.sgd\)\(lr=0\.1\): .*schedule"
    with pytest.raises(FzeroError, match=r"^engine\.lr was assigned 0\.2, and .*" + fixed):
        engine.lr = 0.2
    groups = r"^engine\.optimizer\.param_groups\[0\]\['lr'\] was assigned 0\.\d+ \(a scheduler of "
    with pytest.raises(FzeroError, match=groups + r"torch does that\), .*" + fixed):
        engine.optimizer.param_groups[0]["lr"] = 0.2
    falling = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.9)
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    with pytest.raises(FzeroError, match=groups):
        falling.step()
    chained = fzero.Engine(nn.Linear(2, 1), fzero.optim.chain(fzero.optim.adamw(0.1)))
    with pytest.raises(FzeroError, match=r"fixed at 0\.1, .*adamw\)\(lr=0\.1\) for example"):
        chained.lr = 0.2
    scheduled = fzero.Engine(nn.Linear(2, 1), SGD(lr=fzero.optim.linear(0.1, 0.0, 4)))
    with pytest.raises(FzeroError, match=r"given by its schedule.* with a number in place of it"):
        scheduled.lr = 0.2
    assert scheduled.lr == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="finite"):
        fzero.Engine(nn.Linear(2, 1), SGD(lr=0.1)).lr = float("nan")


def test_what_an_engine_can_not_do_is_refused() -> None:
    engine = fzero.Engine(nn.Linear(2, 1), SGD(lr=0.1))
    assert engine.optimizer is engine.optimizer
    assert "lr=0.1" in repr(engine.optimizer)
    with pytest.raises(BackwardError, match="no backward"):
        engine.optimizer.step(lambda: 0.0)
    with pytest.raises(BackwardError, match="multi_transform"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize("lr", ["fast", None, True, [0.1], {}, -1.0, float("nan"), torch.ones(2)])
def test_what_is_no_rate_is_refused_in_words(lr: Any) -> None:
    engine = fzero.Engine(nn.Linear(2, 1), SGD(lr=0.1))
    with pytest.raises(ConfigError, match=r"engine\.lr = "):
        engine.lr = lr
    assert engine.lr == pytest.approx(0.1)


def test_a_loop_that_owns_its_optimizers_steps_an_engine() -> None:
    # as Lightning's: a closure, hooks on step, groups and state read and written, a scheduler
    torch.manual_seed(0)
    engine = fzero.Engine(nn.Linear(3, 1), SGD(lr=0.1))
    optimizer: torch.optim.Optimizer = engine.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    plain = nn.Linear(3, 1)
    plain.load_state_dict(engine.state_dict())

    def closure() -> Any:
        loss = engine(torch.ones(2, 3)).square().mean()
        optimizer.zero_grad()  # between forward and backward, as Lightning does
        loss.backward()
        return loss

    for lr in (0.1, 0.05):
        loss: Any = optimizer.step(closure)
        schedule.step()
        expected = plain(torch.ones(2, 3)).square().mean()
        torch.testing.assert_close(loss, expected)
        for p, g in zip(
            plain.parameters(), torch.autograd.grad(expected, [*plain.parameters()]), strict=True
        ):
            p.data -= lr * g
    for name, value in engine.full_params().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    assert seen == ["before", "after"] * 2
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.025)]
    saved = optimizer.state_dict()
    engine.lr = 1.0
    optimizer.load_state_dict(saved)
    assert engine.lr == pytest.approx(0.025)
    assert engine.global_steps == 2


def lightning_fits(stage: int, manual: bool, folder: Path) -> None:
    import lightning as L  # pyright: ignore

    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = torch.randn(4, 2, 2, 3)  # step, rank, row

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            copied = nn.Linear(3, 1)
            copied.load_state_dict(net.state_dict())
            self.engine = fzero.Engine(copied, SGD(lr=0.1), fzero.Config(stage))

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.engine(batch[0]).square().mean()
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
                self.lr_schedulers().step()
            return loss

        def configure_optimizers(self) -> Any:
            opt = self.engine.optimizer
            schedule = lr_scheduler.StepLR(opt, 1, 0.5)
            return {
                "optimizer": opt,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    module = Module()
    trainer = L.Trainer(
        strategy=L.pytorch.strategies.SingleDeviceStrategy("cpu"),
        max_epochs=1,
        logger=L.pytorch.loggers.CSVLogger(folder / str(dist.get_rank())),
        callbacks=[L.pytorch.callbacks.LearningRateMonitor("step")],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    mine = torch.utils.data.TensorDataset(batches[:, dist.get_rank()].flatten(0, 1))
    trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=2))
    for step in range(4):
        plain.param_groups[0]["lr"] = 0.1 * 0.5**step
        plain.zero_grad()
        net(batches[step].flatten(0, 1)).square().mean().backward()
        plain.step()
    assert module.engine.global_steps == trainer.global_step == 4
    assert module.engine.lr == pytest.approx(0.1 / 16)
    for name, value in module.engine.full_params().items():
        torch.testing.assert_close(value, net.state_dict()[name])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="Lightning is not installed: pip install 'fzero[dev-peers]' brings it",
)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("manual", [False, True])
def test_lightnings_own_trainer_steps_an_engine(stage: int, manual: bool, tmp_path: Path) -> None:
    run_ranks(2, lightning_fits, stage, manual, tmp_path, timeout=200)


WAYS: dict[str, Callable[[Any], Any]] = {
    "item": lambda group: group.__setitem__("lr", 0.5),
    "update": lambda group: group.update(lr=0.5),
    "update from a dict": lambda group: group.update({"lr": 0.5}),
    "or": lambda group: group.__ior__({"lr": 0.5}),
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "item": lambda group: group["lr"],
    "get": lambda group: group.get("lr"),
    "default": lambda group: group.setdefault("lr", 7.0),
    "dict": lambda group: dict(group)["lr"],
    "keywords": lambda group: {**group}["lr"],
    "items": lambda group: dict(group.items())["lr"],
    "values": lambda group: dict(zip(group, group.values(), strict=True))["lr"],
    "copy": lambda group: group.copy()["lr"],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rate_that_is_written_in_any_way_of_a_dict_is_the_engines(way: str) -> None:
    engine = fzero.Engine(nn.Linear(2, 1), SGD(lr=0.1))
    (group,) = engine.optimizer.param_groups
    assert isinstance(group, dict)
    WAYS[way](group)
    assert engine.lr == 0.5
    engine.lr = 0.25
    assert {name: view(group) for name, view in VIEWS.items()} == dict.fromkeys(VIEWS, 0.25)


@pytest.mark.parametrize("key", ["weight_decay", "momentum", "betas", "eps"])
def test_a_number_of_the_update_that_a_group_can_not_set_is_refused(key: str) -> None:
    engine = fzero.Engine(nn.Linear(2, 1), SGD(lr=0.1))
    (group,) = engine.optimizer.param_groups
    for write in (lambda: group.__setitem__(key, 0.5), lambda: group.update({key: 0.5})):
        with pytest.raises(BackwardError, match=rf"hyperparams\['{key}'\]\.fill_"):
            write()
    group["initial_lr"] = 0.5  # what schedulers note there is theirs
    assert group["initial_lr"] == 0.5
    assert key not in group


def test_another_optimizers_state_is_refused() -> None:
    model = nn.Linear(2, 1)
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adamw.step()
    engine = fzero.Engine(nn.Linear(2, 1), SGD(lr=0.1))
    with pytest.raises(BackwardError, match=r"2 parameters.*engine\.state"):
        engine.optimizer.load_state_dict(adamw.state_dict())


@pytest.mark.filterwarnings("error")
def test_a_scheduler_after_the_engines_own_step_warns_of_nothing() -> None:
    engine = fzero.Engine(nn.Linear(2, 1), SGD(lr=0.1))
    schedule = lr_scheduler.StepLR(engine.optimizer, 1)
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    schedule.step()
    assert engine.lr == pytest.approx(0.01)


def _by_dims(matrix: float, vector: float) -> fzero.Engine:
    opt = fzero.optim.multi_transform(
        {"matrix": SGD(lr=matrix), "vector": SGD(lr=vector)},
        {"weight": "matrix", "bias": "vector"},
    )
    return fzero.Engine(nn.Linear(2, 1), opt)


def test_rates_that_differ_are_read_by_label_and_not_made_one_by_a_number() -> None:
    engine = _by_dims(0.1, 0.2)
    assert engine.lr == {"matrix": 0.1, "vector": 0.2}
    for way in WAYS.values():
        with pytest.raises(FzeroError, match=r"0\.5.*, and .*\[0\.1, 0\.2\].*dict\.fromkeys"):
            way(engine.optimizer.param_groups[0])
    with pytest.raises(FzeroError, match=r"'vector': 0\.2.*by label"):
        lr_scheduler.StepLR(engine.optimizer, 1)
    assert engine.lr == {"matrix": 0.1, "vector": 0.2}
    engine.lr = dict.fromkeys(engine.lr, 0.5)
    assert engine.lr == 0.5


def test_a_scheduler_drives_labels_of_one_rate_until_they_are_set_apart() -> None:
    engine = _by_dims(0.1, 0.1)
    schedule = lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    schedule.step()
    assert engine.lr == 0.05
    (group,) = engine.optimizer.param_groups
    engine.lr = {"matrix": 1.0}
    assert "lr" not in group
    assert "lr" not in group.copy()
    assert len(group) == len([*group])
    saved = engine.optimizer.state_dict()  # with both of them in its state
    with pytest.raises(FzeroError, match="by label"):
        schedule.step()
    other = _by_dims(0.1, 0.2)
    other.optimizer.load_state_dict(saved)
    assert other.lr == {"matrix": 1.0, "vector": 0.05}


def test_a_rate_that_a_schedule_gives_is_not_set_by_its_label() -> None:
    opt = fzero.optim.multi_transform(
        {"matrix": SGD(lr=0.1), "vector": SGD(lr=lambda step: 0.2 / (step + 1))},
        {"weight": "matrix", "bias": "vector"},
    )
    engine = fzero.Engine(nn.Linear(2, 1), opt)
    before = engine.lr
    with pytest.raises(FzeroError, match="given by a schedule"):
        engine.lr = {"matrix": 0.5, "vector": 0.5}
    assert engine.lr == before
    engine.lr = {"matrix": 0.5}
    assert engine.lr == {**before, "matrix": 0.5}


def test_a_state_with_another_rate_than_the_optimizers_own_is_not_loaded() -> None:
    saving, other = (
        fzero.Engine(nn.Linear(2, 1), fzero.optim.sgd(rate, momentum=0.9)) for rate in (0.1, 0.2)
    )
    for engine in (saving, other):
        engine(torch.ones(1, 2)).sum().backward()
        engine.step()
    saving(torch.ones(1, 2)).sum().backward()
    saving.step()
    before = other.optimizer.state_dict()
    with pytest.raises(fzero.CheckpointError, match=r"lr=0\.1.*Nothing was loaded"):
        other.optimizer.load_state_dict(saving.optimizer.state_dict())
    after = other.optimizer.state_dict()
    assert other.global_steps == 1
    assert all(torch.equal(x, after["state"][name]) for name, x in before["state"].items())
