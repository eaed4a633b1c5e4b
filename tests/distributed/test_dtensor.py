"""The fast DTensor constructor against the public one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fzero.distributed.dtensor import dtensor_spec, from_spec, local_tensor
from fzero.distributed.mesh import resolve_mesh
from tests.ranks import fake_ranks, run_ranks


@pytest.mark.parametrize("shape", [(), (0,), (5,), (7, 15), (2, 3, 4)])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_equals_the_public_constructor(
    shape: tuple[int, ...], split: bool, dtype: torch.dtype
) -> None:
    # Fails here first when torch changes its private constructor.
    with fake_ranks(3, rank=1):
        mesh = resolve_mesh(None, "cpu")
        full = torch.ones(shape, dtype=dtype)
        split = split and full.ndim > 0
        local = full.tensor_split(3)[1] if split else full
        placements = mesh.placements(0 if split else None)
        public = DTensor.from_local(
            local,
            mesh.device_mesh,
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        ours = from_spec(
            local, dtensor_spec(mesh.device_mesh, placements, full.shape, full.stride(), dtype)
        )
        assert ours._spec == public._spec
        assert (ours.shape, ours.stride(), ours.dtype) == (full.shape, full.stride(), dtype)
        assert ours.requires_grad is False
        assert local_tensor(ours) is local


def test_local_tensor_leaves_other_tensors_alone() -> None:
    x = torch.ones(2)
    assert local_tensor(x) is x


def _full_after_update() -> torch.Tensor:
    mesh = resolve_mesh(None, "cpu")
    full = torch.arange(14.0).reshape(7, 2)
    spec = dtensor_spec(mesh.device_mesh, mesh.placements(0), (7, 2), (2, 1), full.dtype)
    shard = torch.chunk(full, dist.get_world_size())[mesh.rank]
    updated = from_spec(shard, spec) * 2 + 1
    assert isinstance(updated, DTensor)
    return updated.full_tensor()


@pytest.mark.parametrize("world", [2, 3])
def test_uneven_shards_compute_and_come_back(world: int) -> None:
    for full in run_ranks(world, _full_after_update):
        assert torch.equal(full, torch.arange(14.0).reshape(7, 2) * 2 + 1)
