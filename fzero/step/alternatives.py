"""What would fit where a step does not: other accumulation, a higher stage; staged out to see."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fzero import tree
from fzero.config import Config
from fzero.errors import FzeroError
from fzero.numerics.casts import widened
from fzero.optim.whole import whole_leaves
from fzero.program.fitting import LEAST
from fzero.state.opt_state import LocalState
from fzero.state.plan import Plan
from fzero.state.sharding import locals_of, plan_sharding
from fzero.transforms.frames import Frame

Step = tuple[Plan, Sequence[Tensor], LocalState, Sequence[Tensor]]
# (plan, leaves, local state, micro-batch, rung) -> bytes that the step holds then
Peak = Callable[[Plan, Sequence[Tensor], LocalState, Sequence[Tensor], int], int]


def alternatives(
    peak: Peak,
    plan: Plan,
    leaves: Sequence[Tensor],
    local: LocalState,
    batch: Sequence[Tensor],
    frame: Frame,
) -> str:
    """What would keep a step under its limit, as a sentence; nothing runs and no rank is asked.

    Args:
        peak: stages a step out for tensors like these.
        plan, leaves, local, batch, frame: of the step that does not fit.
    """
    limit = plan.cfg.limit
    assert limit is not None
    fits, least = [], []
    for what, args in _others(plan, leaves, local, batch):
        try:
            nbytes = peak(*args, LEAST)
        except FzeroError:  # this way can't be gone at all
            continue
        (fits if nbytes <= limit else least).append(f"{what} ({nbytes} bytes)")
    if fits:
        return f"What would fit: {', '.join(fits)}."
    tried = f" (tried: {', '.join(least)})" if least else ""
    return (
        f"No higher stage and no more accumulation fits either{tried}. Use more ranks, smaller "
        "rows, a lower precision or an optimizer with less state."
    )


def _others(
    plan: Plan, leaves: Sequence[Tensor], local: LocalState, batch: Sequence[Tensor]
) -> Iterator[tuple[str, Step]]:
    cfg = plan.cfg
    rows = {len(x) for x in batch if x.dim()}
    for more in (2, 4, 8):
        if rows and all(n % more == 0 for n in rows):
            less = [x[: len(x) // more] if x.dim() else x for x in batch]
            steps = cfg.accum_steps * more
            changed = replace(plan, cfg=cfg.replace(accum_steps=steps))
            yield f"accum_steps={steps}", (changed, leaves, local, less)
    if plan.axes.world > 1:
        for stage in range(cfg.stage + 1, 4):
            other = _at_stage(plan, local, leaves, cfg.replace(stage=stage))
            yield f"stage={stage}", (*other, batch)


def _at_stage(
    plan: Plan, local: LocalState, leaves: Sequence[Tensor], cfg: Config
) -> tuple[Plan, list[Tensor], LocalState]:
    """The same step at another stage, on tensors that have no memory."""
    layout = plan.sharding.layout
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        full = [
            torch.empty(leaf.shape, dtype=x.dtype, device=x.device)
            for leaf, x in zip(layout, leaves, strict=True)
        ]
        meta = [x.to("meta") for x in full]
        low = tree.unflatten(plan.sharding.spec, meta)
        sharding = plan_sharding(low, cfg, plan.mesh, sharded=cfg.stage == 3)
        other = Plan(cfg, plan.opt, plan.mesh, sharding)
        shards = [sharding.split_one(i, x) for i, x in enumerate(full)]
        trained, _ = sharding.layout.divide(shards)
        masters = [
            other.part(x, leaf).to(master.dtype)
            for x, leaf, master in zip(
                layout.divide(full)[0], other.trained, local.masters, strict=False
            )
        ]
        targets = masters or other.targets(trained)
        if cfg.dtypes.state == torch.float32:
            targets = [widened(x) for x in targets]
        with whole_leaves(other.whole):
            inner = other.opt.init(other.trained_tree(targets))
    flat, spec = tree.flatten(inner)
    return other, shards, local._replace(masters=masters, inner=locals_of(flat), inner_spec=spec)
