"""Sharding changes no number: ten steps on real ranks equal plain torch on the whole batch."""

import functools
import itertools
import traceback
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.laws.models import Case, Mixed, Normed, Odd, Trained, error, train_ours, train_plain
from tests.ranks import run_ranks

STEPS = 10
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
CLIP = 0.2  # below nearly every gradient norm here, so that it acts


def _frozen(name: str) -> bool:
    return name.startswith("frozen")


def _cases(world: int = 2) -> Iterator[tuple[str, Case]]:
    """Every stage, accumulation and clipping, on models with every kind of leaf; by name."""
    for stage, accum, clip in itertools.product(range(4), (1, 4), (None, CLIP)):
        if world == 1 and bool(clip) == (accum == 1):  # of one rank, half of them
            continue
        config = {"stage": stage, "accum_steps": accum, "clip_norm": clip}
        name = f"stage {stage}, accum {accum}, {'clip' if clip else 'no clip'}"
        momentum = 0.9 if clip else 0.0
        mixed = config | {"frozen": ("frozen.*",) if accum == 1 else _frozen}
        yield f"mixed, {name}", Case(Mixed, torch.float64, mixed, momentum)
        yield f"batchnorm, {name}", Case(Normed, torch.float64, config, momentum)
        if accum == 4:
            yield f"odd, {name}", Case(Odd, torch.float64, config, momentum)
        if bool(clip) == (accum == 1):
            yield f"float32, {name}", Case(Mixed, torch.float32, mixed, momentum)


def _hybrid_cases() -> Iterator[tuple[str, Case]]:
    """Some of them, on a mesh of 2 x 2."""
    for name, case in _cases():
        if name.startswith(("mixed", "batchnorm")) and bool(case.config["clip_norm"]) == (
            case.accum_steps == 1
        ):
            yield name, case


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=[pytest.mark.slow] if world == 3 else [])
        for world in (1, 2, 3)  # four: on a mesh of 2 by 2
        for name, _ in _cases(world)
    ],
)
def test_training_equals_plain_torch(world: int, name: str) -> None:
    _check(_errors(world), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in _hybrid_cases()])
def test_training_on_a_mesh_of_2_by_2_equals_plain_torch(name: str) -> None:
    _check(_errors(4, hybrid=True), name)


def test_the_cases_tell_clipping_apart() -> None:
    for name, case in _cases():
        if case.config["clip_norm"]:
            norms = train_plain(case, 2, STEPS).norms
            assert min(norms[:3]) > CLIP, name


def _check(errors: list[dict[str, float | str]], name: str) -> None:
    bound = BOUNDS[dict(_cases())[name].dtype]
    for rank, by_name in enumerate(errors):
        found = by_name[name]
        assert isinstance(found, float), f"rank {rank}: {found}"
        assert found <= bound, f"rank {rank} is {found:.1e} from plain torch"


@functools.cache  # one job per world for all its cases
def _errors(world: int, hybrid: bool = False) -> list[dict[str, float | str]]:
    return run_ranks(world, _train_all, hybrid, timeout=240)


def _train_all(hybrid: bool) -> dict[str, float | str]:
    """On a rank: by case, how far training is from plain torch, or what it raised."""
    world, rank = dist.get_world_size(), dist.get_rank()
    extra = {}
    if hybrid:
        extra["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, float | str] = {}
    for name, case in _hybrid_cases() if hybrid else _cases(world):
        try:
            ours = train_ours(case, world, rank, STEPS, **extra)
            found[name] = error(ours, train_plain(case, world, STEPS))
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.mark.parametrize("accum", [1, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("stage", range(4))
def test_one_rank_is_bitwise_plain_torch(stage: int, momentum: float, accum: int) -> None:
    config = {"stage": stage, "accum_steps": accum, "frozen": "frozen.*"}
    case = Case(Mixed, torch.float32, config, momentum)
    _assert_bitwise(train_ours(case, 1, 0, STEPS), _train_plain_by_micro_batch(case))


def _train_plain_by_micro_batch(case: Case) -> Trained:
    """Plain torch with accumulation as one writes it: `(loss / k).backward()`, k times."""
    module = case.module()
    module.get_submodule("frozen").requires_grad_(False)
    sgd = torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], case.lr, case.momentum, foreach=False
    )
    for step in range(STEPS):
        sgd.zero_grad()
        for x, y in case.batches(1, step)[0]:
            (torch.nn.functional.cross_entropy(module(x), y) / case.accum_steps).backward()
        sgd.step()
    return Trained({k: p.detach() for k, p in module.named_parameters()}, {}, [], [])


def _assert_bitwise(a: Trained, b: Trained) -> None:
    assert a.params.keys() == b.params.keys()
    for name in a.params:
        assert torch.equal(a.params[name], b.params[name]), name


@pytest.mark.parametrize("accum", [1, 4])
def test_gathering_again_in_backward_is_bitwise_keeping(accum: int) -> None:
    for keeping, again in run_ranks(2, _both_ways, accum):
        _assert_bitwise(keeping, again)
        assert keeping.losses == again.losses
        assert keeping.norms == again.norms


def _both_ways(accum: int) -> list[Trained]:
    config = {"stage": 3, "accum_steps": accum, "clip_norm": CLIP, "frozen": "frozen.*"}
    return [
        train_ours(
            Case(Mixed, torch.float32, config | {"reshard_after_forward": again}),
            dist.get_world_size(),
            dist.get_rank(),
            STEPS,
        )
        for again in (False, True)
    ]
