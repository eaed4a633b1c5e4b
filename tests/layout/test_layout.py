"""What is true of every layout, whatever the leaf."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Shard

from fzero.errors import ShardError
from fzero.layout import LeafLayout, plan_layout

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]
worlds = st.integers(1, 9)
shapes = st.lists(st.integers(0, 11), max_size=4).map(tuple)
laws = settings(max_examples=60)


@st.composite
def leaves(draw: st.DrawFn) -> Tensor:
    """A tensor of any shape and dtype, often not contiguous."""
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    order = draw(st.permutations(range(len(shape))))
    x = torch.arange(torch.Size(shape).numel()).reshape([shape[i] for i in order])
    x = (x % 3 == 0) if dtype == torch.bool else (x % 251).to(dtype)
    x = x.permute([order.index(i) for i in range(len(shape))])
    return x if draw(st.booleans()) else x.repeat([2] * x.dim())[tuple(slice(n) for n in shape)]


def _plan(x: Tensor, world: int) -> LeafLayout:
    (leaf,) = plan_layout(["x"], [x], world)
    return leaf


@laws
@given(leaves(), worlds)
def test_joining_the_parts_of_a_split_is_the_identity(x: Tensor, world: int) -> None:
    leaf = _plan(x, world)
    joined = leaf.join([leaf.split(x, rank) for rank in range(world)])
    assert torch.equal(joined, x)
    assert joined.dtype == x.dtype


@laws
@given(leaves(), worlds, st.data())
def test_any_dim_may_be_chosen(x: Tensor, world: int, data: st.DataObject) -> None:
    dims = [dim for dim in range(x.dim()) if x.shape[dim]]
    if dims:
        dim = data.draw(st.sampled_from(dims))
        leaf = LeafLayout("x", tuple(x.shape), x.dtype, dim, world)
        assert torch.equal(leaf.join([leaf.split(x, rank) for rank in range(world)]), x)


@laws
@given(leaves(), worlds)
def test_parts_are_those_of_a_dtensor(x: Tensor, world: int) -> None:
    leaf = _plan(x, world)
    if leaf.dim is None:
        assert leaf.split(x, world - 1) is x
        return
    theirs, _ = Shard(leaf.dim)._split_tensor(x, world, with_padding=False)
    for rank, part in enumerate(theirs):
        ours = leaf.split(x, rank)
        assert ours.shape == leaf.shard_shape(rank)
        assert ours.numel() == part.numel()
        assert torch.equal(ours, part.reshape(ours.shape))


@laws
@given(leaves(), worlds)
def test_rows_are_dealt_out_once_and_in_order(x: Tensor, world: int) -> None:
    leaf = _plan(x, world)
    if leaf.dim is None:
        return
    bounds = [leaf.bounds(rank) for rank in range(world)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == x.shape[leaf.dim]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert all(0 <= stop - start <= leaf.padded_rows for start, stop in bounds)
    assert bounds[0][1] - bounds[0][0] == leaf.padded_rows
    rest = x.shape[: leaf.dim] + x.shape[leaf.dim + 1 :]
    assert leaf.padded_shape == (leaf.padded_rows, *rest)


@laws
@given(leaves(), worlds)
def test_splitting_commutes_with_elementwise_operations(x: Tensor, world: int) -> None:
    leaf = _plan(x, world)

    def f(x: Tensor) -> Tensor:
        return ~x if x.dtype == torch.bool else x * x + 3

    for rank in range(world):
        assert torch.equal(f(leaf.split(x, rank)), leaf.split(f(x), rank))


@laws
@given(leaves(), worlds)
def test_a_part_shares_memory_with_the_whole(x: Tensor, world: int) -> None:
    leaf = _plan(x, world)
    part = leaf.split(x, 0)
    assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@laws
@given(st.lists(leaves(), max_size=6), worlds)
def test_a_plan_is_data(xs: list[Tensor], world: int) -> None:
    names = [f"x{i}" for i in range(len(xs))]
    layout = plan_layout(names, xs, world)
    assert layout == plan_layout(names, [x.to("meta") for x in xs], world)
    assert hash(layout) == hash(plan_layout(names, xs, world))
    assert [leaf.name for leaf in layout] == names
    assert len(str(layout).splitlines()) == len(xs)
    for leaf, x in zip(layout, xs, strict=True):
        assert leaf.trainable == (x.is_floating_point() or x.is_complex())
        assert leaf.nbytes == x.numel() * x.element_size()
        assert (leaf.dim is None) == (x.dim() == 0 or x.numel() == 0)


@laws
@given(st.lists(leaves(), max_size=6), st.sets(st.integers(0, 5)))
def test_merge_undoes_divide(xs: list[Tensor], frozen: set[int]) -> None:
    layout = plan_layout(
        [str(i) for i in range(len(xs))], xs, 2, frozen=lambda name: int(name) in frozen
    )
    trained, rest = layout.divide(xs)
    assert all(x is y for x, y in zip(layout.merge(trained, rest), xs, strict=True))
    assert len(trained) == sum(leaf.trainable for leaf in layout)
    assert not any(layout.leaves[i].trainable for i in frozen if i < len(xs))


@laws
@given(shapes, worlds)
def test_the_dim_wastes_little_where_any_does(shape: tuple[int, ...], world: int) -> None:
    leaf = _plan(torch.zeros(shape), world)
    if leaf.dim is None:
        return
    waste = [-(-n // world) * world / n for n in shape]
    assert waste[leaf.dim] == min(waste) or waste[leaf.dim] < 17 / 16


def test_a_leaf_that_is_kept_whole_has_no_bounds() -> None:
    leaf = LeafLayout("scalar", (), torch.float32)
    with pytest.raises(ShardError, match="'scalar' is kept whole"):
        leaf.bounds(0)


def test_dtypes_of_computing_and_reducing_are_for_floating_leaves() -> None:
    xs = [torch.ones(2), torch.ones(2).bfloat16(), torch.ones(2).long()]
    layout = plan_layout(["a", "b", "c"], xs, 2, compute=torch.bfloat16, reduce=torch.float32)
    assert [leaf.compute for leaf in layout] == [torch.bfloat16, None, None]
    assert [leaf.reduce for leaf in layout] == [torch.float32, torch.float32, None]
    assert [leaf.nbytes for leaf in layout] == [4, 4, 16]
