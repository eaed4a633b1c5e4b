"""What ranks compare before they shard: their values too."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.state.agreement import checksum
from tests.ranks import run_ranks


def _shard_unseeded(hybrid: bool, structure: bool) -> str:
    rank = dist.get_rank()
    full: dict[str, Any] = {"a": torch.ones(3), "w": torch.full((4, 2), float(rank))}
    if structure and rank:
        del full["a"]
    mesh = init_device_mesh("cpu", (2, 1)) if hybrid else None
    with pytest.raises(fzero.RankMismatchError) as raised:
        fzero.shard(full, fzero.Config(mesh=mesh))
    full["w"].fill_(1.0)
    full["a"] = torch.ones(3)
    fzero.unshard(fzero.shard(full, fzero.Config(mesh=mesh)))  # nothing was left half done
    return str(raised.value)


@pytest.mark.parametrize("hybrid", [False, True])
def test_ranks_that_shard_other_values_are_told(hybrid: bool) -> None:
    for text in run_ranks(2, _shard_unseeded, hybrid, False):
        assert "ranks differ in the values of full at ['w']: rank 0: checksum" in text
        assert "torch.manual_seed(0)" in text
    for text in run_ranks(2, _shard_unseeded, hybrid, True):
        assert "ranks differ in full at ['a']" in text


def test_shards_are_not_sharded_again() -> None:
    sharded = fzero.shard({"w": torch.ones(4)})
    with pytest.raises(fzero.ShardError, match=r"full\['w'\] is a DTensor.*fzero\.unshard\(full\)"):
        fzero.shard(sharded)


def test_what_has_no_values_is_compared_without() -> None:
    assert checksum(torch.ones(3, device="meta")) == "no values"


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.randn(4, 3, 2).transpose(0, 2),
        torch.randn(5, dtype=torch.complex128),
        torch.arange(9.0).view(3, 3).to(torch.float8_e4m3fn),  # rows of random ones may be alike
        torch.arange(9.0).view(3, 3).bfloat16(),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(5, dtype=torch.complex64).conj().imag,
    ],
    ids=lambda x: str(x.dtype),
)
def test_a_checksum_is_of_any_leaf(x: torch.Tensor) -> None:
    assert checksum(x) == checksum(x.clone())
    if x.numel() > 1:
        assert checksum(x.flip(0)) != checksum(x)
