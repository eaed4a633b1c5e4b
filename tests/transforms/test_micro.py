"""A batch is cut where all its leaves have the same rows, and nowhere else."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.errors import ShardError
from fzero.transforms.micro import micro_batches


@given(count=st.integers(1, 4), each=st.integers(0, 3))
def test_parts_put_together_are_the_batch(count: int, each: int) -> None:
    rows = count * each
    batch = {"x": torch.arange(rows), "y": [torch.rand(rows, 2)], "t": torch.tensor(0.5), "k": 3}
    parts: list[Any] = micro_batches(batch, count)
    assert len(parts) == count
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["y"][0] for part in parts]), batch["y"][0])
    assert all(part["t"] == 0.5 and part["k"] == 3 for part in parts)


def _loss(params: Any, batch: Any) -> torch.Tensor:
    return ((batch["x"] @ params["w"]) * batch["weight"]).square().mean()


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_what_has_other_rows_is_not_cut(executor: Any) -> None:
    batch = {"x": torch.ones(8, 6), "weight": torch.tensor([1.0, 5.0])}
    for count in (1, 2):
        cfg = fzero.Config(accum_steps=count, executor=executor)
        step_fn = fzero.make_train_step(_loss, fzero.optim.sgd(0.1), cfg)
        state = step_fn.init({"w": torch.ones(6, 2)})
        if count == 1:
            step_fn(*state, batch)
            continue
        with pytest.raises(ShardError, match="accum_steps=2 cuts"):
            step_fn(*state, batch)
        step_fn(*state, {"x": batch["x"], "weight": torch.ones(8, 2)})
