"""Muon: torch's numbers, who does which matrix, and what of it a Program shows."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero import Config, optim
from fzero.errors import ConfigError
from fzero.optim.muon import rounds
from fzero.program.memory import storages, timeline
from tests.ranks import fake_ranks, run_ranks

SHAPES = {"a": (16, 24), "b": (24, 8), "c": (8, 8), "d": (7, 9), "e": (20, 4)}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_muon_has_torchs_numbers(dtype: torch.dtype, adjust: str, nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()
    }
    plain = {name: torch.nn.Parameter(x.clone()) for name, x in params.items()}
    theirs = torch.optim.Muon(list(plain.values()), 0.02, nesterov=nesterov, adjust_lr_fn=adjust)
    # torch iterates in bfloat16 always
    opt = optim.muon(0.02, nesterov=nesterov, adjust=adjust, dtype=torch.bfloat16)
    state = opt.init(params)
    for _ in range(20):
        grads = {
            n: torch.randn(x.shape, generator=generator, dtype=dtype) for n, x in plain.items()
        }
        for name, p in plain.items():
            p.grad = grads[name].clone()
        theirs.step()
        assert opt.apply_ is not None
        state = opt.apply_(grads, state, params)
    for name, p in plain.items():
        torch.testing.assert_close(params[name], p.detach(), rtol=1e-5, atol=1e-6)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), max_size=20),
    world=st.integers(1, 8),
)
def test_every_matrix_is_done_once_and_ranks_have_about_equal_work(
    shapes: list[tuple[int, int]], world: int
) -> None:
    table = rounds(shapes, world)
    assert sorted(i for row in table for i in row if i is not None) == list(range(len(shapes)))
    assert all(len(row) == world for row in table)

    def work(i: int | None) -> int:
        return 0 if i is None else 2 * min(shapes[i]) ** 2 * max(shapes[i]) + min(shapes[i]) ** 3

    totals = [sum(work(row[rank]) for row in table) for rank in range(world)]
    largest = max((work(i) for i in range(len(shapes))), default=0)
    assert max(totals) - min(totals) <= largest


def _lowered(world: int, rank: int, stage: int, dtype: torch.dtype | None = None) -> fzero.Program:
    with fake_ranks(world, rank):
        opt = optim.muon(0.02, steps=3, dtype=dtype)
        step_fn = fzero.make_train_step(
            lambda p, x: sum(((w * x).sum().sin() for w in p.values()), x.new_zeros(())),
            opt,
            Config(stage=stage),
        )
        state = step_fn.init({name: torch.ones(shape) for name, shape in SHAPES.items()})
        return step_fn.lower(*state, torch.ones(()))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_ranks_share_the_work_and_the_program_says_what_travels(stage: int) -> None:
    world = 2
    programs = [_lowered(world, rank, stage) for rank in range(world)]
    products = 0
    for program in programs:
        assert not program.verify(programs)
        update = list(program.parts())[-1]
        products += sum("addmm" in str(node.target) for node in update.graph.nodes)
    assert products == len(SHAPES) * 3 * 2  # two of each step of each matrix, on one rank each
    kind = "all_to_all" if stage else "all_gather"
    rows = [
        [row for row in p.collectives() if row.kind == kind and row.phase == "update"]
        for p in programs
    ]
    assert [(r.kind, r.leaves, r.bytes) for r in rows[0]] == [
        (r.kind, r.leaves, r.bytes) for r in rows[1]
    ]
    if stage:
        total = sum(4 * m * n for m, n in SHAPES.values())
        # there and back; a rank keeps its own half, or nearly, where rows are odd
        assert sum(row.bytes for row in rows[0]) == 2 * total
        sent = sum(row.wire_bytes for ranks in rows for row in ranks)
        assert sent == pytest.approx(total, rel=0.02)
        assert all(len(row.leaves) <= world for row in rows[0])


def test_in_bfloat16_half_the_bytes_travel() -> None:
    full, half = (
        sum(row.bytes for row in _lowered(2, 0, 3, dtype).collectives() if row.kind == "all_to_all")
        for dtype in (None, torch.bfloat16)
    )
    assert half == full / 2


@pytest.mark.parametrize("count", [2, 6])  # one round, and three
def test_no_more_than_one_whole_matrix_is_there_at_a_time(count: int) -> None:
    world, n = 2, 64
    with fake_ranks(world):
        step_fn = fzero.make_train_step(
            lambda p, x: sum(((w * x).sum().sin() for w in p.values()), x.new_zeros(())),
            optim.muon(0.02, steps=2),
            Config(stage=3),
        )
        state = step_fn.init({str(i): torch.zeros(n, n) for i in range(count)})
        program = step_fn.lower(*state, torch.ones(()))
    update = list(program.parts())[-1]

    def whole(nodes: Iterable[fx.Node]) -> dict[int, int]:
        """What is no shard, and not flat, as what travels is."""
        return {
            key: 1
            for node in nodes
            if getattr(node.meta.get("val"), "shape", None) == (n, n)
            for key in storages([node])
        }

    # the matrix, and of Newton-Schulz its product with itself and the polynomial of that
    assert max(timeline(update.graph, whole)) == 3
    # per matrix: parameter, gradient and momentum; the others' successors, and the update
    assert update.peak_bytes() <= (6 * count / world + 4) * n * n * 4


def test_a_vector_labelled_muon_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"b has shape \(3,\).*rest"):
        optim.muon(0.1, labels=lambda params: "muon").init({"b": torch.ones(3)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.muon(0.1, momentum=1.0), "momentum=1.0"),
        (lambda: optim.muon(0.1, steps=0), "steps=0"),
        (lambda: optim.muon(0.1, adjust="best"), "adjust='best'; one of 'match_rms_adamw'"),
        (lambda: optim.muon(0.1, dtype=torch.int8), "dtype=torch.int8"),
        (lambda: optim.muon(-0.1), "muon: lr=-0.1"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def _trained(mesh_shape: tuple[int, ...], world: int) -> dict[str, torch.Tensor]:
    """Three steps at stage 3 on the batches of `world` ranks, of which this one has its part."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5, bias=False)).double()
    mesh = None
    if len(mesh_shape) == 2:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    engine = fzero.Engine(module, fzero.optim.muon(0.1), fzero.Config(3, mesh=mesh))
    ranks = range(world) if world > dist.get_world_size() else [dist.get_rank()]
    for step in range(3):
        batches = [torch.randn(4, 6, generator=_seeded(step, r)).double() for r in ranks]
        engine(torch.cat(batches)).square().mean().backward()
        engine.step()
    return engine.full_params()


def _seeded(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + rank)


@pytest.mark.slow
def test_on_a_mesh_of_replicas_of_shards_it_is_world_1s() -> None:
    (alone,) = run_ranks(1, _trained, (1,), 4)
    for found in run_ranks(4, _trained, (2, 2), 4, timeout=200):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
