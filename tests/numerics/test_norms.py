"""Sums of squares: as if every number were squared and added in float64, or 1e-6 off."""

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.allocations import measure
from fzero.numerics.norms import sum_of_squares

# How far off a sum may be that is asked to be exact, and one that is not. Of 5,000 equal numbers
# that lie otherwise than in rows a plain sum in float64 may lose 5e-13.
OFF = {True: 1e-12, False: 1e-6}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def plainly(leaves: list[Tensor]) -> float:
    wide = [x.to(torch.complex128 if x.is_complex() else torch.float64) for x in leaves]
    return sum(float(x.abs().square().sum()) for x in wide)


def layouts(x: Tensor) -> list[Tensor]:
    """The same numbers in other places in memory, between others."""
    apart = torch.stack([x, 1 - x], dim=-1)
    turned = x.t().contiguous().t() if x.dim() == 2 else x
    return [x, turned, apart[..., 0], x.flip(0).flip(0), x.conj().resolve_conj().conj()]


@st.composite
def leaf(draw: st.DrawFn) -> Tensor:
    # around a row, and around as many as are worth a call of their own
    size = draw(st.sampled_from([0, 1, 5, 127, 128, 129, 1000, 1023, 1024, 1025, 40000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(size, dtype=torch.float64, generator=generator)
    shape = draw(st.sampled_from([(size,), (1, size), (size, 1), (-1, 5)]))
    x = x.view(shape if -1 not in shape or (size % 5 == 0 and size) else (size,))
    dtype = draw(st.sampled_from(DTYPES))
    if dtype != torch.float16:  # which has no room for them
        x = x * 10.0 ** draw(st.sampled_from([-40, -25, -18, -9, -3, 0, 3, 14, 16, 18, 30]))
    kept = layouts(x.to(dtype))
    return draw(st.sampled_from(kept))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5000,), (1, 5000), (5000, 1), (50, 100), (3, 2000)])
def test_it_does_not_matter_how_a_leaf_lies_in_memory(
    shape: tuple[int, ...], dtype: torch.dtype, exact: bool
) -> None:
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    for y in [*layouts(x), x[:, :1] if x.dim() == 2 else x[::3], x.flatten()[:1].expand(5000)]:
        found = float(sum_of_squares([y], exact=exact))
        assert math.isclose(found, plainly([y]), rel_tol=OFF[exact])


@settings(max_examples=200, deadline=None)
@given(st.lists(leaf(), min_size=1, max_size=5), st.booleans())
def test_the_sum_is_that_of_float64(leaves: list[Tensor], exact: bool) -> None:
    expected = plainly(leaves)
    found = sum_of_squares(leaves, exact=exact)
    assert (found.dtype, found.dim()) == (torch.float64, 0)
    assert math.isclose(float(found), expected, rel_tol=OFF[exact])


@given(st.data())
def test_leaves_that_lie_side_by_side_have_the_same_sum_to_the_last_bit(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 5, 128, 1024, 2048, 3000, 4096]), max_size=9))
    gap = data.draw(st.sampled_from([0, 1, 128]))
    buffers = [torch.rand(sum(sizes) + gap * len(sizes) + 1) for _ in range(2)]
    leaves: list[Tensor] = []
    for buffer in buffers:
        at = data.draw(st.sampled_from([0, 1]))
        for size in sizes:
            leaves.append(buffer[at : at + size])
            at = min(at + size + gap, len(buffer) - 1)
    leaves = data.draw(st.permutations([x for x in leaves if len(x)] or [torch.ones(3)]))
    exact = data.draw(st.booleans())
    apart = [x.clone() for x in leaves]
    assert torch.equal(sum_of_squares(leaves, exact=exact), sum_of_squares(apart, exact=exact))


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each call that sums rows is given."""
    found: list[int] = []
    norm = torch.linalg.vector_norm

    def counted(x: Tensor, **options: Any) -> Tensor:
        assert x.shape[1] == 128
        found.append(x.numel())
        return norm(x, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", counted)
    return found


def test_leaves_of_one_buffer_take_one_call(by_rows: list[int]) -> None:
    buffer = torch.rand(20 * 2048)
    sum_of_squares([*buffer.split(2048)][::-1], exact=False)
    assert by_rows == [20 * 2048]


@pytest.mark.parametrize("exact", [True, False])
def test_what_lies_next_to_a_leaf_in_another_storage_is_none_of_its_run(exact: bool) -> None:
    memory = numpy.random.default_rng(0).standard_normal(4096, dtype=numpy.float32)
    first, whole = torch.from_numpy(memory[:2048]), torch.from_numpy(memory)
    assert first.data_ptr() + first.nbytes == whole[2048:].data_ptr()
    # storages that begin elsewhere; and of one address, whose sizes differ
    for leaves in ([first, torch.from_numpy(memory[2048:])], [first, whole[2048:]]):
        for order in (leaves, leaves[::-1]):
            found = float(sum_of_squares(order, exact=exact))
            assert math.isclose(found, plainly(leaves), rel_tol=OFF[exact])


@pytest.mark.parametrize("exact", [True, False])
def test_small_leaves_share_a_call(exact: bool, by_rows: list[int]) -> None:
    leaves = [torch.rand(64, 64) for _ in range(512)]
    sum_of_squares(leaves, exact=exact)
    assert sum(by_rows) == 512 * 4096
    assert len(by_rows) <= 512 // 8
    by_rows.clear()
    sum_of_squares([torch.rand(1000) for _ in range(512)], exact=exact)  # no whole rows
    assert by_rows == []


def test_an_exact_sum_copies_a_few_rows_at_a_time(by_rows: list[int]) -> None:
    """A float64 copy of a large leaf would be as much as its gradient and both moments."""
    sum_of_squares([torch.rand(10**6)], exact=True)
    assert max(by_rows) <= 2**16
    assert sum(by_rows) > 10**6 - 128


@pytest.mark.parametrize(("threads", "most"), [(1, 2**16), (2, 2**15)])
def test_no_thread_is_woken_for_a_few_rows(
    threads: int, most: int, by_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernels share out what has more than 32768 numbers."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.rand(2**16)
    found = float(sum_of_squares([x], exact=False))
    assert max(by_rows) == most
    assert math.isclose(found, plainly([x]), rel_tol=OFF[False])
    by_rows.clear()
    sum_of_squares([torch.rand(2**19)], exact=False)
    assert by_rows == [2**19]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("sizes", [[2000] * 100, [4096] * 64, [300] * 1000, [10**6, 4000, 129]])
def test_copies_are_a_tenth_of_the_leaves(sizes: list[int], exact: bool) -> None:
    def of_leaves() -> Any:
        leaves = [torch.rand(size) for size in sizes]
        return lambda: sum_of_squares(leaves, exact=exact)

    found, _ = measure(of_leaves)
    assert 0 < found.peak - found.between <= 4 * sum(sizes) / 10 + 2**12


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e-5])
def test_equal_numbers_do_not_drift(value: float, exact: bool) -> None:
    """Of a million equal ones torch's own norm in float32 is off by 3e-4 to 7e-4."""
    x = torch.full((10**6,), value)
    found = float(sum_of_squares([x], exact=exact))
    assert math.isclose(found, plainly([x]), rel_tol=1e-12 if exact else 5e-7)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 5000])
def test_what_is_not_finite_stays_so(value: float, place: int, exact: bool) -> None:
    x = torch.randn(5001)
    x[place] = value
    found = float(sum_of_squares([x, torch.ones(3)], exact=exact))
    assert math.isnan(found) if math.isnan(value) else found == math.inf


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("large", [1e19, 3e38])
def test_one_large_number_among_many_is_not_infinite(large: float, exact: bool) -> None:
    x = torch.randn(5000)
    x[77] = large
    found = float(sum_of_squares([x], exact=exact))
    assert math.isclose(found, float(x[77].double()) ** 2, rel_tol=1e-6)


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_not_dense_is_read_where_it_lies(exact: bool) -> None:
    wide = torch.randn(4096)
    found = float(sum_of_squares([wide[::2]], exact=exact))
    assert math.isclose(found, plainly([wide[::2]]), rel_tol=OFF[exact])


def test_no_leaves_have_no_length() -> None:
    assert float(sum_of_squares([], exact=True)) == 0
    assert sum_of_squares([], exact=True, device="meta").device.type == "meta"
