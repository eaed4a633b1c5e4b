"""Functions of sharded parameters hold what their Program says: shards, a bucket, activations."""

from collections.abc import Callable

import pytest
import torch

import fzero
from benchmarks.allocations import LocalState, measure
from benchmarks.models import GPT, Size, batch_of
from tests.ranks import fake_ranks

FEW_TOKENS = Size(vocabulary=64, width=128, layers=12, heads=4, tokens=2, rows=1)


def evaluation(cfg: fzero.Config) -> tuple[LocalState, fzero.Program]:
    """What an evaluation of a GPT of which parameters are nearly all holds in this world."""
    programs = []

    def build() -> Callable[[], None]:
        torch.manual_seed(0)
        module = GPT(FEW_TOKENS)
        apply, full = fzero.functionalize(module)
        module.to("meta")  # from here on it is only code: the full parameters go
        batch = batch_of(FEW_TOKENS, 1)
        loss = fzero.sharded(lambda params, batch: apply(params, *batch), cfg, reduce="mean")
        params = fzero.shard(full, cfg)
        programs.append(loss.lower(params, batch))
        del full
        return lambda: loss(params, batch) and None

    held, _ = measure(build)
    return held, programs[0]


def param_bytes() -> int:
    with torch.device("meta"):
        return sum(p.nbytes for p in GPT(FEW_TOKENS).parameters())


def test_evaluation_at_world_8_peaks_at_shards_and_a_tenth_of_the_parameters() -> None:
    with fake_ranks(8):
        held, program = evaluation(fzero.Config(stage=3))
    assert held.between == pytest.approx(param_bytes() / 8, rel=0.01)
    assert held.peak - held.between <= 0.10 * param_bytes()
    assert program.peak_bytes() == pytest.approx(held.peak, rel=0.01)
