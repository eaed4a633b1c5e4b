"""Leaves that lie end to end: which do, and what is taken for a run."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.layout.end_to_end import lay, one_of, runs, slabs

SIZES = st.lists(st.sampled_from([0, 1, 5, 16, 32, 48, 4096, 2**17, 2**18]), max_size=8)


@given(SIZES, st.data())
def test_a_laid_leaf_is_what_it_was(sizes: list[int], data: Any) -> None:
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.float64, torch.int64]))] * len(sizes)
    before = [torch.arange(n).to(dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    names = [f"layers.{i}.w" for i in data.draw(st.permutations(range(len(sizes))))]
    leaves = list(before)
    lay(leaves, names)
    for x, y in zip(before, leaves, strict=True):
        assert torch.equal(x, y)
        assert (x.dtype, x.stride()) == (y.dtype, y.stride())
        assert not y._is_view()
        assert y.untyped_storage().nbytes() == y.nbytes
    moved = [i for slab in slabs(before, names) for i in slab]
    for i, (x, y) in enumerate(zip(before, leaves, strict=True)):
        assert (x is y) == (i not in moved)


@given(SIZES, st.randoms())
def test_what_is_laid_is_found_as_one_run_a_piece(sizes: list[int], random: Any) -> None:
    leaves = [torch.zeros(n) for n in sizes]
    names = [str(i) for i in range(len(sizes))]
    lay(leaves, names)
    given = list(range(len(leaves)))
    random.shuffle(given)
    found = runs([leaves[i] for i in given])
    assert sorted(i for run in found for i in run) == list(range(len(given)))
    wholes = [[given[i] for i in run] for run in found]
    for slab in slabs(leaves, names):
        assert any(slab == whole[: len(slab)] for whole in wholes)


def test_layers_that_follow_each_other_are_together() -> None:
    names = ["layers.10.w", "layers.2.w", "head"]
    leaves = [torch.zeros(2**17) for _ in names]
    assert slabs(leaves, names) == [[2, 1, 0]]
    assert slabs([torch.zeros(2**17) for _ in range(9)], "abcdefghi")[-1] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2**18),
        torch.zeros(17),
        torch.zeros(16, dtype=torch.bfloat16),
        torch.zeros(4, 8).t(),
        torch.zeros(16, device="meta"),
    ],
    ids=["large", "uneven", "low", "strided", "device"],
)
def test_other_leaves_stay_where_they_are(x: Tensor) -> None:
    assert slabs([x, x.clone(), torch.zeros(16)], "abc") == []


def test_a_write_to_a_leaf_is_none_to_its_neighbour() -> None:
    leaves = [torch.ones(16), torch.ones(32)]
    lay(leaves, "ab")
    first, second = leaves[0].requires_grad_(), leaves[1]
    loss = (first**2).sum()
    before = first._version
    second.zero_()
    assert first._version == before
    loss.backward()
    assert torch.equal(first.grad, torch.full((16,), 2.0))  # pyright: ignore


def test_a_run_is_one_in_every_column() -> None:
    a, b, c = torch.arange(48.0).split(16)
    there = torch.arange(48.0)
    x, y, z = there[:16], there[16:32], torch.arange(16.0)
    assert runs([a, b, c], [x, y, z]) == [[0, 1], [2]]
    assert runs([a, b, c], [y, x, z]) == [[0], [1], [2]]
    assert torch.equal(one_of([a, b]), torch.arange(32.0))
    assert runs([]) == []


def test_after_a_leaf_that_is_no_multiple_a_run_ends() -> None:
    a, b, c = torch.zeros(40).split([16, 8, 16])
    assert runs([a, b, c]) == [[0, 1], [2]]
    assert runs([a, b, c], multiple=8) == [[0, 1, 2]]


def test_neighbours_of_several_owners_are_a_run_that_keeps_them() -> None:
    leaves = list(torch.arange(64.0).split(32))
    lay(leaves, "ab")
    assert leaves[0].untyped_storage().data_ptr() != leaves[1].untyped_storage().data_ptr()
    assert runs(leaves) == [[0, 1]]
    whole = one_of(leaves)
    del leaves
    others = [torch.full((64,), 7.0) for _ in range(100)]
    assert torch.equal(whole, torch.arange(64.0))
    assert others


def test_empty_leaves_are_no_run() -> None:
    assert runs([torch.zeros(0), torch.zeros(0), torch.zeros(16)])[0] != [0, 1]
