"""What a step's Python does, beside its Programs, is no more for more leaves."""

from collections import Counter
from typing import Any

import pytest
import torch

import fzero
from benchmarks import host
from fzero.distributed.ragged import is_supported
from tests.ranks import fake_ranks

CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"stage": 3}),
    (1, {"stage": 2, "clip_norm": 1.0, "accum_steps": 2}),
    (2, {"stage": 0}),
    (2, {"stage": 1, "on_nonfinite": "skip"}),
    (2, {"stage": 2}),
    (2, {"stage": 3, "accum_steps": 2}),
    (2, {"stage": 3, "precision": "fp16"}),
    *([(2, {"stage": 3, "layout": "flat"})] if is_supported() else []),
]


def _instructions(leaves: int, cfg: fzero.Config, monkeypatch: Any) -> Counter[Any]:
    """Byte code that a later step runs outside of its Programs, by function."""
    monkeypatch.setattr(host.recorded, "compile_program", host.Clock().compile_program)
    step_fn = fzero.make_train_step(host.model_fn, fzero.optim.adamw(1e-3), cfg)
    params = {f"layers.{i}.weight": torch.randn(4, 4) / 4 for i in range(leaves)}
    params, opt_state = step_fn.init(params)
    batch = torch.randn(2, 4).to(torch.float16 if cfg.precision == "fp16" else torch.float32)
    for _ in range(3):
        params, opt_state = step_fn(params, opt_state, batch)
    with host.counted() as found:
        step_fn(params, opt_state, batch)
    return Counter({code.co_qualname: n for (code, _), n in found.items()})


@pytest.mark.parametrize(("world", "fields"), CASES)
@pytest.mark.quick("1-fields0", "2-fields5")
def test_python_runs_as_many_instructions_for_ten_leaves_as_for_fifty(
    world: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves are looked at one by one, but in loops of C."""
    cfg = fzero.Config(**fields)
    with fake_ranks(world):
        few, many = (_instructions(leaves, cfg, monkeypatch) for leaves in (10, 50))
    assert many - few == few - many == Counter()
    assert few.total() > 1_000  # it counts
