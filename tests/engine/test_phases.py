"""The engine's state machine alone, over generated histories."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fzero.engine import phases
from fzero.engine.phases import BackwardState, Rules, transition
from tests.engine.walk import Walk


@settings(
    max_examples=10_000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.binary(min_size=30, max_size=120))
def test_every_gradient_is_reduced_once_in_every_history(choices: bytes) -> None:
    Walk(choices).run()
