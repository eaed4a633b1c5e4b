"""Each parameter has memory of its own: nothing that plain PyTorch ties by memory trains untied."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.errors import ShardError
from fzero.functional.memory import refuse_shared

Geometry = tuple[list[int], list[int], int]


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Sizes, strides and offset of a view of few elements."""
    dims = draw(st.integers(0, 2))
    sizes = draw(st.lists(st.integers(0, 3), min_size=dims, max_size=dims))
    strides = draw(st.lists(st.integers(0, 6), min_size=dims, max_size=dims))
    return sizes, strides, draw(st.integers(0, 9))


def elements(geometry: Geometry) -> set[int]:
    """The elements of the storage that a view has, counted one by one."""
    sizes, strides, offset = geometry
    every = itertools.product(*map(range, sizes))
    return {offset + sum(map(int.__mul__, index, strides)) for index in every}


@settings(max_examples=400, deadline=None)
@given(st.lists(geometries(), min_size=2, max_size=4), st.data())
def test_two_tensors_are_refused_iff_one_is_trained_and_they_have_an_element_in_common(
    views: list[Geometry], data: st.DataObject
) -> None:
    flat = torch.zeros(64)
    kinds = [data.draw(st.sampled_from(["trained", "trained", "frozen", "buffer"])) for _ in views]
    # parameters come first: a message names them before what is in their place
    rows = [
        (kind, str(i), flat.as_strided(*view))
        for i, (kind, view) in enumerate(zip(kinds, views, strict=True))
    ]
    params = [(n, nn.Parameter(x, kind == "trained")) for kind, n, x in rows if kind != "buffer"]
    buffers = [(n, x) for kind, n, x in rows if kind == "buffer"]
    shared = [
        (a, b)
        for a, b in itertools.combinations(range(len(views)), 2)
        if "trained" in (kinds[a], kinds[b]) and elements(views[a]) & elements(views[b])
    ]
    if not shared:
        refuse_shared(params, buffers)
        return
    with pytest.raises(ShardError, match="lie in the same memory") as error:
        refuse_shared(params, buffers)
    assert any(
        f"{str(a)!r}" in str(error.value) and f"{str(b)!r}" in str(error.value) for a, b in shared
    )


class Pair(nn.Module):
    """Two layers, of which the second has what `make` makes of the first one's weight."""

    def __init__(self, tie: Callable[["Pair"], None]) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        tie(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def _transposed(pair: Pair) -> None:
    pair.b.weight = nn.Parameter(pair.a.weight.data.T)


def _buffer(pair: Pair) -> None:
    pair.register_buffer("table", pair.a.weight.data)


def _attribute(pair: Pair) -> None:
    pair.transposed = pair.a.weight.T


def _in_a_list(pair: Pair) -> None:
    vars(pair)["rows"] = [pair.a.weight.detach()[1]]


@pytest.mark.parametrize("tie", [_transposed, _buffer, _attribute, _in_a_list])
def test_what_a_module_ties_by_memory_is_refused_by_both_names(tie: Callable[[Pair], None]) -> None:
    for made in (fzero.functionalize, fzero.Engine):
        with pytest.raises(ShardError, match=r"'a\.weight' and the .* lie in the same memory"):
            made(Pair(tie))


def test_what_is_never_trained_may_lie_in_one_place() -> None:
    pair = Pair(_transposed).requires_grad_(False)
    _buffer(pair)
    assert fzero.functionalize(pair)[1]["b.weight"] is not None


def test_a_hook_that_writes_an_attribute_before_each_forward_may_start_from_the_parameter() -> None:
    torch.nn.utils.spectral_norm(layer := nn.Linear(3, 3))  # of torch's: layer.weight
    assert layer.weight.data_ptr() == layer.weight_orig.data_ptr()  # pyright: ignore
    fzero.functionalize(layer)


def test_weights_that_an_rnn_computes_anew_may_start_from_the_parameter() -> None:
    lstm = torch.nn.utils.parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0")
    x = torch.ones(2, 1, 4)
    apply, params = fzero.functionalize(lstm)
    assert torch.equal(apply(params, x)[0], lstm(x)[0])
