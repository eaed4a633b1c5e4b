"""Ranks never update with other numbers than each other: it is told before anything is updated."""

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero import Config, optim
from fzero.distributed.mesh import resolve_mesh
from fzero.errors import RankMismatchError
from fzero.numerics.loss_scale import LossScale
from fzero.step.alike import NotAlike, differ, digest, tell, with_square
from tests.ranks import fake_ranks, run_ranks

INJECT = optim.inject_hyperparams
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: INJECT(optim.sgd, momentum=True)(lr=0.5, momentum=0.5),
    "groups": lambda: optim.multi_transform(
        {"a": INJECT(optim.sgd)(lr=0.5), "b": optim.sgd(0.25)},
        lambda params: {name: "a" if x.dim() > 1 else "b" for name, x in params.items()},
    ),
    "fixed": lambda: optim.sgd(0.5),
    "counts": lambda: optim.adamw(optim.linear(0.0, 0.5, 8)),
}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.floats(width=64))
def test_each_rank_sees_whether_all_are_alike(kinds: list[int], x: float) -> None:
    values = [torch.tensor(x), torch.tensor(2 * x + 1), torch.tensor(3)]
    digests = [digest([values[kind], torch.ones(())], torch.device("cpu")) for kind in kinds]
    pairs = [with_square(x) for x in digests]
    sums = torch.stack(pairs).sum(0)
    same = len({x.item() for x in digests}) == 1
    for own in pairs:
        assert bool(differ(sums, own, len(kinds), refuse=False)) != same
        if same:
            assert not differ(sums, own, len(kinds), refuse=True)
        else:
            with pytest.raises(NotAlike):
                differ(sums, own, len(kinds), refuse=True)


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=20, unique_by=repr))
def test_digests_tell_numbers_apart(numbers: list[float]) -> None:
    cpu = torch.device("cpu")
    found = {x: digest([torch.tensor(x, dtype=torch.float64)], cpu).item() for x in numbers}
    assert all(0 <= d < 2**18 and d == int(d) for d in found.values())
    apart = [a != b for a, b in itertools.combinations(found.values(), 2)]
    assert sum(apart) >= len(apart) - 1  # one pair of a million is not


@pytest.mark.parametrize("counts", range(1, 65))
def test_counts_that_all_differ_alike_are_told_apart(counts: int) -> None:
    steps = torch.arange(64.0)
    found = {digest([step] * counts, step.device).item() for step in steps}
    assert len(found) == len(steps)


def test_the_order_of_numbers_counts() -> None:
    a, b = torch.tensor(0.1), torch.tensor(0.9)
    assert digest([a, b], a.device) != digest([b, a], a.device)


def _loss(params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"].t() + params["b"]).square().mean()


def _full() -> dict[str, torch.Tensor]:
    weight = torch.arange(12.0, dtype=torch.float64).view(4, 3) / 7
    return {"w": weight, "b": torch.ones(4, dtype=torch.float64)}


def _stepped(name: str, cfg: Config, write: Any, steps: int = 3) -> tuple[str, Any]:
    """What is told if one rank writes another number, and what training ends at."""
    rank, said = dist.get_rank(), ""
    step_fn = fzero.make_train_step(_loss, OPTIMIZERS[name](), cfg)
    params, state = step_fn.init(_full())
    x = torch.full((2, 3), 1.0 + rank, dtype=torch.float64)
    for i in range(steps):
        if i == 1 and write is not None:
            at = write(state)
            before = at.clone()
            if rank == dist.get_world_size() - 1:
                at.mul_(0.5)
            try:
                step_fn(params, state, x)
            except RankMismatchError as error:
                said = str(error)
            at.copy_(before)
        params, state = step_fn(params, state, x)
    return said, fzero.unshard(params)


RATE = lambda state: state.inner.hyperparams["lr"]  # noqa: E731
WRITES: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "lr": ("sgd", {}, RATE, "opt_state.inner.hyperparams['lr']"),
    "momentum": (
        *("sgd", {}, lambda state: state.inner.hyperparams["momentum"]),
        "opt_state.inner.hyperparams['momentum']",
    ),
    "a group": (
        *("groups", {}, lambda state: state.inner.inner["a"].hyperparams["lr"]),
        "opt_state.inner.inner['a'].hyperparams['lr']",
    ),
    "scale": (
        *("fixed", {"loss_scale": LossScale(init=4.0, external=True)}),
        *(lambda state: state.loss_scale.scale, "opt_state.loss_scale.scale"),
    ),
    "norm": ("sgd", {"clip_norm": 1.0, "norm_type": 1.0}, RATE, "opt_state.inner.hyperparams"),
}


def _scenario(world: int) -> list[str]:
    """On a rank: what went wrong."""
    bad = []
    meshes: list[Any] = [None]
    if world == 4:  # ranks that differ are copies of one shard
        meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))]
    executors = ("traced", "eager") if world == 2 else ("traced",)
    stages = range(4) if world == 2 else (1, 3)
    for kind, mesh, executor, stage in itertools.product(WRITES, meshes, executors, stages):
        name, fields, write, place = WRITES[kind]
        cfg = Config(stage=stage, executor=executor, mesh=mesh, **fields)
        _, expected = _stepped(name, cfg, None)
        said, found = _stepped(name, cfg, write)
        if place not in said or "Nothing was updated" not in said:
            bad.append(f"{kind} {executor} {stage}: {said!r}")
        if any(not torch.equal(found[key], expected[key]) for key in found):
            bad.append(f"{kind} {executor} {stage}: trained otherwise")
    return bad


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.quick("2")
def test_numbers_of_the_state_are_those_of_all_ranks(world: int) -> None:
    assert run_ranks(world, _scenario, world, timeout=240) == [[]] * world


def _behind(name: str, cfg: Config) -> tuple[str, Any]:
    """What is told if one rank goes on from an earlier step, and what training ends at."""
    rank, said = dist.get_rank(), ""
    step_fn = fzero.make_train_step(_loss, OPTIMIZERS[name](), cfg.replace(donate=False))
    before = now = step_fn.init(_full())
    x = torch.full((2, 3), 1.0 + rank, dtype=torch.float64)
    for i in range(4):
        if i == 2:
            try:
                step_fn(*(before if rank == dist.get_world_size() - 1 else now), x)
            except RankMismatchError as error:
                said = str(error)
        before, now = now, step_fn(*now, x)
    return said, fzero.unshard(now[0])


def _stale() -> list[str]:
    """On a rank: what went wrong."""
    bad = []
    for i, name in enumerate(("sgd", "fixed", "counts")):
        for executor, stage in itertools.product(("traced", "eager"), range(4)):
            if executor == "eager" and stage % 2 == i % 2:
                continue
            said, found = _behind(name, Config(stage=stage, executor=executor))
            expected = _stepped(name, Config(stage=stage, executor=executor), None, steps=4)[1]
            done = "has updated its part" if name != "sgd" else "Nothing was updated"
            if "opt_state.step: rank 0: 2; rank 1: 1" not in said or done not in said:
                bad.append(f"{name} {executor} {stage}: {said!r}")
            if any(not torch.equal(found[key], expected[key]) for key in found):
                bad.append(f"{name} {executor} {stage}: trained otherwise")
    return bad


def test_a_rank_that_goes_on_from_an_earlier_step_is_told() -> None:
    assert run_ranks(2, _stale, timeout=240) == [[]] * 2


def _stale_engine(stage: int) -> tuple[str, int]:
    torch.manual_seed(0)
    engine = fzero.Engine(nn.Linear(3, 4), OPTIMIZERS["counts"](), Config(stage=stage))
    x, earlier = torch.ones(2, 3), copy.deepcopy(engine.state)
    for _ in range(2):
        engine(x).square().mean().backward()
        engine.step()
    if dist.get_rank() == 1:
        engine.state = earlier
    engine(x).square().mean().backward()
    with pytest.raises(RankMismatchError) as error:
        engine.step()
    return str(error.value), engine.global_steps


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_that_goes_on_from_an_earlier_state_is_told(stage: int) -> None:
    found = run_ranks(2, _stale_engine, stage)
    assert [steps for _, steps in found] == [2, 0]
    assert all("opt_state.step: rank 0: 2; rank 1: 0" in said for said, _ in found)


class Trust(NamedTuple):
    """A state of somebody's own: a number for each leaf, which is a rank's own, and one for all."""

    norms: Any
    count: torch.Tensor


def _own_numbers(count: int) -> str:
    """What is told of an optimizer whose state has other norms on each rank, and other counts."""
    rank = dist.get_rank()

    def init(params: Any) -> Trust:
        norms = fzero.tree_map(lambda _: torch.tensor(float(rank)), params)
        return Trust(norms, torch.tensor(count * rank, dtype=torch.int32))

    def update(grads: Any, state: Trust, params: Any = None) -> tuple[Any, Trust]:
        return fzero.tree_map(lambda g: -g, grads), state

    step_fn = fzero.make_train_step(_loss, optim.Optimizer(init, update), Config(stage=3))
    try:
        step_fn(*step_fn.init(_full() | {"s": torch.ones(())}), torch.ones(2, 3).double())
    except RankMismatchError as error:
        return str(error)
    return ""


def test_numbers_that_are_a_leafs_may_be_a_ranks_own() -> None:
    assert run_ranks(2, _own_numbers, 0) == [""] * 2
    assert all(
        "opt_state.inner.count: rank 0: 0; rank 1: 1" in x for x in run_ranks(2, _own_numbers, 1)
    )


def _engines() -> list[str]:
    rank, bad = dist.get_rank(), []

    def trained(stage: int, wrong: bool) -> tuple[str, Any]:
        torch.manual_seed(0)
        engine = fzero.Engine(nn.Linear(3, 4).double(), OPTIMIZERS["sgd"](), Config(stage=stage))
        x, said = torch.full((2, 3), 1.0 + rank, dtype=torch.float64), ""
        for i in range(3):
            if i == 1 and wrong:
                engine.lr = 0.5 if rank else 0.125
                engine(x).square().mean().backward()
                try:
                    engine.step()
                except RankMismatchError as error:
                    said = str(error)
                engine.lr = 0.5
                engine.zero_grad()
            engine(x).square().mean().backward()
            engine.step()
        return said, engine.full_params()

    for stage in range(4):
        (_, expected), (said, found) = trained(stage, False), trained(stage, True)
        if "rank 0: 0.125; rank 1: 0.5" not in said:
            bad.append(f"{stage}: {said!r}")
        if any(not torch.equal(found[key], expected[key]) for key in found):
            bad.append(f"{stage}: trained otherwise")
    return bad


def test_an_engines_rate_is_that_of_all_ranks() -> None:
    assert run_ranks(2, _engines, timeout=120) == [[]] * 2


@pytest.mark.parametrize(
    ("name", "ranks", "sent"), [("sgd", 4, 32), ("fixed", 4, 32), ("sgd", 1, 0)]
)
def test_what_it_sends(name: str, ranks: int, sent: int) -> None:
    with fake_ranks(ranks):
        step_fn = fzero.make_train_step(_loss, OPTIMIZERS[name](), Config(stage=3))
        state = step_fn.init(_full())
        rows = step_fn.lower(*state, torch.ones(2, 3, dtype=torch.float64)).collectives()
    assert sum(row.bytes for row in rows if "grad_norm" in str(row.leaves)) == sent


def _of_other_bits() -> str:
    bits = torch.tensor(0x7FF8000000000000 + dist.get_rank()).view(torch.float64)
    with pytest.raises(RankMismatchError) as error:
        tell(
            [("opt_state.inner.hyperparams['lr']", bits)],
            resolve_mesh(None, "cpu"),
            None,
            updated=False,
        )
    return str(error.value)


def test_not_a_number_is_told_by_its_bits() -> None:
    for said in run_ranks(2, _of_other_bits):
        assert "nan (0x7ff8000000000001)" in said
        assert "Nothing was updated" in said
