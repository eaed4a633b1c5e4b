"""Gradients that a caller writes, between a backward and the step that takes them."""

from torch import Tensor

from fzero.distributed.agree import agree
from fzero.distributed.mesh import is_simulated
from fzero.engine import phases
from fzero.engine.driver import Driver
from fzero.engine.parts import Parts
from fzero.errors import BackwardError, ShardError
from fzero.state.agreement import checksum


def set_full_grad(driver: Driver, parts: Parts, index: int, value: Tensor) -> None:
    """See `Engine.set_full_grad`."""
    leaf, mesh = parts.reducer.leaves[index], driver.stepper.plan.mesh
    _check(driver, parts, index, value, tuple(leaf.shape), "set_full_grad")
    driver.journal.enter("set_full_grad")
    if mesh.world_size > 1 and not is_simulated(mesh):
        items = [(leaf.name, checksum(value))]
        hint = "Every rank must give the same gradient."
        agree("engine.set_full_grad", items, mesh, driver.cfg.timeout, hint)
    scattered = parts.rules.reduces and parts.reducer.scatter
    _put(parts, index, leaf.split(value, mesh.shard_rank) if scattered else value)


def set_local_grad(driver: Driver, parts: Parts, index: int, value: Tensor) -> None:
    """See `Engine.set_local_grad`."""
    reducer, mesh = parts.reducer, driver.stepper.plan.mesh
    leaf = reducer.leaves[index]
    split = reducer.scatter and leaf.dim is not None
    shape = leaf.shard_shape(mesh.shard_rank) if split else tuple(leaf.shape)
    _check(driver, parts, index, value, shape, "set_local_grad")
    driver.journal.enter("set_local_grad")
    if split and not parts.rules.reduces:  # what is held is full until the update
        value = reducer.transport.whole(value.to(reducer.sums[index]), leaf)
    _put(parts, index, value)


def _check(
    driver: Driver, parts: Parts, index: int, value: Tensor, shape: tuple[int, ...], asked: str
) -> None:
    phases.refuse_inside(driver.state, f"{asked}()")
    parts.reducer.refuse_half_done(f"{asked}() was called")
    leaf = parts.reducer.leaves[index]
    if not leaf.trainable:
        raise ShardError(f"{asked}({leaf.name!r}): the parameter is frozen, and has no gradient.")
    if not driver.state.moved:
        raise BackwardError(
            f"engine.{asked}({leaf.name!r}) was called before any backward since the last step(). "
            "It replaces what a backward has brought; call loss.backward() first."
        )
    if tuple(value.shape) != shape:
        raise ShardError(
            f"{asked}({leaf.name!r}): the gradient is {tuple(value.shape)}, and must be {shape}."
        )


def _put(parts: Parts, index: int, mean: Tensor) -> None:
    """Hold `mean` as [Note: where a gradient is] has it: reduced, or as this rank's share of it."""
    reducer, scale = parts.reducer, parts.stepper.opt_state.loss_scale
    grad = mean.detach().to(reducer.device, reducer.sums[index], copy=True)
    if scale is not None:
        grad.mul_(scale.scale.to(grad.dtype))
    if not parts.rules.reduces:  # the update sums over ranks and multiplies by the share
        grad.div_(reducer.share * reducer.transport.axes.world)
    reducer.replace(index, grad, reduced=parts.rules.reduces)
