"""States to save: how a job is set up, values that are known, and what a tree holds in full."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fzero
from fzero import tree
from fzero.distributed.dtensor import shard_like

# Uneven over 2, 3 and 4 ranks, split along another dim than the first, too small to split, 0-d.
SHAPES = {
    "embed.weight": (13, 6),
    "blocks.0.weight": (3, 16),
    "blocks.0.bias": (3,),
    "scale": (),
    "blocks.1.weight": (2, 3, 5),
    "positions": (7, 2),  # of integers: never cast, nor trained
    "empty": (0, 4),
}


class Job(NamedTuple):
    """How a training job is set up.

    Args:
        world: ranks.
        stage: of ZeRO.
        precision: as in Config.
        replicas: of an HSDP mesh; 1: one axis.
        accum: micro-batches.
        layout: as in Config.
    """

    world: int
    stage: int
    precision: str | None = None
    replicas: int = 1
    accum: int = 1
    layout: str = "rows"


def make(
    job: Job, seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> tuple[Any, Any, fzero.TrainStep]:
    """Params and state of a job, every value known from the seed and the leaf's name."""
    mesh = None
    if job.replicas > 1:
        shape = (job.replicas, job.world // job.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    cfg = fzero.Config(
        job.stage,
        mesh=mesh,
        precision=job.precision,
        accum_steps=job.accum,
        layout=job.layout,
    )
    opt = fzero.optim.chain(fzero.optim.scale_by_adam(), fzero.optim.scale(-1e-3))
    step_fn = fzero.make_train_step(_loss, opt, cfg)
    model_state = {"seen": torch.zeros(3), "batches": torch.zeros((), dtype=torch.int64)}
    full = {name: _values(f"params.{name}", shape, seed) for name, shape in shapes.items()}
    if "positions" in full:
        full["positions"] = (full["positions"] * 1000).long()
    params, opt_state = step_fn.init(full, model_state)
    for path, leaf in zip(tree.paths(opt_state), tree.leaves(opt_state), strict=True):
        if not path.startswith(".master"):
            _set(leaf, path, seed)
    return params, opt_state, step_fn


def full(params: Any, opt_state: Any) -> dict[str, Tensor]:
    """Every canonical value in full, by path: masters in place of their rounded copies."""
    params, opt_state = fzero.unshard(params), fzero.unshard(opt_state._replace(metrics={}))
    found = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    for path, master in zip(
        tree.paths(opt_state.master), tree.leaves(opt_state.master), strict=True
    ):
        assert torch.equal(found[path], master.to(found[path].dtype)), path
        found[path] = master
    rest = opt_state._replace(master=None)
    found |= dict(zip(tree.paths(rest), tree.leaves(rest), strict=True))
    return {path: x.detach().clone() for path, x in found.items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The paths where two results of `full` differ, bit for bit."""
    return [
        path for path in {**a, **b} if path not in a or path not in b or _bits(a[path], b[path])
    ]


def write(job: Job, run: Path, seed: int, **how: Any) -> dict[str, Tensor]:
    """Save on every rank, and what was saved."""
    params, opt_state, _ = make(job, seed)
    fzero.checkpoint.save(run, params, opt_state, step=seed, **how)
    return full(params, opt_state)


def read(job: Job, run: Path, **how: Any) -> dict[str, Tensor]:
    """Load on every rank over other values."""
    params, opt_state, _ = make(job, 1000)
    return full(*fzero.checkpoint.load(run, params, opt_state, **how))


def _loss(params: dict[str, Tensor], model_state: Any, batch: Tensor) -> tuple[Tensor, Any]:
    return sum((p * batch).sum() for p in params.values()), model_state


def _values(path: str, shape: tuple[int, ...], seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(zlib.crc32(f"{seed} {path}".encode()))
    return torch.randn(shape, generator=draws)


def _set(leaf: Tensor, path: str, seed: int) -> None:
    values = (_values(path, tuple(leaf.shape), seed) * 1000).to(leaf.dtype)
    if isinstance(leaf, DTensor):
        leaf.copy_(shard_like(values, leaf))
    else:
        leaf.copy_(values)


def _bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return True
    return not torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))
