"""Functions of sharded parameters hold what their Program says: shards, a bucket, activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import fzero
from benchmarks.allocations import LocalState, measure
from benchmarks.models import GPT, Size, batch_of
from tests.ranks import fake_ranks

TINY = Size(vocabulary=64, width=32, layers=2, heads=4, tokens=16, rows=2)
FEW_TOKENS = Size(vocabulary=64, width=128, layers=12, heads=4, tokens=2, rows=1)


def held_by(
    size: Size, make: Callable[[Callable[..., Any]], Any], cfg: fzero.Config, *trees: int
) -> tuple[LocalState, fzero.Program]:
    """What a function of a GPT's loss holds in this world, and its Program.

    Args:
        size: of the GPT.
        make: from the loss to the function that is called.
        cfg: how parameters live.
        trees: seeds of trees like the parameters that come after them.
    """
    programs = []

    def build() -> Callable[[], None]:
        torch.manual_seed(0)
        module = GPT(size)
        apply, full = fzero.functionalize(module)
        module.to("meta")  # from here on it is only code: the full parameters go
        batch = batch_of(size, size.rows)
        function = make(lambda params, batch: apply(params, *batch))
        params = fzero.shard(full, cfg) if cfg.stage == 3 else full
        del full
        args = (params, *(fzero.tree_random_like(params, seed) for seed in trees), batch)
        programs.append(function.lower(*args))
        return lambda: function(*args) and None

    held, _ = measure(build)
    return held, programs[0]


def param_bytes() -> int:
    with torch.device("meta"):
        return sum(p.nbytes for p in GPT(FEW_TOKENS).parameters())


@pytest.mark.slow
def test_evaluation_at_world_8_peaks_at_shards_and_a_tenth_of_the_parameters() -> None:
    cfg = fzero.Config(stage=3)
    with fake_ranks(8):
        held, program = held_by(FEW_TOKENS, partial(fzero.sharded, cfg=cfg, reduce="mean"), cfg)
    assert held.between == pytest.approx(param_bytes() / 8, rel=0.01)
    assert held.peak - held.between <= 0.10 * param_bytes()
    assert program.peak_bytes() == pytest.approx(held.peak, rel=0.01)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "transform", [fzero.value_and_grad, pytest.param(fzero.hvp, marks=pytest.mark.slow)]
)
def test_peaks_of_derivatives_are_predicted(transform: Any, stage: int) -> None:
    cfg = fzero.Config(stage=stage)
    trees = (1,) if transform is fzero.hvp else ()
    with fake_ranks(8):
        held, program = held_by(TINY, partial(transform, cfg=cfg), cfg, *trees)
    assert program.peak_bytes() == pytest.approx(held.peak, rel=0.02)
