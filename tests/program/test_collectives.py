"""Collectives that a Program lists: the same that a step launches, and the closed form's bytes."""

import copy
import itertools
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fzero
from benchmarks.communication import (
    Launched,
    closed_form,
    is_statistics,
    launched_by,
    read_in_backward,
    sent_bytes,
)
from benchmarks.models import GPT, Size, batch_of, fzero_step
from fzero.distributed.ragged import is_supported
from fzero.layout import plan_layout
from fzero.layout.flats import plan_flats
from fzero.program.listing import Collective
from tests.program.programs import mlp_leaves, mlp_loss
from tests.ranks import fake_ranks, run_ranks

EVEN, UNEVEN = [16, 32, 8, 24], [7, 15, 16, 17]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def one_step(widths: list[int], cfg: fzero.Config) -> tuple[fzero.Program, list[Launched]]:
    """The Program of an MLP's step, and what the step launched."""
    names, leaves = mlp_leaves(widths)

    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return mlp_loss(tuple(params[name] for name in names), x)[0]

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    state: list[Any] = [*step_fn.init(dict(zip(names, leaves, strict=True)))]
    batch = torch.randn(2 * cfg.accum_steps, widths[0])
    program = step_fn.lower(*state, batch)
    state = [*step_fn(*state, batch)]  # in the first call ranks agree on what they will launch
    return program, launched_by(lambda: step_fn(*state, batch))


def sizes(widths: list[int]) -> tuple[int, int]:
    """Bytes of an MLP's parameters, and of those that its backward reads.

    All weights but the first, since the batch gets no gradient; no bias.
    """
    layers = list(itertools.pairwise(widths))
    params = sum(4 * (a * b + b) for a, b in layers)
    return params, sum(4 * a * b for a, b in layers[1:])


def gaps(widths: list[int], world: int, cfg: fzero.Config) -> int:
    """Bytes between the leaves of an MLP that lies end to end."""
    if not is_supported():  # it lies in rows then
        return 0
    layout = plan_flats(plan_layout(*mlp_leaves(widths), world=world), int(cfg.bucket_mb * 2**20))
    flats = {leaf.home.flat: leaf.home.part * world for leaf in layout if leaf.home}
    return 4 * (sum(flats.values()) - sum(leaf.numel for leaf in layout if leaf.home))


def counts(rows: list[Collective]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows:
        found[row.kind] += row.times
    return found


@STAGES
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("world", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("widths", [EVEN, UNEVEN])
def test_listed_is_launched_is_the_closed_form(
    widths: list[int], world: int, micro: int, stage: int
) -> None:
    with fake_ranks(world):
        cfg = fzero.Config(stage=stage, accum_steps=micro, bucket_mb=0.001)
        program, launched = one_step(widths, cfg)
    rows = program.collectives()
    assert counts(rows) == Counter(one.kind for one in launched)
    listed_bytes = sum(row.bytes * row.times for row in rows)
    launched_bytes = sum(one.bytes for one in launched)
    if widths is EVEN:
        assert launched_bytes == listed_bytes
    else:
        assert listed_bytes <= launched_bytes  # which pads
    params, read = sizes(widths)
    if stage in (1, 2):  # leaves lie end to end, with gaps that travel, too
        params += gaps(widths, world, cfg)
    expected = closed_form(stage, params, read, world, micro)
    assert sent_bytes(program) == pytest.approx(expected, abs=len(rows) * micro)  # rounded down
    assert [(row.kind, row.bytes) for row in rows if is_statistics(row)] == [("all_reduce", 32)]


@STAGES
def test_gpt_gathers_again_what_backward_reads(stage: int) -> None:
    size = Size(vocabulary=64, width=32, layers=2, heads=4, tokens=16, rows=2)
    leaves = [(name, p.nbytes) for name, p in GPT(size).named_parameters()]
    opt, cfg = fzero.optim.sgd(0.1), fzero.Config(stage=stage)
    with fake_ranks(2):
        program = fzero_step(size, batch_of(size, 2), opt, cfg).lower()
    total = sum(nbytes for _, nbytes in leaves)
    expected = closed_form(stage, total, read_in_backward(leaves), 2, 1)
    assert sent_bytes(program) == expected


def test_without_reshard_after_forward_nothing_is_gathered_twice() -> None:
    with fake_ranks(2):
        program, _ = one_step(EVEN, fzero.Config(stage=3, reshard_after_forward=False))
    assert sent_bytes(program) == closed_form(3, sizes(EVEN)[0], 0, 2, 1)


def _real_step(widths: list[int], cfg: fzero.Config) -> tuple[list[Collective], list[Launched]]:
    program, launched = one_step(widths, cfg)
    return program.collectives(), launched


@STAGES
@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_real_ranks_launch_what_is_listed(stage: int, micro: int) -> None:
    cfg = fzero.Config(stage=stage, accum_steps=micro)
    for rows, launched in run_ranks(2, _real_step, EVEN, cfg):
        kinds = counts(rows)
        # over gloo an all-to-all carries gathers and reduce-scatters
        carried = {"all_to_all": kinds["all_gather"] + kinds["reduce_scatter"]}
        assert +Counter(carried | {"all_reduce": kinds["all_reduce"]}) == Counter(
            one.kind for one in launched
        )
        assert sum(row.bytes * row.times for row in rows) == sum(one.bytes for one in launched)


@STAGES
def test_hybrid_reduces_over_both_axes(stage: int) -> None:
    params, read = sizes(EVEN)
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        program, launched = one_step(EVEN, fzero.Config(stage=stage, mesh=mesh))
    rows = program.collectives()
    assert counts(rows) == Counter(one.kind for one in launched)
    # the shard axis as ever; then gradients, shards of them from stage 1 on, over the replicas
    over_shards = closed_form(stage, params, read, 2, 1)
    over_replicas = closed_form(0, params if stage == 0 else params // 2, 0, 2, 1)
    assert sent_bytes(program) == over_shards + over_replicas


def test_world_1_launches_nothing() -> None:
    program, launched = one_step(EVEN, fzero.Config(stage=3))
    assert program.collectives() == []
    assert launched == []


def test_frozen_leaves_are_gathered_and_not_reduced() -> None:
    with fake_ranks(2):
        program, _ = one_step(EVEN, fzero.Config(stage=3, frozen=("0.*",)))
    reduced = [
        name for row in program.collectives() if row.kind == "reduce_scatter" for name in row.leaves
    ]
    gathered = {
        name for row in program.collectives() if row.kind == "all_gather" for name in row.leaves
    }
    assert sorted(reduced) == ["1.bias", "1.weight", "2.bias", "2.weight"]
    assert {"0.weight", "0.bias"} <= gathered


def test_dtensors_are_what_travels_between_steps() -> None:
    """The measured steps start from shards: nothing was left gathered."""
    names, leaves = mlp_leaves(EVEN)
    with fake_ranks(2):
        step_fn = fzero.make_train_step(lambda p, x: x.sum(), fzero.optim.sgd(0.1))
        params, _ = step_fn.init(dict(zip(names, leaves, strict=True)))
    assert all(isinstance(x, DTensor) for x in params.values())


def test_a_row_unpacks_as_four_and_keeps_the_rest_as_attributes() -> None:
    row = Collective("all_reduce", ("a", "b"), 8, "update", 4, times=2, group="0")
    kind, leaves, nbytes, phase = row
    assert (kind, leaves, nbytes, phase) == ("all_reduce", ("a", "b"), 8, "update") == row
    for same in (copy.copy(row), pickle.loads(pickle.dumps(row))):
        assert (same, same.wire_bytes, same.times, same.group) == (row, 4, 2, "0")
    assert "phase='update', wire_bytes=4, times=2" in repr(row)


@pytest.mark.skipif(not is_supported(), reason="an older torch has no DTensors for flats")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_flats_are_launched_as_they_are_listed(stage: int) -> None:
    cfg = fzero.Config(stage=stage, layout="flat")
    for rows, launched in run_ranks(2, _real_step, UNEVEN, cfg):
        assert sum(row.bytes * row.times for row in rows) == sum(one.bytes for one in launched)
