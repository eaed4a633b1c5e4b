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
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


@given(SUBTREES, SUBTREES, st.booleans())
def test_a_structure_that_is_known_changes_nothing(one: Any, other: Any, same: bool) -> None:
    known = tree.Known(tree.flatten(one if same else other)[1])
    plain, spec = tree.flatten(one)
    found, seen = tree.flatten(one, known)
    assert seen in (spec, known.spec)
    assert all(x is y for x, y in zip(found, plain, strict=True))
    assert tree.paths(tree.unflatten(seen, found)) == tree.paths(one)


def recognised(like: Any, given: Any) -> bool:
    """Whether a tree is, and its leaves come in their order in any case."""
    known = tree.Known(tree.flatten(like)[1])
    found, seen = tree.flatten(given, known)
    plain, spec = tree.flatten(given)
    assert seen == spec
    assert all(x is y for x, y in zip(found, plain, strict=True))
    return seen is known.spec


@pytest.mark.parametrize("x", [nn.Parameter(leaf()), leaf().to("meta")])
def test_leaves_of_any_class_of_tensors_are_recognised(x: Tensor) -> None:
    assert recognised({"a": leaf(), "b": (leaf(), None)}, {"b": (x, None), "a": x})


def test_a_dict_of_another_class_has_another_order() -> None:
    plain, turned = {"a": leaf(), "b": leaf()}, OrderedDict(b=leaf(), a=leaf())
    assert not recognised(plain, turned)
    assert not recognised(turned, plain)
    assert not recognised([plain, leaf()], [turned, leaf()])
    assert not recognised({"a": {"b": plain}}, {"a": {"b": turned}})
    assert recognised([turned, {"c": plain}], [OrderedDict(b=leaf(), a=leaf()), {"c": plain}])


def test_an_ordered_dict_in_another_order_has_its_leaves_in_another_order() -> None:
    """A dict's come by their keys, whichever was set first."""
    assert recognised({"a": leaf(), "b": leaf()}, {"b": leaf(), "a": leaf()})
    given = OrderedDict(b=leaf(), a=leaf())
    assert not recognised(OrderedDict(a=leaf(), b=leaf()), given)
    assert not recognised([OrderedDict(a={"x": leaf()}, b=leaf())], [OrderedDict(given, a={})])
    assert not recognised(Pair(1, OrderedDict(a=leaf(), b=leaf())), Pair(leaf(), given))


@pytest.mark.parametrize(
    "there", [None, 3, [leaf()], {"x": leaf()}, (leaf(), leaf())], ids=lambda x: type(x).__name__
)
def test_what_is_no_tensor_at_the_place_of_one_is_another_structure(there: Any) -> None:
    assert not recognised({"a": leaf(), "b": leaf()}, {"a": leaf(), "b": there})
