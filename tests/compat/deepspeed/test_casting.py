"""What a model is cast to, against DeepSpeed's words: its buffers may go another way."""

from typing import Any

import pytest
import torch
from torch import nn

import fzero.compat.deepspeed as deepspeed

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Router(nn.Module):
    """A routing bias, which transformers names, and another buffer."""

    _keep_in_fp32_modules_strict = ("correction",)
    _keep_in_fp32_modules = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("correction", torch.full((2,), 5.003, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("ids", torch.arange(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)) * self.scale


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("kind", "data_types", "correction", "scale"),
    [
        ("bf16", {}, "fp32", "fp32"),
        ("bf16", {"buffer_dtype": "bf16"}, "fp32", "bf16"),
        ("fp16", {"buffer_dtype": "half"}, "fp32", "fp32"),
        ("bf16", {"buffer_dtype": "fp16", "keep_in_fp32_modules": []}, "fp16", "fp16"),
        ("bf16", {"keep_in_fp32_modules": []}, "bf16", "fp32"),
        ("bf16", {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["r*sc"]}, "bf16", "fp32"),
        ("fp32", {"buffer_dtype": "fp16"}, "fp16", "fp16"),
        ("fp32", {"param_dtype": "float"}, "bf16", "fp32"),
    ],
)
def test_buffers_have_the_dtype_that_the_configuration_says(
    stage: int, kind: str, data_types: dict[str, Any], correction: str, scale: str
) -> None:
    model = nn.ModuleDict({"router": Router()})
    model.forward = model["router"].forward  # pyright: ignore
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "data_types": data_types,
        **({} if kind == "fp32" else {kind: {"enabled": True}}),
    }
    engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    router: Any = engine.module.get_submodule("router")
    assert router.linear.weight.dtype == DTYPES[kind]
    assert router.correction.dtype == DTYPES[correction]
    assert router.scale.dtype == DTYPES[scale]
    assert router.ids.dtype == torch.int64
    engine.backward(engine(torch.ones(2, 2)).float().sum())
    engine.step()
    assert router.correction.dtype == DTYPES[correction]
