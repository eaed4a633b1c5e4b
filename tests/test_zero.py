"""Every stage is the same gradient: one composition or another of the same few functions."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fzero import zero
from fzero.distributed.mesh import Axis, resolve_mesh
from fzero.layout import Layout, plan_layout
from tests.ranks import run_ranks

F64 = torch.float64
SHAPES = [(7, 15), (15, 2), (), (5,), (0, 3)]
NAMES = ["up", "frozen", "gain", "unused", "empty"]


def _leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=F64) for shape in SHAPES]


def _loss(leaves: zero.Leaves, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    up, frozen, gain, _, empty = leaves
    y = torch.tanh(x @ up) * gain
    return (y @ frozen).square().mean() + empty.sum(), (y.sum(),)


def _layout(world: int) -> Layout:
    return plan_layout(NAMES, _leaves(), world, frozen=lambda name: name == "frozen")


def _gaps(hybrid: bool) -> dict[str, float]:
    """On a rank: by stage and operator, the distance from the dense gradient."""
    mesh = resolve_mesh(init_device_mesh("cpu", (2, 2)) if hybrid else None, "cpu")
    axes = zero.Axes(
        Axis(mesh.shard_group, mesh.shard_size, mesh.shard_rank),
        Axis(mesh.replicate_group, mesh.replicate_size, mesh.replicate_rank),
    )
    world, rank = dist.get_world_size(), dist.get_rank()
    data = torch.randn(world, 3, 7, generator=torch.Generator().manual_seed(6), dtype=F64)
    layout, full = _layout(axes.shard.size), _leaves()
    trained, frozen = layout.divide(full)
    shards = [leaf.split(x, axes.shard.rank) for x, leaf in zip(full, layout, strict=True)]
    parts = layout.divide(shards)

    def mean(trained: zero.Leaves) -> Tensor:
        leaves = layout.merge(trained, frozen)
        return torch.stack([_loss(leaves, x)[0] for x in data]).mean()

    dense = torch.func.grad(mean)(trained)
    kept = layout.trained
    dense_parts = [leaf.split(g, axes.shard.rank) for g, leaf in zip(dense, kept, strict=True)]
    scaled = zero.scaled(_loss, 1 / world)
    gaps = {}
    for name, grad in (("grad", zero.grad), ("autograd", zero.autograd), ("vjp", zero.vjp)):

        def stage1(*args: Any, grad: Any = grad) -> Any:
            grads, value = zero.ddp_local(scaled, layout, axes, grad)(*args)
            return zero.scatter(grads, layout, axes), value

        for stage, fn, inputs, expected in (
            (0, zero.zero0(scaled, layout, axes, grad), (trained, frozen), dense),
            (1, stage1, (trained, frozen), dense_parts),
            (2, zero.zero2(scaled, layout, axes, grad), (trained, frozen), dense_parts),
            (3, zero.zero3(scaled, layout, axes, grad), parts, dense_parts),
        ):
            grads, (value, (loss, aux)) = fn(*inputs, data[rank])
            local, (total,) = _loss(tuple(full), data[rank])
            found = [value * world, loss, *aux, *grads]
            wanted = [local, local, total, *expected]
            assert [x.shape for x in found] == [x.shape for x in wanted]
            flat = [(a - b).abs().sum() for a, b in zip(found, wanted, strict=True)]
            gaps[f"stage {stage}, {name}"] = torch.stack(flat).max().item()
    return gaps


@pytest.mark.parametrize(("world", "hybrid"), [(1, False), (2, False), (3, False), (4, True)])
def test_every_stage_is_the_dense_gradient(world: int, hybrid: bool) -> None:
    for gaps in run_ranks(world, _gaps, hybrid):
        assert gaps == pytest.approx(dict.fromkeys(gaps, 0.0), abs=1e-12)
        assert len(gaps) == 12


def test_a_loss_that_depends_on_no_parameter_has_zero_gradients() -> None:
    def constant(leaves: zero.Leaves, x: Tensor) -> tuple[Tensor, tuple[()]]:
        return x.sum(), ()

    trained, frozen = (layout := _layout(1)).divide(_leaves())
    for grad in (zero.grad, zero.autograd, zero.vjp):
        grads, (loss, _) = zero.zero3(constant, layout, zero.Axes(), grad)(
            trained, frozen, torch.ones(3)
        )
        assert loss == 3
        assert [g.shape for g in grads] == [x.shape for x in trained]
        assert not any(g.any() for g in grads)


def test_scaling_keeps_the_loss_beside_it() -> None:
    leaves, x = tuple(_leaves()), torch.ones(2, 7, dtype=F64)
    loss, (aux,) = _loss(leaves, x)
    for factor in (1.0, 0.25, torch.tensor(8.0, dtype=F64)):
        value, (kept, (same,)) = zero.scaled(_loss, factor)(leaves, x)
        assert torch.equal(value, loss * factor)
        assert torch.equal(kept, loss)
        assert torch.equal(same, aux)
