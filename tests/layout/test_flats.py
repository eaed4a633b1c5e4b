"""What is true of every flat, whatever leaves are laid into it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.layout import LeafLayout, plan_layout
from fzero.layout.flats import Claims, plan_flats

worlds = st.integers(1, 9)
laws = settings(max_examples=60)
trees = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1)


def _flats(shapes: list[tuple[int, ...]], world: int, most: int, least: int) -> list[LeafLayout]:
    leaves = [torch.empty(shape) for shape in shapes]
    layout = plan_layout([f"w{i}" for i in range(len(leaves))], leaves, world)
    return list(plan_flats(layout, most, least))


@laws
@given(trees, worlds, st.integers(64, 4096), st.integers(16, 512))
def test_a_part_of_a_flat_is_whole_rows_of_its_leaves(
    shapes: list[tuple[int, ...]], world: int, most: int, least: int
) -> None:
    for leaf in _flats(shapes, world, most, least):
        full = torch.arange(leaf.numel).view(leaf.shape)
        parts = [leaf.split(full, rank) for rank in range(world)]
        assert torch.equal(leaf.join(parts), full)
        assert leaf.padded_rows == max(len(part) for part in parts) or leaf.dim != 0
        if leaf.home is None:
            continue
        for rank, part in enumerate(parts):
            if part.numel():  # and they lie in the rank's part of the flat
                first = leaf.home.offset + int(part.flatten()[0])
                assert rank * leaf.home.part <= first
                assert first + part.numel() <= (rank + 1) * leaf.home.part


@laws
@given(trees, worlds, st.integers(64, 4096), st.integers(16, 512))
def test_leaves_of_a_flat_lie_apart_and_small_ones_are_in_one(
    shapes: list[tuple[int, ...]], world: int, most: int, least: int
) -> None:
    flats: dict[int, list[LeafLayout]] = {}
    for leaf in _flats(shapes, world, most, least):
        if leaf.home is not None:
            assert leaf.nbytes < most
            flats.setdefault(leaf.home.flat, []).append(leaf)
    for leaves in flats.values():
        claims = Claims()
        assert all(claims.claim(leaf) for leaf in leaves)
        assert not any(claims.claim(leaf) for leaf in leaves)
        parts = {leaf.home.part for leaf in leaves if leaf.home}
        assert len(parts) == 1
        # no rank sends more than a hundredth over what it would have of the leaves one by one
        rows = [LeafLayout(x.name, x.shape, x.dtype, _plan_dim(x), world) for x in leaves]
        most_of = sum(torch.Size(leaf.padded_shape).numel() for leaf in rows)
        assert parts.pop() <= most_of * 1.01


def _plan_dim(leaf: LeafLayout) -> int | None:
    return plan_layout(["w"], [torch.empty(leaf.shape)], leaf.world).leaves[0].dim


@pytest.mark.parametrize(
    ("least", "most", "leaves"), [(0, 2**20, 7), (2**17, 2**20, 8), (0, 2**16, 4)]
)
def test_a_section_is_a_tenth_of_the_leaves_within_bounds(
    least: int, most: int, leaves: int
) -> None:
    found = _flats([(64, 64)] * 70, 2, most, least)
    sizes = Counter(leaf.home.flat for leaf in found if leaf.home is not None)
    assert [*sizes.values()][:-1] == [leaves] * (69 // leaves)


def test_what_would_need_large_gaps_stays_as_it_is() -> None:
    (leaf,) = _flats([(3, 1000)], 2, 2**20, 2**16)
    assert leaf.home is None


def _numbers(
    shapes: list[tuple[int, ...]],
    most: int,
    least: int = 2**20,
    names: list[str] | None = None,
    change: Callable[[int, LeafLayout], LeafLayout] = lambda i, leaf: leaf,
) -> list[int | None]:
    """Which flat each leaf is in, on two ranks."""
    leaves = [torch.empty(shape) for shape in shapes]
    layout = plan_layout(names or [f"w{i}" for i in range(len(leaves))], leaves, 2)
    layout = replace(layout, leaves=tuple(change(i, x) for i, x in enumerate(layout.leaves)))
    return [x.home and x.home.flat for x in plan_flats(layout, most, least)]


def test_a_leaf_of_the_most_bytes_stays_as_it_is() -> None:
    assert _numbers([(5, 3), (5, 3)], most=60) == [None, None]
    assert _numbers([(5, 3), (5, 3)], most=61) == [0, 1]


def test_a_leaf_alone_that_is_cut_evenly_needs_no_flat() -> None:
    assert _numbers([(4, 4)], most=2**20) == [None]
    assert _numbers([(5, 3)], most=2**20) == [0]


def test_what_is_reduced_in_another_dtype_is_in_another_flat() -> None:
    def change(i: int, leaf: LeafLayout) -> LeafLayout:
        return replace(leaf, reduce=torch.bfloat16) if i else leaf

    assert _numbers([(5, 3), (5, 3)], most=2**20, change=change) == [0, 1]


def test_a_section_takes_a_block_whose_half_it_has_room_for() -> None:
    names = [f"layers.{i}.w" for i in range(4)]
    assert _numbers([(5, 4)] * 4, most=120, least=120, names=names) == [0, 0, 1, 1]
