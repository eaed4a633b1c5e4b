"""Bytes by category and on the wire, for each precision: measured, and what the formula says.

    python -m benchmarks.precision                          # gpt2 at world 8, stages 0 to 3
    python -m benchmarks.precision --world 64 --stages 3 --accum 4

One process plays one rank (see `benchmarks.memory`). Columns, in bytes per parameter of the model:
parameters, masters, AdamW's state and gradients as this rank holds them when the update begins,
accounted for to the byte by the allocator's own events; then what it sends in a step's gathers and
reductions. A category that is not what the formula says is marked.
"""

import argparse
from typing import Any, NamedTuple

import torch

import fzero
from benchmarks.allocations import measure
from benchmarks.memory import one_rank_of
from benchmarks.models import GPT, SIZES, Size, Step, batch_of, fzero_step
from fzero import Config, Precision, tree
from fzero.distributed.dtensor import local_tensor
from fzero.step.train_step import micro_batches

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRESETS: dict[str, Any] = {
    "float32": None,
    "bf16": "bf16",
    "fp16": "fp16",
    "autocast": Precision(autocast=BF16),
    "bf16 masters": Precision(BF16, FP32, BF16),
    "bf16 masters and states": Precision(BF16, BF16, BF16, optimizer=BF16),
    "fp16 masters": Precision(FP16, FP32, FP16),
}


class Bytes(NamedTuple):
    """Bytes on one rank, by category."""

    params: int
    masters: int
    optimizer: int
    gradients: int


def formula(numel: int, world: int, cfg: Config, safe: int = 0) -> Bytes:
    """What a rank holds of a model of `numel` parameters that `world` divides, under AdamW.

    Args:
        numel: parameters, all of them trained and given in float32.
        world: ranks that leaves are split over.
        cfg: the step's.
        safe: how many of the parameters autocast reduces in its own dtype.
    """
    dtypes = cfg.dtypes
    used = dtypes.param or FP32
    kept = dtypes.kept or FP32
    state = dtypes.state or kept
    split = numel // world
    held, updated = (split if cfg.stage == 3 else numel), (split if cfg.stage else numel)
    own = cfg.offload is not None or (cfg.stage < 3 and kept != used)
    params = used if cfg.stage < 3 or cfg.offload else kept
    # before they are reduced, gradients are whole; what is summed over micro-batches is float32
    late = cfg.stage == 1 and cfg.accum_steps > 1
    reduced = FP32 if cfg.accum_steps > 1 else dtypes.reduce or used
    whole = cfg.stage == 0 or late
    gradients = (numel if whole else split) * reduced.itemsize
    if dtypes.autocast and cfg.accum_steps == 1 and cfg.stage < 3:  # a shard's has its dtype
        gradients -= (safe if whole else safe // world) * (4 - dtypes.autocast.itemsize)
    return Bytes(
        held * params.itemsize,
        updated * kept.itemsize if own else 0,
        2 * updated * state.itemsize,
        gradients,
    )


def measured(size: Size, cfg: Config) -> Bytes:
    """The same from the allocator's events, in the world of the current process group.

    Parameters, masters and state are what their tensors take. Gradients are what the allocator
    knows of beside those, and beside the batch and some scalars: nothing is left unaccounted for.
    """
    rows = size.rows * cfg.accum_steps
    opt = fzero.optim.adamw(1e-3)
    held, half = measure(lambda: Half(fzero_step(size, batch_of(size, rows), opt, cfg)))
    params, opt_state = half.step.params, half.step.opt_state
    state = [x for x in tree.leaves(opt_state.inner) if x.dim()]
    scalars = [x for x in tree.leaves(opt_state) if not x.dim()]
    known = [_nbytes(part) for part in (params, opt_state.master, state)]
    beside = _nbytes([scalars, half.step.batch, half.loss, half.mesh])
    params_bytes, master_bytes, state_bytes = known
    gradient_bytes = held.between - sum(known) - beside
    return Bytes(params_bytes, master_bytes, state_bytes, gradient_bytes)


class Half:
    """A step that stops before the update, and keeps the gradients."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.results: Any = None
        self.plan, *_ = step.step_fn._unpack(step.params, step.opt_state)

    def __call__(self) -> None:
        step, step_fn = self.step, self.step.step_fn
        plan, leaves, held = step_fn._unpack(step.params, step.opt_state)
        micro = micro_batches(step.batch, step_fn.cfg.accum_steps)
        staged = step_fn._executors.find(plan, leaves, held, micro[0])
        trained, frozen = plan.sharding.layout.divide(leaves)
        self.results = None
        self.results = staged.gradients(trained, frozen, held, micro, step.opt_state.step)

    @property
    def loss(self) -> torch.Tensor:
        """What comes with the gradients."""
        return self.results[1]

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks, which a device mesh keeps as a tensor."""
        return self.plan.mesh.device_mesh.mesh


def wire(size: Size, cfg: Config) -> tuple[int, int]:
    """Bytes that this rank sends in a step's gathers and in its reductions."""
    step = fzero_step(size, batch_of(size, size.rows * cfg.accum_steps), _sgd(), cfg)
    rows = step.lower().collectives()
    gathers = sum(row.wire_bytes * row.times for row in rows if row.kind == "all_gather")
    return gathers, sum(row.wire_bytes * row.times for row in rows) - gathers


def _sgd() -> fzero.optim.Optimizer:
    return fzero.optim.sgd(0.1)


def _nbytes(part: Any) -> int:
    storages = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for x in map(local_tensor, tree.leaves(part))
    }
    return sum(storages.values())


def numel_of(size: Size, kinds: type | tuple[type, ...] = torch.nn.Module) -> int:
    """Parameters of a GPT that modules of these kinds hold."""
    with torch.device("meta"):
        modules = [module for module in GPT(size).modules() if isinstance(module, kinds)]
    return sum(p.numel() for module in modules for p in module.parameters(recurse=False))


def main() -> None:
    """Print one row per precision and stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--model", default="gpt2", choices=SIZES)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--accum", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--offload", choices=["cpu"])
    args = parser.parse_args()
    size = SIZES[args.model]._replace(rows=1)
    columns = ["precision", "stage", *Bytes._fields, "gathers", "reductions"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, precision in PRESETS.items():
        for stage in args.stages:
            cfg = Config(stage, precision=precision, accum_steps=args.accum, offload=args.offload)
            cells = [name, str(stage), *_cells(size, cfg, args.world)]
            print("| " + " | ".join(cells) + " |", flush=True)


def _cells(size: Size, cfg: Config, world: int) -> list[str]:
    numel = numel_of(size)
    with one_rank_of(world):
        found, sent = measured(size, cfg), wire(size, cfg)
    expected = formula(numel, world, cfg, numel_of(size, torch.nn.Linear))
    cells = [
        f"{ours / numel:.3f}" + ("" if ours == theirs else f" (formula: {theirs / numel:.3f})")
        for ours, theirs in zip(found, expected, strict=True)
    ]
    return cells + [f"{x / numel:.3f}" for x in sent]


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is, and every default."""


if __name__ == "__main__":
    main()
