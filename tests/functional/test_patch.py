import types
from typing import Any

import pytest

from fzero.functional.patch import ABSENT, Patch


def _place() -> Any:
    place: Any = types.SimpleNamespace(a=1, b=2)
    return place


def test_the_last_to_leave_puts_back_what_was_there() -> None:
    place = _place()
    patch = Patch((place, "a", lambda a: a + 10), (place, "b", lambda _: ABSENT), (place, "c", int))
    with patch:
        with patch:
            assert vars(place) == {"a": 11}
        assert vars(place) == {"a": 11}
    assert vars(place) == {"a": 1, "b": 2}


def test_a_replacement_that_raises_leaves_nothing_replaced() -> None:
    place = _place()
    patch = Patch((place, "a", lambda a: a + 10), (place, "b", lambda b: 1 // (b - b)))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), patch:
            pass
        assert vars(place) == {"a": 1, "b": 2}
        assert not patch.users
