"""What a rank holds, by category, is what the formula says for each precision: to the byte."""

from typing import Any

import pytest
import torch

from benchmarks.models import Size
from benchmarks.precision import PRESETS, Bytes, formula, measured, numel_of
from fzero import Config
from tests.ranks import fake_ranks

WORLD = 8
TINY = Size(vocabulary=64, width=32, layers=1, heads=4, tokens=16, rows=1)  # 8 divides every leaf

CASES = [
    *[(name, 3, 1, None) for name in PRESETS],
    *[(name, 1, 1, None) for name in ("bf16", "autocast", "bf16 masters")],
    *[("bf16", stage, accum, None) for stage, accum in ((0, 1), (0, 2), (1, 2), (2, 1), (2, 2))],
    *[(name, stage, 2, "cpu") for name, stage in (("float32", 3), ("bf16", 3), ("bf16", 1))],
]


@pytest.mark.parametrize(
    ("name", "stage", "accum", "offload"),
    # every other one of the last here, the rest where there is time
    [
        *CASES[:-8],
        *(pytest.param(*c, marks=[pytest.mark.slow] * (i % 2)) for i, c in enumerate(CASES[-8:])),
    ],
)
@pytest.mark.quick("bf16-3-1-None", "fp16 masters-3-1-None", "autocast-1-1-None", "bf16-3-2-cpu")
def test_memory_by_category(name: str, stage: int, accum: int, offload: Any) -> None:
    cfg = Config(stage, precision=PRESETS[name], accum_steps=accum, offload=offload)
    expected = formula(numel_of(TINY), WORLD, cfg, safe=numel_of(TINY, torch.nn.Linear))
    with fake_ranks(WORLD):
        assert measured(TINY, cfg) == expected


def test_the_formula_in_numbers() -> None:
    # bytes per parameter at world 8, as papers count them
    def of(**config: Any) -> Bytes:
        return formula(8, 8, Config(**config))

    assert of(stage=0, precision="bf16") == (2 * 8, 4 * 8, 8 * 8, 4 * 8)
    assert of(stage=1, precision="bf16") == (2 * 8, 4, 8, 4)
    assert of(stage=3, precision="bf16") == (4, 0, 8, 4)
    assert of(stage=3, precision="bf16", offload="cpu") == (2, 4, 8, 4)
    assert of(stage=3) == (4, 0, 8, 4)
    assert of(stage=3, precision=PRESETS["bf16 masters and states"]) == (2, 0, 4, 2)
