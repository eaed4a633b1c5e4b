"""Names in others' files, and whose each of our keys is."""

import pytest

from fzero.checkpoint.sources import moment_of


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("opt_state.inner.nu.x.mu.w", ("x.mu.w", "exp_avg_sq")),
        ("opt_state.inner.mu.mu.w", ("mu.w", "exp_avg")),
        ("opt_state.inner.mu.w", ("w", "exp_avg")),
        ("opt_state.inner.nu.mu.w", ("mu.w", "exp_avg_sq")),
        ("opt_state.inner.mu.elsewhere", None),
        ("params.mu.w", None),
    ],
)
def test_a_moment_is_of_the_longest_name(key: str, found: tuple[str, str] | None) -> None:
    assert moment_of(key, {"w", "mu.w", "x.mu.w"}) == found
