"""What would fit where a step does not: other accumulation, a higher stage, more ranks.

All are staged out to see, the ranks that aren't there as `simulate` does it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fzero import tree
from fzero.config import Config
from fzero.distributed.made_up_ranks import made_up_ranks
from fzero.distributed.mesh import Mesh, resolve_mesh
from fzero.errors import FzeroError
from fzero.numerics.casts import widened
from fzero.optim.whole import whole_leaves
from fzero.program.fitting import RESERVE
from fzero.state.opt_state import LocalState
from fzero.state.plan import Plan
from fzero.state.sharding import locals_of, plan_sharding

Step = tuple[Plan, Sequence[Tensor], LocalState, Sequence[Tensor]]
# (plan, leaves, local state, micro-batch) -> bytes that the step holds then: under the limit, or
# the least that it can
Peak = Callable[[Plan, Sequence[Tensor], LocalState, Sequence[Tensor]], int]


def alternatives(
    peak: Peak,
    plan: Plan,
    leaves: Sequence[Tensor],
    local: LocalState,
    batch: Sequence[Tensor],
) -> str:
    """What would keep a step under its limit, as a sentence; nothing runs and no rank is asked.

    Args:
        peak: stages a step out for tensors like these.
        plan, leaves, local, batch: of the step that does not fit.
    """
    assert plan.cfg.limit is not None
    limit = plan.cfg.limit - RESERVE
    fits, least = [], []
    for what, args in _others(plan, leaves, local, batch):
        try:
            nbytes = peak(*args)
        except FzeroError:  # this way can't be gone at all
            continue
        (fits if nbytes <= limit else least).append(f"{what} ({nbytes} bytes)")
    with contextlib.suppress(FzeroError):
        ranks, nbytes = _more_ranks(peak, plan, leaves, local, batch, limit)
        what = f"{ranks} ranks" if plan.cfg.stage else f"stage=3 on {ranks} ranks"
        (fits if nbytes <= limit else least).append(f"{what} ({nbytes} bytes)")
    if fits:
        return f"What would fit: {', '.join(fits)}."
    tried = f" (tried: {', '.join(least)})" if least else ""
    return (
        f"No higher stage, no more accumulation and no larger world fits either{tried}. Use "
        "smaller rows, a lower precision or an optimizer with less state."
    )


def _more_ranks(
    peak: Peak,
    plan: Plan,
    leaves: Sequence[Tensor],
    local: LocalState,
    batch: Sequence[Tensor],
    limit: int,
) -> tuple[int, int]:
    """The fewest ranks that fit, each with a batch like this one, and the bytes that each holds.

    What is sharded shrinks with the ranks, and the rest stays: two worlds tell both, and with them
    the one to look at. If nothing fits, the most ranks that were looked at.
    """

    def at(times: int) -> int:
        with made_up_ranks(*_shape(plan.mesh, times)) as device_mesh:
            mesh = resolve_mesh(device_mesh, "cpu")
            cfg = plan.cfg.replace(stage=plan.cfg.stage or 3)
            return peak(*_on(plan, local, leaves, cfg, mesh), batch)

    once, twice = at(2), at(4)
    if once <= limit:
        return 2 * plan.mesh.world_size, once
    sharded = 4 * max(once - twice, 0)  # on as many ranks as there are now
    times, nbytes = 4, twice
    while nbytes > limit and times < _MOST:
        room = limit - (once - sharded // 2)
        # a power of two that leaves room for its part; no world does if the rest alone is too much
        guess = 2 ** math.ceil(math.log2(sharded / room)) if room > 0 and sharded else _MOST
        times = min(max(guess, 2 * times), _MOST)
        nbytes = at(times)
    while nbytes <= limit and times > 4 and (fewer := at(times // 2)) <= limit:
        times, nbytes = times // 2, fewer
    return times * plan.mesh.world_size, nbytes


_MOST = 1024  # as many times as there are ranks now


def _shape(mesh: Mesh, times: int) -> tuple[int, ...]:
    more = mesh.shard_size * times
    return (mesh.replicate_size, more) if mesh.is_hybrid else (more,)


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
            other = _on(plan, local, leaves, cfg.replace(stage=stage), plan.mesh)
            yield f"stage={stage}", (*other, batch)


def _on(
    plan: Plan, local: LocalState, leaves: Sequence[Tensor], cfg: Config, mesh: Mesh
) -> tuple[Plan, list[Tensor], LocalState]:
    """The same step at another stage or on other ranks, on tensors that have no memory."""
    layout = plan.sharding.layout
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        full = [
            torch.empty(leaf.shape, dtype=x.dtype, device=x.device)
            for leaf, x in zip(layout, leaves, strict=True)
        ]
        meta = [x.to("meta") for x in full]
        low = tree.unflatten(plan.sharding.spec, meta)
        sharding = plan_sharding(low, cfg, mesh, sharded=cfg.stage == 3, opt=plan.opt)
        other = Plan(cfg, plan.opt, mesh, sharding)
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
