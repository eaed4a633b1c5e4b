"""What an engine keeps from step to step, and how it updates it: the functional path's own half."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from fzero import tree
from fzero.engine.buffers import Buffers
from fzero.engine.frozen import Subset, subset
from fzero.errors import ConfigError, FzeroError, ShardError
from fzero.inference import makes_normal
from fzero.layout import LeafLayout
from fzero.numerics.loss_scale import LossScaleState, Watch, at_minimum, exhausted
from fzero.optim import check
from fzero.optim.compose import MultiState
from fzero.optim.counts import has_counts, own_counts
from fzero.optim.inject import MOMENTA, InjectState
from fzero.state.follow import follow_
from fzero.state.opt_state import (
    LocalState,
    OptState,
    is_spent,
    refuse_interrupted,
    refuse_spent,
    spend,
)
from fzero.state.plan import Plan
from fzero.state.sharding import like, locals_of
from fzero.step.alike import late
from fzero.step.metrics import metrics_of, rate_of, refuse_nonfinite
from fzero.step.update_program import UpdateProgram
from fzero.tree import PyTree


class Stepper:
    """Parameters and optimizer state of an engine.

    Args:
        plan: of the step.
        params: as users hold them; their local tensors are what is trained.
        opt_state: before the first step.
        buffers: the model state.
        reduced: whether gradients come summed over ranks.
    """

    def __init__(
        self,
        plan: Plan,
        params: PyTree,
        opt_state: OptState,
        buffers: Buffers,
        *,
        reduced: bool,
    ) -> None:
        self.plan, self.params, self.opt_state = plan, params, opt_state
        self.locals: list[Tensor] = locals_of(tree.leaves(params))
        self.buffers, self.reduced = buffers, reduced
        double = any(leaf.dtype == torch.float64 for leaf in plan.sharding.layout)
        self.loss_dtype = torch.float64 if double else torch.float32
        # by what they train: the updates that there were; the last is the one of now
        self._subsets: dict[tuple[LeafLayout, ...], Subset] = {}
        self.train(tuple(plan.sharding.layout))
        self.watch = Watch()

    @makes_normal
    def train(self, leaves: tuple[LeafLayout, ...]) -> None:
        """From now on update what is trainable of these; see [Note: frozen between steps]."""
        if leaves != tuple(self.plan.sharding.layout):
            self._count_leaves()  # from now on some have had fewer updates than others
        found = self._subsets.pop(leaves, None)
        if found is None:
            found = subset(self.plan, leaves, self.opt_state, self.locals)
        while len(self._subsets) >= _MAX_SUBSETS:
            del self._subsets[next(iter(self._subsets))]
        self._subsets[leaves] = self._now = found
        self._leaves = leaves

    def _count_leaves(self) -> None:
        """Keep a count of updates for each leaf, where the optimizer corrects by one."""
        inner = own_counts(self.opt_state.inner)
        if tree.flatten(inner)[1] != tree.flatten(self.opt_state.inner)[1]:
            self.opt_state = self.opt_state._replace(inner=inner)
            self._subsets.clear()  # made for a state without

    @makes_normal
    def update(self, grads: list[Tensor], losses: Sequence[Tensor], sums: int = 0) -> None:
        """One step.

        Args:
            grads: of what is trained now, scaled to sum to the mean, or summed already.
            losses: of this rank's micro-batches, as far as they are known.
            sums: which reductions are in `grads`, the same on every rank.

        Raises:
            FzeroError: with `on_nonfinite="raise"`, a gradient is not finite and nothing was
                changed; or a dynamic loss scale is exhausted.
        """
        now, state = self._now, self.opt_state
        plan, cfg = now.plan, now.plan.cfg
        self.watch.look()
        local = LocalState.of(state._replace(model_state=None), dtensors=plan.opt.foreign)
        local = now.local(local)
        scale = LossScaleState(*local.scale) if local.scale else None
        known = [loss.to(self.loss_dtype) for loss in losses]
        device = plan.mesh.device_type
        if known:
            loss = torch.stack(known).mean()
        else:
            loss = torch.zeros((), dtype=self.loss_dtype, device=device)
        # the update sums it over ranks, and the sum is to be the mean
        loss = loss.to(device) / plan.axes.world
        if scale is not None and cfg.scaling is not None and cfg.scaling.external:
            loss = loss * scale.scale  # which the update takes off again
        if cfg.nonfinite_policy == "raise":
            refuse_nonfinite(loss, grads, plan, int(state.step))
        trained, _ = plan.sharding.layout.divide(self.locals)
        if now.half is None:
            # a sum is nobody else's; where an error is to leave gradients as they are, none is ours
            over = self.reduced or cfg.accum_steps > 1
            over = over and cfg.nonfinite_policy != "raise"
            now.half = UpdateProgram(plan, reduced=self.reduced, over=over)
        size = int(cfg.bucket_mb * 2**20)
        told = torch.tensor(sums, device="cpu") if plan.axes.world > 1 else None
        lr = rate_of(plan.opt, state.inner)  # before the update writes over the state
        updated = now.half.in_buckets(size, trained, local, grads, loss, [], told)
        self.buffers.agree()
        # the update wants some loss; of one that nobody named nothing can be told
        loss = updated.loss if losses else torch.full_like(updated.loss, torch.nan)
        metrics = metrics_of(updated, loss, None if scale is None else scale.scale, cfg, lr)
        # not read: no host waits to learn whether the step was skipped
        advance = 1 if scale is None else ~updated.nonfinite
        inner = state.inner
        if updated.inner is not None:
            old = now.local(LocalState.of(state, dtensors=True)).inner
            inner = now.put(inner, list(map(like, updated.inner, old)))
        # in one assignment: up to it the state of before is one that an update has in hand
        self.opt_state = state._replace(
            step=state.step + advance, inner=inner, loss_scale=updated.loss_scale, metrics=metrics
        )
        spend(state)  # who holds it would take back what is no longer there
        if scale is not None and cfg.scaling is not None:
            self.watch.add(exhausted(scale, ~updated.nonfinite, cfg.scaling), at_minimum)
        if updated.differs is not None:
            self.watch.add(updated.differs, late)

    def follow(self) -> None:
        """Let the masters start from what was written into the parameters."""
        trained, _ = self.plan.sharding.layout.divide(self.locals)
        follow_(locals_of(tree.leaves(self.opt_state.master)), self.plan.parts(trained))

    def rate(self) -> float | dict[str, float]:
        """The learning rate of the next update; by label of `multi_transform` if they differ.

        Raises:
            FzeroError: the optimizer tells none, or several that have no labels.
        """
        rates = self._rates(self.opt_state.inner)
        if len(rates) == 1:
            return rates[0]
        by_label = {
            label: self._rates(MultiState({label: x})) for label, x in self._parts().items()
        }
        if by_label and all(len(found) == 1 for found in by_label.values()):
            return {label: found[0] for label, found in by_label.items()}
        found = f"{len(rates)} learning rates: {rates}" if rates else "no learning rate to tell"
        raise FzeroError(
            f"engine.lr: the optimizer has {found}. One is known of fzero.optim's optimizers "
            "that take lr, and of chains with one of them; compute others from your schedule "
            "and engine.global_steps."
        )

    def _rates(self, inner: PyTree) -> list[float]:
        # its step is what the update will see; of whole leaves there is no need
        return sorted({float(rate) for rate in self.plan.opt.rates(inner)})

    def _parts(self) -> Mapping[str, PyTree]:
        """The states of a `multi_transform`'s optimizers by label; none of another optimizer."""
        state = self.opt_state.inner
        return state.inner if isinstance(state, MultiState) else {}

    def set_rate(
        self,
        lr: float | Tensor | Mapping[str, float | Tensor],
        what: str = "engine.lr",
        by: str = "",
    ) -> None:
        """Write the learning rate of the next updates; of several, by label of `multi_transform`.

        Args:
            lr: the rate, or rates.
            what: its user has assigned.
            by: who may have done that, if not the user's own line.

        Raises:
            FzeroError: the optimizer has none in its state, or a schedule gives it; or rates
                differ, and one number is to be that of all.
            ConfigError: it is no number >= 0.
        """
        if isinstance(lr, Mapping):
            self._set_rates(lr)
            return
        value = _number(what, lr)
        rates = list(_injected(self.opt_state.inner, ("lr",)))
        if rates and len(now := self._rates(self.opt_state.inner)) > 1:
            raise FzeroError(
                f"{what} was assigned {value}{by}, and the optimizer has the rates {now}, which "
                "would all be that. Set those that change by label, engine.lr = {label: "
                "rate}; all alike, engine.lr = dict.fromkeys(engine.lr, rate). A scheduler of "
                "torch's drives one rate: use schedules of fzero.optim, one for each label."
            )
        # one that is the optimizer's own may be set to what it is
        if self._written([(self.opt_state.inner, value)]):
            return
        now = self._rates(self.opt_state.inner)
        maker = check.maker_of(self.plan.opt)
        number, more = "3e-4", ""
        if rates or self._is_scheduled():
            why = "the optimizer's rate is given by its schedule, which each update asks again"
            way = "with a number in place of it"
        else:
            number = f"{now[0]:g}" if now else number
            why = f"the optimizer's rate is fixed{f' at {number}' if now else ''}, in its update"
            way = "with a rate that can be set"
            if maker:
                more = f" Or pass fzero.optim.{maker} a schedule of fzero.optim."
        raise FzeroError(
            f"{what} was assigned {value:g}{by}, and {why}. To set rates between steps make it "
            f"{way}, fzero.optim.inject_hyperparams(fzero.optim.{maker or 'adamw'})(lr={number})"
            f"{'' if maker else ' for example'}: then it is a tensor of the state.{more}"
        )

    def _is_scheduled(self) -> bool:
        """Whether rates are computed anew each time; a number, or a tensor, is there once."""
        twice = [self.plan.opt.rates(self.opt_state.inner) for _ in range(2)]
        return any(isinstance(x, Tensor) and x is not y for x, y in zip(*twice, strict=True))

    def _set_rates(self, rates: Mapping[str, float | Tensor]) -> None:
        found = {label: list(_injected(part, ("lr",))) for label, part in self._parts().items()}
        if not rates:
            raise ConfigError("engine.lr = {}: it names no label, so no rate would change.")
        for label, lr in rates.items():
            _number(f"engine.lr[{label!r}]", lr)
            if not found.get(label):
                known = ", ".join(repr(label) for label, tensors in found.items() if tensors)
                raise FzeroError(
                    f"engine.lr was assigned for {label!r}, and the optimizer keeps rates for "
                    f"{known or 'no label'}. They are the labels of fzero.optim.multi_transform, "
                    "whose transforms are made by fzero.optim.inject_hyperparams."
                )
        parts = self._parts()
        if not self._written([(MultiState({x: parts[x]}), float(lr)) for x, lr in rates.items()]):
            raise FzeroError(
                f"engine.lr was assigned for {', '.join(map(repr, rates))}, and the rate of one of "
                "them is given by a schedule, which counts. Make that transform with a number: "
                "fzero.optim.inject_hyperparams(fzero.optim.adamw)(lr=3e-4)."
            )

    def _written(self, values: Sequence[tuple[PyTree, float]]) -> bool:
        """Write rates into parts of the state; if one is still another, all are as before."""
        pairs = [(x, value) for part, value in values for x in _injected(part, ("lr",))]
        before = [float(x) for x, _ in pairs]
        for x, value in pairs:
            x.fill_(value)
        found = [(self._rates(part), value) for part, value in values]
        if all(len(now) == 1 and math.isclose(now[0], x, rel_tol=1e-6) for now, x in found):
            return True
        for (x, _), old in zip(pairs, before, strict=True):
            x.fill_(old)
        return False

    def momentum(self) -> float | None:
        """The momentum that the optimizer's state keeps; None if there is none, or several."""
        found = {float(x) for x in _injected(self.opt_state.inner, MOMENTA)}
        return found.pop() if len(found) == 1 else None

    def set_momentum(self, momentum: float | Tensor) -> None:
        """Write the momentum of the next updates.

        Raises:
            FzeroError: the optimizer has none in its state.
            ConfigError: it is no number >= 0.
        """
        value = _number("engine.momentum", momentum)
        found = list(_injected(self.opt_state.inner, MOMENTA))
        if not found:
            raise FzeroError(
                "engine.momentum was assigned, and the optimizer's is a number of its own. Make it "
                "with fzero.optim.inject_hyperparams(fzero.optim.sgd, momentum=True)(lr=0.1, "
                "momentum=0.9): then it is a tensor of the state, and is read in each update."
            )
        for x in found:
            x.fill_(value)

    def masters(self) -> dict[int, Tensor]:
        """This rank's masters, as the next update will find them, by index; or none."""
        if self.opt_state.master is None:
            return {}
        self.follow()
        trained = [i for i, leaf in enumerate(self.plan.sharding.layout) if leaf.trainable]
        return dict(zip(trained, locals_of(tree.leaves(self.opt_state.master)), strict=True))

    @torch.no_grad()
    def load(self, values: Mapping[int, Tensor]) -> None:
        """Copy full values into parameters, by index, and all their digits into masters."""
        sharding, masters = self.plan.sharding, self.masters()
        for index, value in values.items():
            leaf, own = sharding.layout.leaves[index], self.locals[index]
            value = value.detach()
            sharded = sharding.dtensors[index] is not None
            own.copy_(leaf.split(value, self.plan.mesh.shard_rank) if sharded else value)
            if index in masters:
                masters[index].copy_(self.plan.part(value, leaf))

    def replace(self, index: int, value: Tensor) -> None:
        """Train another tensor in the place of this one."""
        leaves, spec = tree.flatten(self.params)
        leaves[index] = like(value, leaves[index])
        self.params, self.locals = tree.unflatten(spec, leaves), locals_of(leaves)

    def read(self) -> tuple[PyTree, OptState]:
        """`(params, opt_state)`, the tensors themselves."""
        if self.opt_state.master is not None:
            self.follow()
        return self.params, self.opt_state._replace(model_state=self.buffers.read() or None)

    def refuse_donated(self, what: str) -> None:
        """Raise if a step function has trained this state, and what it returned is not assigned;
        or if an update of it did not come to its end.

        Raises:
            ShardError: it has, or did not.
        """
        refuse_interrupted(self.opt_state)
        if is_spent(self.opt_state):
            raise ShardError(
                f"{what}, and engine.state was passed to a step function, which has written the "
                "next step over it (Config(donate=True)). Assign what it returned, engine.state = "
                "step_fn(*engine.state, batch); or let it leave its inputs alone, "
                "Config(donate=False)."
            )

    def refuse_interrupted(self) -> None:
        """Raise if an update did not come to its end: see [Note: what is written over].

        Raises:
            ShardError: it did not.
        """
        refuse_interrupted(self.opt_state)

    @makes_normal
    def write(self, params: PyTree, opt_state: OptState) -> None:
        """Copy these values into the tensors that are there.

        A model state of None says nothing of the buffers, and they stay: it is that of a step
        function whose model function takes none, and so can't have changed them.

        Raises:
            ShardError: they don't fit.
        """
        plan, own = self.plan, self.opt_state
        leaves, spec = tree.flatten(params)
        plan.check(leaves, spec)
        if not isinstance(opt_state, OptState):
            raise ShardError(
                f"engine.state: opt_state is a {type(opt_state).__name__}; assign what step_fn, "
                "step_fn.init or another engine's state returned."
            )
        refuse_spent(opt_state)
        if has_counts(opt_state.inner) and not has_counts(own.inner):
            self._count_leaves()
            self.train(self._leaves)
            own = self.opt_state
        if has_counts(own.inner):  # those of a state without are all its step
            opt_state = opt_state._replace(inner=own_counts(opt_state.inner))
        pairs = list(zip(self.locals, locals_of(leaves), strict=True))
        for what, mine, theirs in (
            ("inner", own.inner, opt_state.inner),
            ("master", own.master, opt_state.master),
            ("loss_scale", own.loss_scale, opt_state.loss_scale),
        ):
            pairs += _pairs(what, mine, theirs)
        if opt_state.model_state is not None:
            self.buffers.check(opt_state.model_state)
        with torch.no_grad():
            for mine, theirs in pairs:
                if isinstance(mine, Tensor):
                    mine.copy_(theirs)
        # numbers in the state of an optimizer from elsewhere can only be replaced
        inner = tree.map(
            lambda mine, theirs: mine if isinstance(mine, Tensor) else theirs,
            own.inner,
            opt_state.inner,
        )
        self.buffers.write(opt_state.model_state or {})
        step, metrics = opt_state.step.clone(), dict(opt_state.metrics)
        if all(x is y for x, y in pairs):  # one state under two names: who trains it, spends both
            step, inner, metrics = opt_state.step, opt_state.inner, opt_state.metrics
        else:
            spend(self.opt_state)
        self.opt_state = own._replace(step=step, inner=inner, metrics=metrics)


# As many of them as a schedule of freezing may go through, and come back to.
_MAX_SUBSETS = 8


def _pairs(what: str, mine: PyTree, theirs: PyTree) -> list[tuple[Any, Any]]:
    """Leaves of two trees that must be alike."""
    (own, spec), (new, other) = tree.flatten(mine), tree.flatten(theirs)
    shapes = [
        [tuple(x.shape) if isinstance(x, Tensor) else None for x in leaves] for leaves in (own, new)
    ]
    if spec != other or shapes[0] != shapes[1]:
        raise ShardError(
            f"engine.state: opt_state.{what} does not fit this engine: it is {_shown(other, new)}, "
            f"and must be {_shown(spec, own)}. Assign a state of the same optimizer and config."
        )
    return list(zip(locals_of(own), locals_of(new), strict=True))


def _shown(spec: tree.Spec, leaves: Sequence[Any]) -> str:
    text = str(spec)
    return f"{len(leaves)} leaves in {text if len(text) < 200 else text[:200] + '...'}"


def _number(what: str, lr: Any) -> float:
    """A learning rate as a number.

    Raises:
        ConfigError: it is none, or not finite and >= 0.
    """
    value = math.nan
    one = isinstance(lr, Tensor) and lr.numel() == 1 and not lr.is_complex()
    if one or (isinstance(lr, SupportsFloat) and not isinstance(lr, Tensor | bool)):
        value = float(lr)
    if not 0 <= value < math.inf:
        raise ConfigError(f"{what} = {lr!r}; it must be a finite number >= 0.")
    return value


def _injected(state: PyTree, names: Sequence[str]) -> Iterator[Tensor]:
    """What `inject_hyperparams` keeps in a state under one of these names."""
    if isinstance(state, InjectState) and any(name in state.hyperparams for name in names):
        yield from (state.hyperparams[name] for name in names if name in state.hyperparams)
    elif isinstance(state, (tuple, list)):
        for part in state:
            yield from _injected(part, names)
    elif isinstance(state, dict):
        for part in state.values():
            yield from _injected(part, names)
