"""Derivatives of any order pass through stage 3: it is made of functions, not of hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import zero
from fzero.distributed.mesh import Axis, resolve_mesh
from fzero.layout import plan_layout
from tests.ranks import run_ranks

F64 = torch.float64
SHAPES = {"bias": (16,), "gain": (), "frozen": (15, 3), "up": (7, 15), "out": (16, 17)}
Leaves = tuple[Tensor, ...]


def _leaves(seed: int) -> Leaves:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=generator, dtype=F64) / 2 for s in SHAPES.values())


def _loss(leaves: Leaves, x: Tensor) -> tuple[Tensor, tuple[()]]:
    bias, gain, frozen, up, out = leaves
    h = torch.tanh(x @ up) * gain
    h = torch.nn.functional.pad(h, (0, 2)) @ out.t() + bias
    return ((h.sin() ** 2).mean() + (x @ up @ frozen).square().mean()), ()


def _second_order(
    grads_of: Callable[[Leaves], Leaves], at: Leaves, along: Leaves, staged: bool
) -> dict[str, Leaves]:
    """A Hessian-vector product, forward and reverse, and the gradient of a gradient penalty.

    On shards, dot products are this rank's part: a whole leaf counts once, since its cotangent is
    one value.
    """

    def dot(a: Leaves, b: Leaves) -> Tensor:
        return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()

    def penalty(p: Leaves) -> Tensor:
        grads = grads_of(p)
        return 0.3 * dot(grads, grads)

    def forward(p: Leaves, t: Leaves) -> Leaves:
        return torch.func.jvp(grads_of, (p,), (t,))[1]

    def reverse(p: Leaves, t: Leaves) -> Leaves:
        return torch.func.grad(lambda p: dot(grads_of(p), t))(p)

    def penalised(p: Leaves, _: Leaves) -> Leaves:
        return torch.func.grad(penalty)(p)

    def third(p: Leaves, t: Leaves) -> Leaves:
        return torch.func.jvp(lambda p: forward(p, t), (p,), (t,))[1]

    found: dict[str, Any] = {}
    for name, fn in (
        ("jvp of grad", forward),
        ("grad of grad", reverse),
        ("gradient penalty", penalised),
        ("third derivative", third),
    ):
        found[name] = fn(at, along)
        if staged and name != "third derivative":
            found[f"{name}, staged out"] = make_fx(fn)(at, along)(at, along)
    return found


def _errors(hybrid: bool) -> dict[str, float]:
    """On a rank: how far each result is from the unsharded one, by name."""
    mesh = resolve_mesh(init_device_mesh("cpu", (2, 2)) if hybrid else None, "cpu")
    axes = zero.Axes(
        Axis(mesh.shard_group, mesh.shard_size, mesh.shard_rank),
        Axis(mesh.replicate_group, mesh.replicate_size, mesh.replicate_rank),
    )
    world, rank = dist.get_world_size(), dist.get_rank()
    full, tangent = _leaves(1), _leaves(2)
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(world, 4, 7, generator=generator, dtype=F64)
    layout = plan_layout(list(SHAPES), full, axes.shard.size, frozen=lambda name: name == "frozen")

    def shards(leaves: Leaves) -> tuple[Leaves, Leaves]:
        split = [leaf.split(x, axes.shard.rank) for x, leaf in zip(leaves, layout, strict=True)]
        trained, frozen = layout.divide(split)
        return trained, frozen

    def mean_loss(trained: Leaves) -> Tensor:
        leaves = layout.merge(trained, layout.divide(full)[1])
        return torch.stack([_loss(leaves, x)[0] for x in data]).mean()

    sharded = zero.zero3(zero.scaled(_loss, 1 / world), layout, axes)
    trained, frozen = shards(full)
    ours = _second_order(
        lambda p: sharded(p, frozen, data[rank])[0], trained, shards(tangent)[0], not hybrid
    )
    whole, along = (layout.divide(leaves)[0] for leaves in (full, tangent))
    plain = _second_order(torch.func.grad(mean_loss), whole, along, not hybrid)
    kept = layout.trained
    errors = {}
    for name, leaves in plain.items():
        expected = [leaf.split(x, axes.shard.rank) for x, leaf in zip(leaves, kept, strict=True)]
        pairs = zip(ours[name], expected, strict=True)
        # NaN gets past max() but not past torch's maximum
        gaps = [(a - b).abs().max() if a.numel() else a.sum() for a, b in pairs]
        errors[name] = torch.stack(gaps).max().item()
        assert max(x.abs().max().item() for x in leaves) > 1e-3, name
    return errors


@pytest.mark.parametrize(
    ("world", "hybrid"),
    [
        (1, False),
        (2, False),
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_second_order_through_stage_3_equals_the_unsharded(world: int, hybrid: bool) -> None:
    for errors in run_ranks(world, _errors, hybrid, timeout=120):
        assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-8)
        assert len(errors) == (4 if hybrid else 7)
