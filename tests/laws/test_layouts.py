"""How leaves lie in memory changes no number: any strides, any split, against `torch.optim`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero import Config, optim
from fzero.distributed.ragged import is_supported
from tests.ranks import run_ranks

F64 = torch.float64
LR, ROWS, STEPS = 0.1, 4, 3

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": torch.clone,
    "reversed": lambda x: (
        x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    ),
    "rotated": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "gaps": lambda x: torch.stack([x, -x], -1)[..., 0],
    "part": lambda x: F.pad(x, (1, 2))[..., 1:-2],
}


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv:2302.06675, algorithm 2, which torch.optim lacks."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                mu = self.state[p].setdefault("mu", torch.zeros_like(p))
                sign = mu.lerp(p.grad, 0.1).sign()
                mu.lerp_(p.grad, 0.01)
                p.sub_(group["lr"] * (sign + group["decay"] * p))


OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (lambda: optim.sgd(LR, 0.9), lambda ps: torch.optim.SGD(ps, LR, momentum=0.9)),
    "adam": (lambda: optim.adam(LR), lambda ps: torch.optim.Adam(ps, LR)),
    "adamw": (
        lambda: optim.adamw(LR, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, LR, weight_decay=0.1),
    ),
    "lion": (lambda: optim.lion(LR, weight_decay=0.1), lambda ps: Lion(ps, LR, 0.1)),
}


class Case(NamedTuple):
    """One training run: leaves as (shape, layout), and how they are trained."""

    leaves: tuple[tuple[tuple[int, ...], str], ...]
    stage: int
    accum: int
    optimizer: str
    executor: str
    options: tuple[tuple[str, Any], ...] = ()
    layout: str = "rows"


shapes = st.one_of(
    st.tuples(st.integers(1, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
)
cases = st.builds(
    Case,
    st.lists(st.tuples(shapes, st.sampled_from(list(LAYOUTS))), min_size=1, max_size=4).map(tuple),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(["traced", "eager", "engine"]),
    st.sampled_from([(), (("clip_norm", 0.1),), (("offload", "cpu"),), (("donate", False),)]),
    st.sampled_from(["rows", "flat"] if is_supported() else ["rows"]),
)


def start(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(s, generator=generator, dtype=F64) for s, _ in case.leaves]
    return [LAYOUTS[name](x) for x, (_, name) in zip(full, case.leaves, strict=True)]


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 243, generator=generator, dtype=F64)


def loss(leaves: list[Tensor], x: Tensor) -> Tensor:
    """The mean over rows of something whose gradients have strides of their own."""
    total = x.new_zeros(len(x))
    for w in leaves:
        if w.dim() == 4:
            image = x[:, : 9 * w.shape[1]].reshape(-1, w.shape[1], 3, 3)
            y = F.conv2d(image.contiguous(memory_format=torch.channels_last), w).flatten(1)
        elif w.dim() == 2:
            y = torch.cat([x[:, : w.shape[0]] @ w, F.linear(x[:, : w.shape[1]], w)], 1)
        else:
            y = (x[:, : w.numel()].view(-1, *w.shape) * w.movedim(0, -1).movedim(-1, 0)).flatten(1)
        total = total + torch.tanh(y).square().mean(1)
    return total.mean()


def by_torch(case: Case, world: int) -> list[Tensor]:
    leaves = [x.contiguous().requires_grad_() for x in start(case)]
    optimizer = OPTIMIZERS[case.optimizer][1](leaves)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(leaves, torch.cat([batch(step, rank) for rank in range(world)])).backward()
        if limit := dict(case.options).get("clip_norm"):
            nn.utils.clip_grad_norm_(leaves, limit)
        optimizer.step()
    return [x.detach() for x in leaves]


def by_step(case: Case, cfg: Config, rank: int) -> list[Tensor]:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss(list(params.values()), x)

    step_fn = fzero.make_train_step(model_fn, OPTIMIZERS[case.optimizer][0](), cfg)
    state = step_fn.init({str(i): x for i, x in enumerate(start(case))})
    for step in range(STEPS):
        state = step_fn(*state, batch(step, rank))
        if case.executor == "traced" and step == 0:
            step_fn.lower(*state, batch(step, rank)).verify()
    return list(fzero.unshard(state[0]).values())


class Net(nn.Module):
    def __init__(self, leaves: list[Tensor]) -> None:
        super().__init__()
        self.leaves = nn.ParameterList(leaves)

    def forward(self, x: Tensor) -> Tensor:
        return loss(list(self.leaves), x)


def by_engine(case: Case, cfg: Config, rank: int) -> list[Tensor]:
    engine = fzero.Engine(Net(start(case)), OPTIMIZERS[case.optimizer][0](), cfg)
    for step in range(STEPS):
        for part in batch(step, rank).chunk(case.accum):
            engine(part).backward()
        engine.step()
    return list(engine.full_params().values())


def gaps(case: Case) -> tuple[float, ...]:
    """On a rank: how far each leaf is from where `torch.optim` brings it."""
    joined = dist.is_initialized()
    world, rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
    executor = "eager" if case.executor == "eager" else "traced"
    options: dict[str, Any] = dict(case.options, layout=case.layout)
    cfg = Config(stage=case.stage, accum_steps=case.accum, executor=executor, **options)
    train = by_engine if case.executor == "engine" else by_step
    pairs = zip(train(case, cfg, rank), by_torch(case, world), strict=True)
    return tuple(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def holds(case: Case, world: int) -> None:
    found = run_ranks(world, gaps, case) if world > 1 else [gaps(case)]
    assert max(map(max, found)) < 1e-10, found


quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@settings(max_examples=4, suppress_health_check=quiet)
@given(case=cases)
def test_strides_and_splits_change_no_number(world: int, case: Case) -> None:
    holds(case, world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@settings(max_examples=25, suppress_health_check=quiet)
@given(case=cases)
def test_strides_and_splits_change_no_number_at_length(world: int, case: Case) -> None:
    holds(case, world)


WORST = ((3, 6), "dense"), ((2, 8), "rotated"), ((5, 4), "reversed"), ((4, 3, 3, 3), "rotated")


@pytest.mark.parametrize("executor", ["traced", "engine"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("world", [2, 4])
def test_leaves_split_along_another_dim_than_the_first(
    world: int, optimizer: str, executor: str
) -> None:
    holds(Case(WORST, stage=1, accum=2, optimizer=optimizer, executor=executor), world)
