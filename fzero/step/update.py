"""What a step does once the gradients are there, in place: norm, clip, update, and gather.

grads ─▶ reduce (if not yet) ─▶ float32 ─▶ unscale ─▶ norm, finite? ─▶ clip ─▶
    optimizer on shards (where the masters live) ─▶ params again
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.distributed.collectives import all_gather, all_reduce
from fzero.distributed.dtensor import local_tensor
from fzero.distributed.mesh import is_simulated
from fzero.layout import LeafLayout
from fzero.numerics import loss_scale as scales
from fzero.numerics.casts import widened
from fzero.numerics.loss_scale import LossScaleState
from fzero.numerics.norms import sum_of_squares
from fzero.numerics.rounding import random_bits, stochastically
from fzero.optim import tree_norm
from fzero.optim.base import Optimizer
from fzero.optim.inject import injected
from fzero.optim.whole import whole_leaves
from fzero.state import model_state as states
from fzero.state.plan import Plan
from fzero.step.alike import differ, digest, numbers_of, with_square
from fzero.tree import PyTree
from fzero.zero import all_sum, scatter


class Updated(NamedTuple):
    """What an update returns beside what it overwrites.

    Args:
        loss: 0-d, the mean over ranks and micro-batches.
        grad_norm: 0-d, the norm of the mean gradient, unscaled and before clipping.
        nonfinite: 0-d bool: a gradient or the loss was NaN or infinite.
        model_state: leaves, the same on every rank: see [Note: one model state]. Those from before,
            where the step is skipped.
        loss_scale: for the next step, or None.
        inner: leaves of the optimizer's new state, if not all of them were overwritten: numbers
            can only be replaced.
        differs: 0-d bool: ranks have other numbers to go by; None: there is one rank.
    """

    loss: Tensor
    grad_norm: Tensor
    nonfinite: Tensor
    model_state: tuple[Tensor, ...]
    loss_scale: LossScaleState | None
    inner: tuple[Any, ...] | None = None
    differs: Tensor | None = None


def update_of(plan: Plan, *, reduced: bool, over: bool = False) -> Callable[..., dict[str, Any]]:
    """The update of a plan, for `jit`: a function of trees that writes into its first three.

    With an optimizer that knows nothing of shards, and is not recorded, it is called as it is.

    Args:
        plan: of the step.
        reduced: whether the gradients come summed over the ranks already.
        over: whether it may write into gradients, too: nobody else sees their memory.
    """
    opt, cfg, shards = plan.opt, plan.cfg, Shards(plan)  # `opt` by itself: what it reads is noted

    @torch.no_grad()
    def update(
        params: Sequence[Tensor],
        master: Sequence[Tensor],
        inner: PyTree,
        grad: Sequence[Tensor],
        loss: Tensor,
        model_state: Sequence[Tensor],
        loss_scale: LossScaleState | None,
        model_state_before: Sequence[Tensor],
        step: Tensor | None,
        sums: Tensor | None = None,
    ) -> dict[str, Any]:
        """Overwrite `params`, `master` and `inner`; the rest of `Updated` is returned.

        Args:
            params: the trained leaves as they live between steps: shards at stage 3, else full.
            master: what the optimizer updates instead, if the config keeps any.
            inner: the optimizer's state.
            grad: the sum over this rank's micro-batches, each scaled to make the mean of all; or
                that sum over all ranks, if `reduced`.
            loss: 0-d, this rank's share of the mean.
            model_state: leaves, as the last micro-batch left them.
            loss_scale: the scale that is on the gradients, or None.
            model_state_before: before the step, for a config that may skip one.
            step: 0-d int64, where there are other ranks, or a config that rounds stochastically.
            sums: see `numbers_of`.
        """
        summed = grad if reduced else shards.summed(grad)
        grads = [widened(x) for x in summed]  # float16 has no room below the scale
        # what ranks have summed is new
        own = over or (not reduced and plan.axes.world > 1)
        own_scale = None
        if loss_scale is not None:
            assert cfg.scaling is not None
            by = loss_scale.scale.to(_widest(grads)).reciprocal()
            grads, own = _times(grads, by, over=own), True
            if cfg.scaling.external:
                own_scale = loss_scale.scale
                loss = loss / own_scale
        numbers = []
        if shards.compares:
            assert step is not None
            numbers = [x for _, x in numbers_of(plan, inner, own_scale, step, sums)]
        by_hand = own_scale is not None or bool([*injected(inner)])
        loss, exact, differs = shards.statistics(loss, grads, numbers, refuse=by_hand)
        norm = exact.to(_widest(grads))
        # one bad element makes the norm bad: gradients need no pass of their own
        nonfinite = ~(torch.isfinite(norm) & torch.isfinite(loss))
        if cfg.clip_norm is not None:
            # the same small term as in torch.nn.utils.clip_grad_norm_
            factor = (cfg.clip_norm / (exact + 1e-6)).clamp(max=1.0)
            # rounded once, as ZeRO-3's
            grads = _times(grads, factor.to(norm.dtype), over=own)
        targets = master or shards.parts(params)
        # masters may be in host memory, and are updated there
        grads = [g.to(x.device) for g, x in zip(grads, targets, strict=True)]
        skip = nonfinite if cfg.nonfinite_policy == "skip" else None
        replaced = shards.apply(opt, grads, inner, targets, step, skip)
        if master or shards.are_split:
            shards.publish(targets, params)
        joined = [shards.one_for_all_ranks(x, i) for i, x in enumerate(model_state)]
        if skip is not None:
            pairs = zip(joined, model_state_before, strict=True)
            joined = [torch.where(nonfinite, old, new) for new, old in pairs]
        if loss_scale is not None:
            assert cfg.scaling is not None
            loss_scale = scales.update(loss_scale, ~nonfinite, cfg.scaling)
        return {
            "loss": loss,
            "grad_norm": norm,
            "nonfinite": nonfinite,
            "model_state": joined,
            "loss_scale": None if loss_scale is None else tuple(loss_scale),
            "inner": replaced,
            "differs": differs,
        }

    return update


class Shards:
    """What an update does with this rank's parts of all leaves, and with other ranks.

    Args:
        plan: of the step.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.cfg, self.axes = plan, plan.cfg, plan.axes
        self.layout = plan.sharding.layout

    def summed(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients of this rank, summed over all: its parts, or at stage 0 whole ones."""
        reduce = all_sum if self.cfg.stage == 0 else scatter
        return reduce(grads, self.layout, self.axes)

    @property
    def compares(self) -> bool:
        """Whether there is another rank, which must have the same numbers to go by."""
        return self.axes.world > 1

    def statistics(
        self,
        loss: Tensor,
        grads: Sequence[Tensor],
        numbers: Sequence[Tensor] = (),
        *,
        refuse: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Loss over all ranks, the norm of the whole gradient in double, and whether ranks have
        other `numbers`, of those that `compares`: one small all-reduce an axis.

        Args:
            loss, grads: this rank's.
            numbers: see `numbers_of`.
            refuse: see `differ`.
        """
        split = self.cfg.stage > 0
        whole, parts = [], []
        for grad, leaf in zip(grads, self.layout.trained, strict=True):
            (parts if split and leaf.dim is not None else whole).append(grad)
        shares = self._shares(parts, loss.device)
        # in double: a square in float32 overflows from a norm of 2e19 on
        told = [loss.detach().double()]
        own = None
        if numbers:
            own = with_square(digest([local_tensor(x) for x in numbers], loss.device))
            told += own.unbind()
        stats = torch.stack([*told, *shares])
        stats = all_reduce(stats, self.axes.shard, "loss, grad_norm")
        # not the norm's shares: gradients are summed over both axes, so copies of a shard agree
        total = stats[0] if own is None else stats[: len(told)]
        total = all_reduce(total, self.axes.replicate, "loss")
        norm = self._joined(stats, len(told), whole)
        if own is None:
            return total.to(loss.dtype), norm, None
        # of ranks that are made up nothing comes, and a sum is what this one has
        ranks = 1 if is_simulated(self.plan.mesh) else self.axes.world
        return total[0].to(loss.dtype), norm, differ(total[1:], own, ranks, refuse=refuse)

    def _shares(self, parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
        """This rank's share in the norm of split leaves, as numbers that can be summed over ranks.

        A sum of squares is one number. Other norms don't add up so easily, a maximum not at all:
        there each rank tells its own norm, in an element of its own.
        """
        p, axis = self.cfg.norm_type, self.axes.shard
        if p == 2:
            return [sum_of_squares(parts, exact=self._scales, device=device)]
        norm = tree_norm(list(parts), p).double() if parts else _zero(device)
        ends = (axis.rank, axis.size - 1 - axis.rank)
        return torch.nn.functional.pad(norm.view(1).to(device), ends).unbind()

    def _joined(self, stats: Tensor, start: int, whole: Sequence[Tensor]) -> Tensor:
        """The norm of everything, from every rank's share, `stats[start:]`, and the leaves that all
        have.
        """
        p = self.cfg.norm_type
        if p == 2:
            rest = sum_of_squares(whole, exact=self._scales, device=stats.device)
            return (stats[start] + rest).sqrt()
        rest = tree_norm(list(whole), p).double() if whole else _zero(stats.device)
        return tree_norm([stats[start:], rest.to(stats.device)], p)

    @property
    def _scales(self) -> bool:
        """Whether the norm goes into the update, and every digit with it."""
        return self.cfg.clip_norm is not None

    @property
    def are_split(self) -> bool:
        """Whether a rank updates a part of what it has of the parameters: a rank alone has none
        that others update."""
        return self.cfg.stage in (1, 2) and self.axes.shard.size > 1

    def parts(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The parts of `params` that this rank updates; views where the memory allows it."""
        if not self.are_split:
            return list(params)
        rank = self.axes.shard.rank
        leaves = self.layout.trained
        return [leaf.split(p, rank).contiguous() for p, leaf in zip(params, leaves, strict=True)]

    def apply(
        self,
        opt: Optimizer,
        grads: Sequence[Tensor],
        inner: PyTree,
        targets: Sequence[Tensor],
        step: Tensor | None,
        skip: Tensor | None,
    ) -> list[Any] | None:
        """One step of the optimizer; taken back where `skip` is true, which no host has to read.

        Returns:
            Leaves of its state, if some are numbers; what are tensors was overwritten.
        """
        if skip is None:
            return self._applied(opt, grads, inner, targets, step)
        if opt.foreign:  # it runs eagerly and may keep numbers: here the host does
            return None if bool(skip) else self._applied(opt, grads, inner, targets, step)
        overwritten = [*tree.leaves(inner), *targets]
        before = [x.clone() for x in overwritten]
        found = self._applied(opt, grads, inner, targets, step)
        for now, old in zip(overwritten, before, strict=True):
            now.copy_(torch.where(skip.to(now.device), old, now))
        return found

    def _applied(
        self,
        opt: Optimizer,
        grads: Sequence[Tensor],
        inner: PyTree,
        targets: Sequence[Tensor],
        step: Tensor | None,
    ) -> list[Any] | None:
        """In float32 where masters of 16 bits need it."""
        assert opt.apply_ is not None
        leaves, spec = tree.flatten(inner)
        wide, state = list(targets), inner
        if self._widens:
            wide = [widened(x) for x in targets]
            given = [widened(x) if isinstance(x, Tensor) else x for x in leaves]
            state = tree.unflatten(spec, given)
        in_tree = self.plan.foreign_tree if opt.foreign else self.plan.trained_tree
        with whole_leaves(self.plan.whole), self.plan.noise(grads, wide):
            new = opt.apply_(in_tree(grads), state, in_tree(wide), global_norm=self.global_norm)
        after = tree.leaves(new)
        for i, (old, leaf) in enumerate(zip(leaves, after, strict=True)):
            if isinstance(old, Tensor) and leaf is not old:
                local_tensor(old).copy_(local_tensor(leaf))
                after[i] = old
        for old, x, leaf in zip(targets, wide, self.layout.trained, strict=True):
            if x is not old:
                old.copy_(self._rounded(x, old, leaf, step))
        return None if all(isinstance(x, Tensor) for x in leaves) else after

    @property
    def _widens(self) -> bool:
        """Whether masters are too coarse for the optimizer to work on."""
        dtypes = self.cfg.dtypes
        return dtypes.stochastic_rounding or dtypes.state not in (None, dtypes.kept)

    def _rounded(self, x: Tensor, old: Tensor, leaf: LeafLayout, step: Tensor | None) -> Tensor:
        if not self.cfg.dtypes.stochastic_rounding or old.dtype != torch.bfloat16:
            return x
        assert step is not None
        rank = self.axes.shard.rank if self.cfg.stage > 0 and leaf.dim is not None else None
        return stochastically(x, random_bits(self.cfg.seed, step, leaf, x, rank))

    def global_norm(self, values: PyTree) -> Tensor:
        """The norm over whole leaves of a tree that is like the trained shards."""
        leaves = [local_tensor(x) for x in tree.leaves(values)]
        # a masked tree has some of them
        by_path = dict(zip(self.plan.whole.by_path, self.layout, strict=True))
        layout = [by_path[path] for path in tree.paths(values)]
        split = self.cfg.stage > 0
        parts = [
            x for x, leaf in zip(leaves, layout, strict=True) if split and leaf.dim is not None
        ]
        whole = [x for x, leaf in zip(leaves, layout, strict=True) if not split or leaf.dim is None]
        # of masters in host memory, too
        squares = sum_of_squares(parts, exact=True, device=self.plan.mesh.device_type)
        squares = all_reduce(squares, self.axes.shard, "global_norm")
        if leaves:
            squares = squares.to(leaves[0].device)
        total = squares + sum_of_squares(whole, exact=True, device=squares.device)
        return total.sqrt().to(_widest(leaves))

    def publish(self, targets: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        """Write what was updated into the params: full ones on every rank, a bucket at a time."""
        if not params:
            return
        leaves = self.layout.trained
        if any(x.device != p.device for x, p in zip(targets, params, strict=True)):
            # cast first: half the bytes travel
            pairs = zip(targets, params, strict=True)
            targets = [x.to(p.dtype).to(p.device) for x, p in pairs]
        if not self.are_split:
            torch._foreach_copy_(list(params), list(targets))
            return
        # as they are kept, not as they are computed with: autocast keeps float32
        leaves = [replace(leaf, compute=None) for leaf in leaves]
        start = 0
        for stop in _borders(leaves, int(self.cfg.bucket_mb * 2**20)):
            full = [
                all_gather(targets[i].to(params[i].dtype), leaves[i], self.axes.shard)
                for i in range(start, stop)
            ]
            torch._foreach_copy_(list(params[start:stop]), full)
            start = stop

    def one_for_all_ranks(self, x: Tensor, index: int) -> Tensor:
        """See [Note: one model state] in `fzero.state.model_state`."""
        name, axes = f"model_state {index}", self.axes
        if axes.world == 1:
            return x
        first = axes.shard.rank == axes.replicate.rank == 0
        part = states.columns(x, world=axes.world, first=first)
        total = all_reduce(all_reduce(part, axes.shard, name), axes.replicate, name)
        return states.joined(total, x, world=axes.world)


def _times(grads: Sequence[Tensor], factor: Tensor, *, over: bool) -> Sequence[Tensor]:
    if not grads:  # all leaves are frozen, which foreach refuses
        return ()
    if over:
        torch._foreach_mul_(list(grads), factor)
        return grads
    return torch._foreach_mul(list(grads), factor)


def _widest(grads: Sequence[Tensor]) -> torch.dtype:
    """In which to keep a factor on all of them: what is rounded to float32 is no factor of float64.

    Not always double: a factor of another dtype than the gradients costs foreach its fused kernel.
    """
    return torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32


def _borders(leaves: Sequence[LeafLayout], limit: int) -> list[int]:
    """Where to cut `leaves` so that no bucket has more than `limit` bytes, or just one leaf."""
    borders, filled = [], 0
    for i, leaf in enumerate(leaves):
        if filled and filled + leaf.nbytes > limit:
            borders.append(i)
            filled = 0
        filled += leaf.nbytes
    return [*borders, len(leaves)] if leaves else []


def _zero(device: torch.device) -> Tensor:
    """Made there: from the host it would be a copy that waits for the device."""
    return torch.zeros((), dtype=torch.float64, device=device)
