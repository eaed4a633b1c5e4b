"""What a function raises by itself is told as such; what staging alone causes keeps its ways on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import TraceError

Params = dict[str, Tensor]
PARAMS = {"w": torch.ones(4, 4)}
X = torch.ones(2, 4)
HELD = torch.ones(3)


def product(params: Params, x: Any) -> Tensor:
    return (x @ params["w"]).mean()


def adds_another_size(params: Params, x: Tensor) -> Tensor:
    return (x @ params["w"] + HELD).mean()


def reads_a_key(params: Params, x: Tensor) -> Tensor:
    return product(params, x) * params["v"]


def indexes(params: Params, x: Tensor) -> Tensor:
    return (x @ params["w"])[:, 7].mean()


def calls_what_is_not_there(params: Params, x: Any) -> Tensor:
    return (x @ params["w"]).avg()


def raises(params: Params, x: Tensor) -> Tensor:
    raise ValueError("two rows are too few")


def lower(fn: Callable[..., Any], batch: Any, **options: Any) -> fzero.Program:
    step_fn = fzero.make_train_step(fn, fzero.optim.sgd(0.1), fzero.Config(**options))
    return step_fn.lower(*step_fn.init(PARAMS), batch)


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 3}, {"precision": "bf16"}])
@pytest.mark.parametrize(
    ("fn", "batch", "kind", "said"),
    [
        (product, torch.ones(2, 3), "RuntimeError", r"\[2, 3\] X \[4, 4\]"),
        (product, [X], "TypeError", "for @: 'list' and 'Tensor'"),
        (adds_another_size, X, "RuntimeError", "broadcast"),
        (reads_a_key, X, "KeyError", "'v'"),
        (indexes, X, "IndexError", "out of bounds for dimension 1"),
        (calls_what_is_not_there, X, "AttributeError", "'Tensor' object has no attribute 'avg'"),
        (raises, X, "ValueError", "two rows are too few"),
    ],
)
def test_an_error_of_the_functions_own_is_told_as_such(
    fn: Callable[..., Any], batch: Any, kind: str, said: str, options: dict[str, Any]
) -> None:
    rule = rf"raises {kind}: .*{said}.* at .*test_unstaged\.py:\d+, in {fn.__name__}: `"
    with pytest.raises(TraceError, match=rule) as error:
        lower(fn, batch, **options)
    assert "by itself" in str(error.value)
    assert "Ways on" not in str(error.value)
    assert type(error.value.__cause__).__name__ == kind


def reads_a_value(params: Params, x: Tensor) -> Tensor:
    return product(params, x) if x.sum() > 0 else x.sum()


def chooses_rows(params: Params, x: Tensor) -> Tensor:
    return product(params, x[x.sum(1) > 0])


def goes_through_numpy(params: Params, x: Tensor) -> Tensor:
    return product(params, torch.from_numpy(np.sin(x.numpy())))


def asks_for_an_address(params: Params, x: Tensor) -> Tensor:
    return product(params, x) * float(x.data_ptr() > 0)


def asks_for_a_class(params: Params, x: Tensor) -> Tensor:
    if type(x) is not Tensor:
        raise TypeError("plain tensors only")
    return product(params, x)


def passes_over_a_refusal(params: Params, x: Tensor) -> Tensor:
    try:
        rows = int(x.sum())
    except RuntimeError:
        rows = None
    if rows is None:
        raise ValueError("no rows")
    return product(params, x)


@torch.library.custom_op("fzero_unstaged::same", mutates_args=())
def same(x: Tensor) -> Tensor:
    return x.clone()


def calls_a_kernel_without_a_fake(params: Params, x: Tensor) -> Tensor:
    return product(params, same(x))


@pytest.mark.parametrize(
    "fn",
    [
        reads_a_value,
        chooses_rows,
        goes_through_numpy,
        asks_for_an_address,
        asks_for_a_class,
        passes_over_a_refusal,
        calls_a_kernel_without_a_fake,
    ],
)
def test_what_staging_alone_causes_keeps_its_ways_on(fn: Callable[..., Any]) -> None:
    assert fn(PARAMS, X).isfinite()
    with pytest.raises(TraceError, match=rf"(?s)can't be staged out: .* in {fn.__name__}.*Ways on"):
        lower(fn, X)


@pytest.mark.parametrize(
    ("batch", "name"),
    [(X.to("meta"), "batch"), ({"x": X.to("meta")}, r"batch\.x")],
    ids=["a tensor", "in a dict"],
)
def test_a_batch_on_another_device_is_told_to_move(batch: Any, name: str) -> None:
    def fn(params: Params, given: Any) -> Tensor:
        return product(params, given if isinstance(given, Tensor) else given["x"])

    rule = rf"two devices at .*{name}: on meta, w: on cpu. Move it there first: x\.to\('cpu'\)"
    with pytest.raises(TraceError, match=rule) as error:
        lower(fn, batch)
    assert "Ways on" not in str(error.value)


def test_a_batch_that_fits_is_staged_out_after_one_that_does_not() -> None:
    step_fn = fzero.make_train_step(product, fzero.optim.sgd(0.1))
    state = step_fn.init(PARAMS)
    with pytest.raises(TraceError, match="by itself"):
        step_fn(*state, torch.ones(2, 3))
    step_fn(*state, X)
