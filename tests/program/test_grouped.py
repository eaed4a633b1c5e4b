"""Products of groups are recorded in every dtype, with torch's numbers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero

OFFSETS = torch.tensor([3, 3, 8], dtype=torch.int32)  # the second expert has no row
SHAPES = {
    "rows of experts": ((8, 8), (3, 8, 16), OFFSETS),
    "inner dims of experts": ((16, 8), (8, 8), OFFSETS),
    "columns of experts": ((3, 8, 16), (16, 8), OFFSETS),
    "a batch": ((3, 8, 8), (3, 8, 16), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SHAPES)
def test_grouped_mm_is_recorded_with_torchs_numbers(kind: str, dtype: torch.dtype) -> None:
    a_shape, b_shape, offs = SHAPES[kind]
    torch.manual_seed(0)
    params = {"a": torch.randn(a_shape, dtype=dtype), "b": torch.randn(b_shape, dtype=dtype)}

    def loss(params: Any, batch: Tensor) -> Tensor:
        return (F.grouped_mm(params["a"], params["b"], offs=offs) * batch).square().sum()

    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    wanted = loss(leaves, torch.ones(()))
    wanted.backward()
    step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.0, momentum=0.9), fzero.Config(stage=3))
    state = step_fn.init(params)
    step_fn.lower(*state, torch.ones(())).verify()
    _, opt_state = step_fn(*state, torch.ones(()))
    assert torch.equal(opt_state.metrics["loss"], wanted.detach().to(torch.float32))
    found: Any = fzero.unshard(opt_state.inner.trace)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert torch.equal(found[name], leaf.grad)
