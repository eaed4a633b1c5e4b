"""What a step tells about itself, and what it refuses to go on with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.config import Config
from fzero.distributed.collectives import all_reduce
from fzero.errors import FzeroError
from fzero.optim.base import Optimizer
from fzero.state.plan import Plan
from fzero.step.update import Updated
from fzero.tree import PyTree


def metrics_of(
    updated: Updated, loss: Tensor, scale: Tensor | None, cfg: Config, lr: Tensor | None
) -> dict[str, Any]:
    """What a step tells: 0-d tensors, which nobody waits for until they are read.

    Args:
        updated: what the update returned.
        loss: the mean over all ranks and micro-batches; NaN where none is known.
        scale: the loss scale that the gradients came with; None without one.
        cfg: says whether a step whose gradients are not finite is skipped.
        lr: the learning rate of the update, if one is known.
    """
    skips = cfg.nonfinite_policy == "skip"
    known = {} if lr is None else {"lr": lr}
    return {
        "loss": loss,
        "grad_norm": updated.grad_norm,
        "nonfinite": updated.nonfinite,
        "skipped": updated.nonfinite if skips else torch.zeros_like(updated.nonfinite),
        "loss_scale": torch.ones_like(updated.loss) if scale is None else scale,
        **known,
    }


def rate_of(opt: Optimizer, inner: PyTree) -> Tensor | None:
    """The learning rate of the next update; None where there is none to tell, or several.

    Args:
        opt: the optimizer.
        inner: its state before the update.
    """
    rates = opt.rates(inner)
    if not rates or any(rate is not rates[0] for rate in rates):  # to compare them would wait
        return None
    if not isinstance(rates[0], Tensor):
        return torch.tensor(rates[0], dtype=torch.float32, device="cpu")
    return rates[0].to(torch.float32, copy=True)


def refuse_nonfinite(loss: Tensor, grads: Sequence[Tensor], plan: Plan, step: int) -> None:
    """Raise on every rank if any rank's loss or gradient is NaN or infinite. Reads it: it waits."""
    bad = [
        leaf.name
        for grad, leaf in zip(grads, plan.trained, strict=True)
        if not bool(torch.isfinite(grad).all())
    ]
    bad += [] if bool(torch.isfinite(loss)) else ["the loss"]
    # none may raise alone: the others would wait for it in the update
    found = torch.tensor(float(len(bad)), device=loss.device)
    for axis in plan.axes:
        found = all_reduce(found, axis, "nonfinite")
    if found.item():
        where = f"in {', '.join(bad[:3])} on rank {plan.mesh.rank}" if bad else "on another rank"
        raise FzeroError(
            f"step {step}: NaN or infinity {where}. Parameters and optimizer state are as before "
            "the call. Lower the learning rate, set Config(clip_norm=...), or choose "
            "on_nonfinite='skip' or 'report'."
        )
