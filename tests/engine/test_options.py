"""FairScale's options, and a mesh of two axes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.engine.parts import factors
from tests.engine.parity import SGD, STAGES, agrees, build, compare, here, wanted
from tests.engine.programs import PROGRAMS
from tests.ranks import run_ranks

MESHED = ["one_backward", "no_sync_in_between", "four_micro_batches", "checkpoint_mixed"]


def on_a_mesh(names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in names:
        case = PROGRAMS[name]
        configs = [{**fields, "mesh": mesh} for fields in case.configs(STAGES)]
        agrees(case.make, case.program, configs, steps=1)


@pytest.mark.slow
def test_a_mesh_of_replicas_of_shards() -> None:
    run_ranks(4, on_a_mesh, MESHED)


@pytest.mark.parametrize("name", ["four_micro_batches", "checkpoint_nested_both", "tiles_of_both"])
def test_parameters_that_stay_gathered_after_forward(name: str) -> None:
    run_ranks(2, kept_gathered, name)


def kept_gathered(name: str) -> None:
    case = PROGRAMS[name]
    configs = [{**f, "reshard_after_forward": False} for f in case.configs([3])]
    agrees(case.make, case.program, configs)


def options(stage: int, accum: int) -> None:
    case = PROGRAMS["four_micro_batches"]
    rank, world = here()
    mean = wanted(case.make, case.program, world, accum)
    total = {name: None if x is None else x * world for name, x in mean.items()}
    for given, want in (("mean", mean), ("sum", total)):
        for predivide in (None, 1.0, 2.0, 3.7):
            module = build(case.make)
            engine = fzero.Engine(
                module,
                SGD(),
                fzero.Config(stage=stage, accum_steps=accum),
                gradient_reduction=given,  # pyright: ignore
                gradient_predivide=predivide,
            )
            case.program(engine, rank)
            compare(engine, want, f"{given} {predivide} stage {stage}")


@pytest.mark.parametrize("stage", STAGES)
def test_mean_or_sum_and_where_the_division_is(stage: int) -> None:
    run_ranks(2, options, stage, 4)
    run_ranks(2, options, stage, 1)


@pytest.mark.parametrize(
    ("world", "predivide"),
    # doubling while it divides the world and world / f > f
    [(1, 1), (2, 2), (3, 2), (4, 2), (6, 4), (8, 4), (64, 8), (1024, 32)],
)
def test_division_before_and_after_a_16_bit_sum(world: int, predivide: int) -> None:
    precision = fzero.Precision(torch.bfloat16, reduce=torch.bfloat16)
    cfg = fzero.Config(precision=precision, accum_steps=2)
    before, after = factors(world, cfg, "mean", None)
    assert before == 1 / predivide
    assert before * after == pytest.approx(1 / world / 2, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("average", {}), ("mean", {"gradient_predivide": 0.0}), ("mean", {"gradient_predivide": -1})],
)
def test_options_that_there_are_not(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(fzero.ConfigError, match=r"Engine\(gradient_"):
        fzero.Engine(nn.Linear(2, 2), gradient_reduction=kind, **options)


def reduced_in_float32() -> list[Tensor]:
    """On ranks whose bfloat16 gradients would be lost in a bfloat16 sum."""
    rank, _ = here()
    found = []
    for stage in STAGES:
        for reduce in (torch.float32, torch.bfloat16):
            module = nn.Linear(1, 1, bias=False)
            precision = fzero.Precision(torch.bfloat16, reduce=reduce)
            engine = fzero.Engine(
                module,
                SGD(),
                fzero.Config(stage=stage, precision=precision),
                gradient_reduction="sum",
            )
            engine(torch.tensor([[256.0 if rank == 0 else 1.0]])).sum().backward()
            grad = engine.full_grad("weight")
            assert grad is not None
            found.append(grad.float().reshape(()))
    return found


def test_reduction_in_float32() -> None:
    for rank in run_ranks(2, reduced_in_float32):
        high, low = torch.stack(rank).view(4, 2).unbind(1)
        assert high.tolist() == [257.0] * 4
        assert low.tolist() == [256.0] * 4
