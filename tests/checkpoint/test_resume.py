"""N steps straight are k steps, a new process, and N - k steps: bit for bit."""

import copy
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.checkpoint import StopOnSignal, latest, load, sample_order, save
from tests.checkpoint.cases import differing, full
from tests.ranks import run_fresh, run_ranks

STEPS, FIRST = 6, 3


def _train(
    cfg: dict[str, Any], run: Path, first: int, last: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Steps `first` to `last` of a job; from the latest checkpoint unless `first` is 0."""
    torch.manual_seed(first)  # what is resumed must come from the checkpoint
    data = torch.randn(50, 6, generator=torch.Generator().manual_seed(7))
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    apply, params = fzero.functionalize(module)

    def model_fn(params: Any, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        out = apply(params, x.to(params["0.weight"].dtype)).float()
        running = 0.9 * state["mean"] + 0.1 * out.detach().mean(0)
        return (out - running).square().mean(), {"mean": running}

    schedule = fzero.optim.warmup_cosine(1e-2, 2, STEPS)
    opt = fzero.optim.chain(
        fzero.optim.scale_by_adam(), fzero.optim.scale_by_learning_rate(schedule)
    )
    config = fzero.Config(clip_norm=0.5, seed=3, **cfg)
    step_fn = fzero.make_train_step(model_fn, opt, config)
    params, opt_state = step_fn.init(params, {"mean": torch.zeros(3)})
    if first:
        params, opt_state = load(run, params, opt_state)
    world, rank = 1, 0
    if torch.distributed.is_initialized():
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    losses = []
    for step in range(first, last):
        assert int(opt_state.step) == step
        rows = sample_order(step, samples=50, batch=24, seed=5, rank=rank, world=world)
        params, opt_state = step_fn(params, opt_state, data[rows])
        losses.append(opt_state.metrics["loss"].item())
    if first < last < STEPS:
        save(run, params, opt_state, asynchronous=True)
        fzero.checkpoint.wait()
    return full(params, opt_state), losses


@pytest.mark.parametrize(
    ("world", "cfg"),
    [
        (1, {"stage": 0}),
        (2, {"stage": 3, "accum_steps": 2}),
        (2, {"stage": 2, "precision": "bf16"}),
        (2, {"stage": 1, "precision": "fp16", "loss_scale": "dynamic"}),
    ],
)
@pytest.mark.quick("2-cfg3", "1-cfg0")
def test_resuming_is_exact(world: int, cfg: dict[str, Any], tmp_path: Path) -> None:
    straight = run_fresh(world, _train, cfg, tmp_path / "unused", 0, STEPS)
    before = run_fresh(world, _train, cfg, tmp_path, 0, FIRST)
    assert latest(tmp_path) == tmp_path / f"step-{FIRST:08d}"
    after = run_fresh(world, _train, cfg, tmp_path, FIRST, STEPS)
    for (values, losses), (_, first), (resumed, rest) in zip(straight, before, after, strict=True):
        assert first + rest == losses
        assert len(set(losses)) == STEPS
        assert differing(values, resumed) == []


class _Backwards(nn.Module):
    """Its layers are registered in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(31, 5), nn.Linear(16, 31)
        self.scale = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale


def _continued(cfg: dict[str, Any], replicas: int) -> list[bool]:
    """Whether an engine that another one's state was given ends in the bits of that one."""
    world = torch.distributed.get_world_size()
    mesh = torch.distributed.init_device_mesh(
        "cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )
    config = fzero.Config(mesh=mesh if replicas > 1 else None, **cfg)
    noise = torch.Generator().manual_seed(torch.distributed.get_rank())
    data = torch.randn(STEPS, 4, 16, generator=noise)

    def engine() -> fzero.Engine:
        torch.manual_seed(0)
        return fzero.Engine(_Backwards(), fzero.optim.sgd(0.1, momentum=0.9), config)

    def train(engine: fzero.Engine, first: int, last: int) -> dict[str, Tensor]:
        for x in data[first:last]:
            engine(x).square().mean().backward()
            engine.step()
        return dict(engine.full_params())

    whole = engine()
    train(whole, 0, FIRST)
    state = copy.deepcopy(whole.state)
    wanted = train(whole, FIRST, STEPS)
    whole.release()
    after = engine()
    after.state = state
    found = train(after, FIRST, STEPS)
    after.release()
    return [torch.equal(found[name], x) for name, x in wanted.items()]


@pytest.mark.parametrize(
    ("cfg", "replicas"), [({"stage": 0}, 1), ({"stage": 1}, 1), ({"stage": 2}, 3)]
)
def test_a_new_engine_goes_on_exactly(cfg: dict[str, Any], replicas: int) -> None:
    # of three ranks, as a sum of two is the same in either order
    assert run_ranks(3, _continued, cfg, replicas) == [[True] * 5] * 3


def test_whether_to_stop_is_asked_by_a_call() -> None:
    stop = StopOnSignal(signal.SIGUSR1)
    try:
        with pytest.raises(fzero.FzeroError, match=r"by a call: `if stop\(\):`"):
            assert stop
        assert stop() is False
        signal.raise_signal(signal.SIGUSR1)
        assert stop() is True
    finally:
        stop.restore()


@pytest.mark.parametrize("number", ["SIGTERM", None, 999, signal.SIGKILL])
def test_what_is_no_signal_to_take_is_refused(number: Any) -> None:
    with pytest.raises(fzero.ConfigError, match=r"is no signal .*signal\.SIGTERM"):
        StopOnSignal(number)


def test_a_signal_is_taken_in_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(StopOnSignal)
        with pytest.raises(fzero.FzeroError, match="lets the main thread alone"):
            made.result()
