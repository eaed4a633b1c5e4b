"""Each collective is the transpose of its backward, at every order, staged out or not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.distributed.collectives import (
    all_gather,
    all_reduce,
    as_wire,
    boundary,
    reduce_scatter,
    replicate,
)
from fzero.distributed.mesh import Axis, resolve_mesh
from fzero.layout import LeafLayout
from fzero.numerics.rng import mix
from tests.ranks import run_ranks

F64 = torch.float64
SPLIT = [((7, 15), 0), ((16, 17), 1), ((2, 3), 0), ((1, 4), 0), ((3, 1, 5), 2), ((5,), 0)]
WHOLE = [(), (3,), (0, 4)]
Map = Callable[[Tensor], Tensor]


def _axis() -> Axis:
    mesh = resolve_mesh(None, "cpu")
    return Axis(mesh.shard_group, mesh.shard_size, mesh.shard_rank)


def _draw(shape: tuple[int, ...], *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(mix(*seed))
    return torch.randn(shape, generator=generator, dtype=F64)


def _maps(axis: Axis) -> Iterator[tuple[str, Map, list[tuple[int, ...]], Callable[..., Any]]]:
    """(name, the map on this rank, each rank's input shape, the same map on all ranks' inputs)."""
    world = axis.size
    for shape, dim in SPLIT:
        leaf = LeafLayout("w", shape, F64, dim, world)
        shards = [leaf.shard_shape(r) for r in range(world)]
        yield (
            f"all_gather {shape} dim {dim}",
            lambda x, leaf=leaf: all_gather(x, leaf, axis),
            shards,
            lambda *xs, leaf=leaf: [leaf.join(xs)] * len(xs),
        )
        yield (
            f"reduce_scatter {shape} dim {dim}",
            lambda x, leaf=leaf: reduce_scatter(x, leaf, axis),
            [shape] * world,
            lambda *xs, leaf=leaf: [leaf.split(sum(xs), r) for r in range(len(xs))],  # pyright: ignore
        )
    for shape in (*WHOLE, (4, 3)):
        yield (
            f"all_reduce {shape}",
            lambda x: all_reduce(x, axis, "x"),
            [shape] * world,
            lambda *xs: [sum(xs)] * len(xs),
        )


def _derivatives(f: Map, x: Tensor, t: Tensor, y: Tensor, staged: bool) -> dict[str, Tensor]:
    """Derivatives of all orders of a map, and of a cubic on what it returns, on this rank."""

    def energy(x: Tensor) -> Tensor:
        return (y * f(x) ** 3).sum()

    grad = torch.func.grad(energy)
    hessian = {
        "forward over reverse": lambda x, t: torch.func.jvp(grad, (x,), (t,))[1],
        "reverse over reverse": lambda x, t: torch.func.vjp(grad, x)[1](t)[0],
    }
    found = {
        "value": f(x),
        "jvp": torch.func.jvp(f, (x,), (t,))[1],
        "vjp": torch.func.vjp(f, x)[1](y)[0],
        "autograd": torch.autograd.grad(energy(z := x.clone().requires_grad_()), z)[0],
        "grad": grad(x),
    }
    found |= {name: fn(x, t) for name, fn in hessian.items()}
    if staged:
        for name, fn in hessian.items():
            found[f"{name}, staged out"] = make_fx(fn)(x, t)(x, t)
    return found


def _dense(f: Callable[..., Any], xs: list[Tensor], ts: list[Tensor], ys: list[Tensor], rank: int):
    """The same on all ranks' inputs at once; this rank's part."""

    def energy(*xs: Tensor) -> Tensor:
        return sum((y * out**3).sum() for y, out in zip(ys, f(*xs), strict=True))  # pyright: ignore

    every = tuple(range(len(xs)))
    grad = torch.func.grad(energy, argnums=every)
    gradient = grad(*xs)[rank]
    second = torch.func.jvp(grad, tuple(xs), tuple(ts))[1][rank]
    vjp = torch.func.vjp(lambda *xs: tuple(f(*xs)), *xs)[1](tuple(ys))[rank]
    found = {"value": f(*xs)[rank], "jvp": f(*ts)[rank], "vjp": vjp}
    found |= {"autograd": gradient, "grad": gradient}
    for name in ("forward over reverse", "reverse over reverse"):
        found |= {name: second, f"{name}, staged out": second}
    return found


def _wrong() -> list[str]:
    """On a rank: what differs from the dense reference."""
    axis, wrong = _axis(), []
    seen: set[str] = set()
    for i, (name, f, shapes, dense) in enumerate(_maps(axis)):
        xs, ts = ([_draw(s, i, k, r) for r, s in enumerate(shapes)] for k in (1, 2))
        ys = [_draw(tuple(out.shape), i, 3, r) for r, out in enumerate(dense(*xs))]
        # staging out is slow: once per kind is enough, on the first and most uneven leaf
        staged = name.split()[0] not in seen
        seen.add(name.split()[0])
        ours = _derivatives(f, xs[axis.rank], ts[axis.rank], ys[axis.rank], staged)
        references = _dense(dense, xs, ts, ys, axis.rank)
        for what, found in ours.items():
            expected = references[what]
            if found.shape != expected.shape or not torch.allclose(found, expected, 1e-12, 1e-12):
                wrong.append(f"{name}: {what}")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_collectives_equal_the_dense_map_at_every_order(world: int) -> None:
    assert run_ranks(world, _wrong, timeout=120) == [[]] * world


def test_collectives_need_no_process_group_at_world_one() -> None:
    assert not dist.is_initialized()
    assert _wrong() == []


# ---- leaves that every rank holds whole: one value, whose cotangent is one value too
def _replicated() -> list[str]:
    axis, wrong = _axis(), []
    for i, shape in enumerate([*WHOLE, (4, 3)]):
        leaf = LeafLayout("w", shape, F64, None, axis.size)
        same, tangent = _draw(shape, i, 4), _draw(shape, i, 7)
        weights = [_draw(shape, i, 5, r) for r in range(axis.size)]

        def through(x: Tensor, how: Callable[[Tensor], Tensor], weights=weights) -> Tensor:
            return (weights[axis.rank] * how(x) ** 3).sum()

        expected = 3 * sum(weights) * same**2  # pyright: ignore
        for name, how in (
            ("replicate", lambda x: replicate(x, axis, "x")),
            ("all_gather", lambda x, leaf=leaf: all_gather(x, leaf, axis)),
        ):
            grad = torch.func.grad(through)
            if not torch.allclose(grad(same, how), expected):
                wrong.append(f"{name} {shape}: gradient")
            # the gradient is a whole value again, and so is what it is paired with
            second = torch.func.vjp(lambda x, how=how, grad=grad: grad(x, how), same)[1](tangent)[0]
            if not torch.allclose(second, 6 * sum(weights) * same * tangent):  # pyright: ignore
                wrong.append(f"{name} {shape}: second derivative")
            forward = torch.func.jvp(how, (same,), (tangent,))[1]
            if not torch.equal(forward, tangent):
                wrong.append(f"{name} {shape}: jvp")
        total, pull = torch.func.vjp(
            lambda x, leaf=leaf: reduce_scatter(x, leaf, axis), weights[axis.rank]
        )
        if not torch.allclose(total, sum(weights)):  # pyright: ignore
            wrong.append(f"reduce_scatter {shape}: sum")
        if not torch.equal(pull(tangent)[0], tangent):
            wrong.append(f"reduce_scatter {shape}: transpose")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_uses_of_a_whole_leaf_are_summed_over_ranks(world: int) -> None:
    assert run_ranks(world, _replicated) == [[]] * world


# ---- dtypes
def _gathered(dtype: torch.dtype, dim: int) -> bool:
    axis = _axis()
    values = torch.arange(35).reshape(7, 5)
    full = (values % 2 == 0) if dtype == torch.bool else values.to(dtype)
    leaf = LeafLayout("w", (7, 5), dtype, dim, axis.size)
    shard = leaf.split(full, axis.rank)
    found = all_gather(shard, leaf, axis)
    bits = found.view(torch.uint8), full.view(torch.uint8)  # equal() knows no float8
    return torch.equal(*bits) and found.dtype == dtype and found.is_contiguous()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_leaves_of_any_dtype_are_gathered(dtype: torch.dtype) -> None:
    for dim in (0, 1):
        assert run_ranks(3, _gathered, dtype, dim) == [True] * 3


def _mixed() -> tuple[torch.dtype, torch.dtype, float]:
    axis = _axis()
    leaf = LeafLayout(
        "w", (6, 3), torch.float32, 0, axis.size, compute=torch.bfloat16, reduce=torch.float32
    )
    shard = torch.ones(leaf.shard_shape(axis.rank))
    full, pull = torch.func.vjp(lambda x: all_gather(x, leaf, axis), shard)
    # 1 + 2**-8 is lost in bfloat16, so the sum tells in which dtype it was made
    (grad,) = pull(torch.full_like(full, 1.0 if axis.rank else 2.0**-8))
    return full.dtype, grad.dtype, grad.max().item()


def test_gathers_in_the_compute_dtype_and_reduces_in_its_own() -> None:
    assert run_ranks(2, _mixed) == [(torch.bfloat16, torch.float32, 1 + 2**-8)] * 2


def test_a_boundary_is_the_identity_at_every_order() -> None:
    x = torch.tensor(2.0, dtype=F64)

    def cube(x: Tensor) -> Tensor:
        return boundary(x) ** 3

    grad = torch.func.grad(cube)
    assert cube(x) == 8
    assert grad(x) == 12
    assert torch.func.grad(grad)(x) == 12
    assert torch.func.jvp(grad, (x,), (torch.ones_like(x),))[1] == 12


def test_what_travels_as_bytes_may_have_any_stride_at_a_dim_of_one_row() -> None:
    x = torch.arange(6).to(torch.complex64).view(3, 2)[:, :1].movedim(1, 0)[:, :1]
    assert x.is_contiguous()
    assert x.stride(-1) != 1
    assert torch.equal(as_wire(x).view(torch.complex64), x)
