"""Trees: a structure that is known is recognised, and none is taken for another."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fzero import tree


class Pair(NamedTuple):
    a: Any
    b: Any


def leaf() -> Tensor:
    return torch.zeros(1)


SUBTREES = st.recursive(
    st.builds(leaf) | st.none() | st.integers(0, 3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


@given(SUBTREES, SUBTREES)
def test_a_structure_that_is_expected_changes_nothing(one: Any, other: Any) -> None:
    like = tree.flatten(other)[1]
    plain, spec = tree.flatten(one)
    found, seen = tree.flatten(one, like)
    assert seen == spec
    assert len(found) == len(plain)
    assert all(x is y for x, y in zip(found, plain, strict=True))


@pytest.mark.parametrize("x", [nn.Parameter(leaf()), leaf().to("meta")])
def test_leaves_of_any_class_of_tensors_are_recognised(x: Tensor) -> None:
    like = tree.flatten({"a": leaf(), "b": (leaf(), None)})[1]
    found, seen = tree.flatten({"b": (x, None), "a": x}, like)
    assert seen is like
    assert [y is x for y in found] == [True, True]


def test_dicts_of_one_order_or_another_are_one_structure() -> None:
    a, b = leaf(), leaf()
    like = tree.flatten({"a": leaf(), "b": leaf()})[1]
    found, seen = tree.flatten(OrderedDict(b=b, a=a), like)
    assert seen is like
    assert found[0] is a
    assert found[1] is b


@pytest.mark.parametrize(
    "there", [None, 3, [leaf()], {"x": leaf()}, (leaf(), leaf())], ids=lambda x: type(x).__name__
)
def test_what_is_no_tensor_at_the_place_of_one_is_another_structure(there: Any) -> None:
    like = tree.flatten({"a": leaf(), "b": leaf()})[1]
    given = {"a": leaf(), "b": there}
    found, seen = tree.flatten(given, like)
    assert seen == tree.flatten(given)[1]
    assert all(x is y for x, y in zip(found, tree.leaves(given), strict=True))
