"""What travels with a leaf of a flat is used, not brought again."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.distributed.buckets import Bucket
from fzero.distributed.journal import Journal
from fzero.distributed.ragged import is_supported
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not is_supported(), reason="flats want torch 2.13")


class Block(nn.Module):
    """Its layers are used in another order than that of their names."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(d, 2 * d), nn.LayerNorm(d), nn.Linear(2 * d, d)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Twelve blocks, of which the tenth and later come before the second by the alphabet."""

    def __init__(self, d: int = 160) -> None:
        super().__init__()
        self.words = nn.Embedding(2**12, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(12))
        self.last = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for block in self.blocks:
            y = block(y)
        return self.last(y).square().mean()


def traffic(layout: str, stage: int, executor: str) -> tuple[dict[str, int], list[float]]:
    """Bytes that a rank's third step has brought and taken away, and all losses."""
    torch.manual_seed(0)
    model = Model()
    rank = torch.distributed.get_rank()
    batches = [torch.arange(8) * (3 + rank) + step for step in range(3)]
    cfg = fzero.Config(stage=stage, layout=layout, prefetch=0)  # pyright: ignore
    sent: list[Bucket] = []
    announce = Journal.announce
    Journal.announce = lambda self, bucket: (sent.append(bucket), announce(self, bucket))[1]
    losses: list[float] = []
    try:
        if executor == "engine":
            engine = fzero.Engine(model, fzero.optim.sgd(0.5), cfg)
            for x in batches:
                sent.clear()
                loss = engine(x)
                loss.backward()
                engine.step()
                losses.append(float(loss.detach()))
        else:
            apply, params = fzero.functionalize(model)
            cfg = cfg.replace(executor="eager")
            step_fn = fzero.make_train_step(lambda p, x: apply(p, x), fzero.optim.sgd(0.5), cfg)
            state = step_fn.init(params)
            for x in batches:
                sent.clear()
                state = step_fn(*state, x)
                losses.append(float(state[1].metrics["loss"]))
    finally:
        Journal.announce = announce
    nbytes: Counter[str] = Counter()
    for bucket in sent:
        nbytes[bucket.kind] += bucket.nbytes
    return dict(nbytes), losses


@pytest.mark.parametrize("executor", ["engine", "eager"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.quick("3-eager", "2-engine")
def test_flats_carry_no_more_bytes_than_rows(executor: str, stage: int) -> None:
    for rank, flat in enumerate(run_ranks(2, traffic, "flat", stage, executor)):
        rows = run_ranks(2, traffic, "rows", stage, executor)[rank]
        assert flat[1] == pytest.approx(rows[1], rel=1e-6)
        assert flat[0].keys() == rows[0].keys()
        for kind, nbytes in rows[0].items():
            assert flat[0][kind] <= 1.02 * nbytes, (kind, flat, rows)
