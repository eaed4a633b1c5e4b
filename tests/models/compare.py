"""Gradients of a `Case` from a train step, and from `loss.backward()` on the same module."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from tests.models.zoo import CASES, ROWS, Batch, Case

Gradients = dict[str, Tensor]


class Outcome(NamedTuple):
    """What one step computed, and what its Program is (None if it ran eagerly)."""

    loss: Tensor
    gradients: Gradients
    buffers: dict[str, Tensor]
    program: Any = None

    @property
    def front_end(self) -> str:
        """Which front end recorded the Program."""
        lines = [line for line in self.program.log if line.startswith("staged out through ")]
        return lines[0].removeprefix("staged out through ").split(":")[0]


def module_of(case: Case) -> nn.Module:
    """The case's module, the same on every rank and in every call."""
    torch.manual_seed(0)
    return case.build()


def batch_of(case: Case, world: int = 1, rank: int = 0) -> Batch:
    """This rank's rows of the global batch."""
    whole = case.batch(world * ROWS, torch.Generator().manual_seed(1))
    return {name: x[rank * ROWS : (rank + 1) * ROWS] for name, x in whole.items()}


def plain(case: Case, batch: Batch) -> Outcome:
    """`loss.backward()`, and nothing of ours."""
    module = module_of(case)
    loss = case.loss(module, batch)
    loss.backward()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return Outcome(loss.detach(), grads, dict(module.named_buffers()))


def plain_on(case: Case, world: int) -> Outcome:
    """`loss.backward()` on all ranks' rows: in one batch, or as DDP has it if rows mix."""
    if not case.mixes_rows:
        whole = case.batch(world * ROWS, torch.Generator().manual_seed(1))
        return plain(case, whole)
    parts = [plain(case, batch_of(case, world, rank)) for rank in range(world)]
    means = {
        name: torch.stack([part.gradients[name] for part in parts]).mean(0)
        for name in parts[0].gradients
    }
    return Outcome(torch.stack([part.loss for part in parts]).mean(), means, parts[0].buffers)


def stepped(case: Case, batch: Batch, *, lower: bool = True, **config: Any) -> Outcome:
    """A train step. Its gradients are read from the momentum that a first step leaves behind."""
    apply, params, buffers = fzero.functionalize(module_of(case), buffers=True)

    def model_fn(params: Any, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal state
            out, state = apply(params, state, *args, **kwargs)
            return out

        return case.loss(call, batch), state

    cfg = fzero.Config(frozen=case.frozen, **config)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.0, momentum=0.9), cfg)
    params, opt_state = step_fn.init(params, buffers)
    program = step_fn.lower(params, opt_state, batch) if lower else None
    params, opt_state = step_fn(params, opt_state, batch)
    traces = fzero.unshard(opt_state.inner.trace)
    grads = {name: x for name, x in traces.items() if x is not None}
    return Outcome(opt_state.metrics["loss"], grads, opt_state.model_state, program)


def error(ours: Outcome, theirs: Outcome) -> float:
    """Largest difference between two sets of gradients; 0.0 means the same bits (of numbers).

    What `ours` has and `theirs` lacks was not used by the loss, and must be zero.
    """
    return max(
        float((grad - theirs.gradients.get(name, torch.zeros_like(grad))).abs().max())
        for name, grad in ours.gradients.items()
    )


def scale(outcome: Outcome) -> float:
    """The largest gradient."""
    return max(float(grad.abs().max()) for grad in outcome.gradients.values())


def errors_on_ranks(names: list[str], stage: int, executor: str = "traced") -> dict[str, float]:
    """On every rank of a world: each case's error, relative to its largest gradient."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for case in CASES:
        if case.name in names:
            batch, theirs = batch_of(case, world, rank), plain_on(case, world)
            ours = stepped(case, batch, lower=False, stage=stage, executor=executor)
            found[case.name] = error(ours, theirs) / scale(theirs)
    return found
