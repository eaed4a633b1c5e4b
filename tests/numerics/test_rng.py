"""Which operators draw, and when. Those of GPUs are asked by their schemas: no GPU is needed."""

from typing import Any

import pytest
import torch

from fzero.numerics.rng import is_random

ATEN: Any = torch.ops.aten
KERNELS = ("flash", "efficient", "cudnn")


def _call(operator: Any, dropout: float) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The operator with this dropout; nobody asks for its other arguments."""
    names = [argument.name for argument in operator._schema.arguments]
    assert "dropout_p" in names
    return operator, tuple(dropout if name == "dropout_p" else None for name in names), {}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_draws_in_forward(kernel: str, dropout: float) -> None:
    operator = getattr(ATEN, f"_scaled_dot_product_{kernel}_attention").default
    assert is_random(*_call(operator, dropout)) is (dropout > 0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_its_derivative_is_told_what_forward_drew_from(kernel: str) -> None:
    operator = getattr(ATEN, f"_scaled_dot_product_{kernel}_attention_backward").default
    assert not is_random(*_call(operator, 0.5))


def test_no_derivative_without_a_generator_is_held_to_draw() -> None:
    """Of all of torch's operators, whatever they are called."""
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if not schema.name.startswith("aten::") or "backward" not in name:
            continue
        packet = getattr(ATEN, name, None)
        operator = getattr(packet, schema.overload_name or "default", None)
        names = [argument.name for argument in schema.arguments]
        if operator is not None and "generator" not in names and "dropout_p" in names:
            assert not is_random(*_call(operator, 0.5)), schema.name


def test_all_others_that_are_tagged_draw() -> None:
    x = torch.ones(2)
    assert is_random(ATEN.bernoulli_.float, (x, 0.5), {})
    assert is_random(ATEN.native_dropout.default, (x, 0.5, True), {})
    assert not is_random(ATEN.add.Tensor, (x, x), {})
