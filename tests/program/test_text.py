"""Numbers in listings: four figures and a unit, whatever their size."""

import pytest

from fzero.program.text import count, seconds, size, table


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (-1536, "-1.5 KiB"),
        (1234567, "1.177 MiB"),
        (2**20 - 1, "1024 KiB"),
        (2**50, "1048576 GiB"),  # the largest unit there is: never 1.049e+06
    ],
)
def test_sizes_have_four_figures_and_a_unit_of_1024(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_counts_have_units_of_1000_and_times_the_largest_that_fits() -> None:
    assert [count(n) for n in (999, 12345, 5e18)] == ["999", "12.35 k", "5000 P"]
    assert [seconds(t) for t in (12.346, 0.012346, 12.346e-6)] == [
        "12.35 s",
        "12.35 ms",
        "12.35 us",
    ]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table([["a", "1", ""], ["bcd", "234", "x"]], "lrl") == ["  a      1", "  bcd  234  x"]
    assert table([], "lr") == []
