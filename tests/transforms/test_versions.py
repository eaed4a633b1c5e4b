"""A dict's version is another after each change; a count that misses some is not relied on."""

import itertools
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.transforms.versions import tells, versions_of

# of 3.13.0: attributes that are stored are not counted, and each value is compared
COUNTED = sys.version_info < (3, 13) or versions_of([]) is not None
counted = pytest.mark.skipif(not COUNTED, reason="this Python does not count all changes of a dict")
KEYS = st.sampled_from("abc")
CHANGES = st.one_of(
    st.tuples(st.just("set"), KEYS),
    st.tuples(st.just("pop"), KEYS),
    st.tuples(st.just("setdefault"), KEYS),
    st.just(("clear", "")),
    st.just(("read", "a")),
)


@counted
@given(st.lists(CHANGES, max_size=20))
def test_a_version_is_another_where_the_dict_is(changes: list[tuple[str, str]]) -> None:
    space: dict[str, Any] = {"a": object()}
    for kind, key in changes:
        before, version = list(space.items()), versions_of([space])
        assert version is not None  # else the rest shows nothing
        if kind == "set":
            space[key] = object()
        elif kind == "pop":
            space.pop(key, None)
        elif kind == "setdefault":
            space.setdefault(key, object())
        elif kind == "clear":
            space.clear()
        else:
            space.get(key)
        now = list(space.items())
        same = len(now) == len(before) and all(
            a[0] is b[0] and a[1] is b[1] for a, b in zip(now, before, strict=True)
        )
        assert same or versions_of([space]) != version
        if kind == "read":
            assert versions_of([space]) == version


@pytest.mark.parametrize("pick", ["len", "keys", "never", "always"])
def test_a_count_that_misses_changes_is_seen(pick: str) -> None:
    count = itertools.count()
    versions = {
        "len": len,
        "keys": lambda x: hash(tuple(map(str, x))),
        "never": lambda x: 0,
        "always": lambda x: next(count),
    }
    assert not tells(versions[pick])


@counted
def test_the_count_of_torch_is_no_such() -> None:
    assert tells(torch._C._dynamo.guards.dict_version)
