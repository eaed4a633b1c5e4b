"""`simulate`: what a step would cost in a world that isn't there."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from fzero.config import Config, as_config
from fzero.distributed.made_up_ranks import made_up_ranks
from fzero.distributed.mesh import Mesh, resolve_mesh
from fzero.errors import ConfigError, FzeroError, arguments_by_name
from fzero.numerics.fakes import without_addresses
from fzero.program import Program
from fzero.program.hardware import Hardware
from fzero.program.machines import resolve_hardware
from fzero.program.transfers import planned_for
from fzero.simulation.fakes import WithoutMemory, batch_on_cpu, fakes_of, on_cpu
from fzero.simulation.report import Report, report_on, tokens_in
from fzero.step.gradients import ModelFn
from fzero.step.train_step import make_train_step
from fzero.transforms.function import refuse_module
from fzero.tree import PyTree


@arguments_by_name
def simulate(
    model_fn: ModelFn,
    opt: Any,
    cfg: Config | None,
    params: PyTree,
    batch: PyTree,
    world_size: int | tuple[int, int],
    hardware: Hardware | str | None = None,
    *,
    model_state: PyTree = None,
) -> Report:
    """What one rank of a training step holds, sends and computes in a world that isn't there.

    The step is staged out exactly as it would be there, and not run. No tensor of it has memory, no
    process group is needed, and one that is there is left as it is.

    Args:
        model_fn, opt, cfg: as `make_train_step` takes them; `cfg.mesh` must be None.
        params: pytree of full tensors; only shapes and dtypes count: they may be on `meta`, and are
            not copied. Or a function without arguments that builds it.
        batch: one rank's batch of a whole step, all micro-batches together; on `meta` as well.
        world_size: ranks; `(replicate, shard)` for HSDP.
        hardware: "a100", "h100" (None), "h200", "b200", "cpu", or a `Hardware`.
        model_state: as `TrainStep.init` takes it.

    Returns:
        A `Report`, of rank 0, which has the largest shards. Printed it is a table.

    Raises:
        ConfigError: the config, the world or the hardware can't be had.
        TraceError: the model function can't be staged out.

    Examples:
        >>> import torch, fzero
        >>> apply, params = fzero.functionalize(torch.nn.Linear(4096, 4096, device="meta"))
        >>> report = simulate(
        ...     lambda params, x: apply(params, x).square().mean(),
        ...     fzero.optim.adamw(1e-3), fzero.Config(stage=3), params,
        ...     torch.empty(64, 4096, device="meta"), world_size=512, hardware="h100",
        ... )
        >>> report.categories["optimizer"]  # two float32 moments, and a count
        262212
        >>> report.seconds > report.exposed > 0
        True
    """
    cfg = as_config("simulate", cfg)
    refuse_module("simulate", model_fn)
    shape = check_world(cfg, world_size)
    machine = resolve_hardware(hardware)
    program, mesh = lowered(model_fn, opt, cfg, params, batch, shape, machine, model_state)
    return report_on(program, cfg, mesh, machine, tokens_in(batch))


def lowered(
    model_fn: ModelFn,
    opt: Any,
    cfg: Config,
    params: PyTree,
    batch: PyTree,
    shape: tuple[int, ...],
    hardware: Hardware,
    model_state: PyTree = None,
    like: Program | None = None,
) -> tuple[Program, Mesh]:
    """The step's Program on the first of made-up ranks, and their mesh.

    Args:
        hardware: that plans for a memory limit are made for.
        like: as `TrainStep.lower` takes it.
    """
    mode = without_addresses(FakeTensorMode, allow_non_fake_inputs=True)
    fakes, state = (x if callable(x) else fakes_of(x, mode) for x in (params, model_state))
    fed = batch_on_cpu(batch)
    with made_up_ranks(*shape) as device_mesh, planned_for(hardware):
        cfg = replace(cfg, mesh=device_mesh)
        # see [Note: simulated on the CPU]
        step_fn = make_train_step(on_cpu(model_fn), opt, cfg)
        with WithoutMemory(mode):
            sharded, opt_state = step_fn.init(fakes, state)
        program = step_fn.lower(sharded, opt_state, fed, like=like)
        return replace(program, fitting=_RanksGone()), resolve_mesh(device_mesh, "cpu")


class _RanksGone:
    """Where a simulated Program would ask for other plans of the same function."""

    def frontier(self, points: int) -> Sequence[Program]:
        raise FzeroError(
            "frontier() stages out other plans of a step, and the made-up ranks that this one was "
            "simulated on are gone. Ask step_fn.lower(params, opt_state, batch).frontier(), or "
            "simulate with Config(memory_limit=...), one limit after the other."
        )


def check_world(cfg: Config, world_size: int | tuple[int, int]) -> tuple[int, ...]:
    """The shape of the mesh."""
    shape = world_size if isinstance(world_size, tuple) else (world_size,)
    if len(shape) not in (1, 2) or not all(type(n) is int and n >= 1 for n in shape):
        raise ConfigError(
            f"world_size={world_size!r}: must be a number of ranks >= 1, or two of them, "
            "(replicate, shard), for HSDP."
        )
    if cfg.mesh is not None:
        raise ConfigError(
            f"Config.mesh={cfg.mesh} is of this process's ranks, and what is simulated has "
            f"{math.prod(shape)} of its own. Pass mesh=None, and world_size=(replicate, shard) for "
            "a mesh of two axes."
        )
    if cfg.executor == "eager":
        raise ConfigError(
            f"Config.executor={cfg.executor!r} makes no Program, and a simulation reads one. Pass "
            "executor='traced'."
        )
    return shape
