"""What an engine is made of, planned and built before anything is done to its module."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fzero.config import Config
from fzero.distributed.journal import Journal
from fzero.distributed.transport import Transport
from fzero.eager.units import Units
from fzero.engine.backward_state import Rules
from fzero.engine.buffers import Buffers
from fzero.engine.grouping import Grouping, plan_grouping, units_ahead
from fzero.engine.reducer import Reducer
from fzero.engine.stepper import Stepper
from fzero.errors import ConfigError
from fzero.functional.functionalize import parameters
from fzero.optim.base import Optimizer
from fzero.state.builder import Recording
from fzero.state.init import start


class Parts(NamedTuple):
    """What an engine is made of.

    Args:
        journal: what tells ranks that go different ways.
        transport: what runs collectives.
        stepper: parameters, optimizer state and the update.
        grouping: which leaves travel together.
        units: what gathers parameters on use; None if they are always there.
        reducer: what holds and reduces gradients.
        rules: what the state machine goes by.
        registered: indices of the parameters, in the order of the module.
    """

    journal: Journal
    transport: Transport
    stepper: Stepper
    grouping: Grouping
    units: Units | None
    reducer: Reducer
    rules: Rules
    registered: Sequence[int]

    def full_params(self) -> dict[str, Tensor]:
        """`full_values` by name."""
        full = self.full_values("full_params")
        return {self.reducer.leaves[index].name: value for index, value in full.items()}

    def full_value(self, index: int) -> Tensor:
        """A copy of one leaf, full: of its master where there is one; else as `full_values`."""
        return self._whole(index, self._masters("full_param"))

    def full_values(self, what: str = "state_dict") -> dict[int, Tensor]:
        """Copies of what is trained, full, by index: masters where there are such.

        A collective where parameters or masters are sharded.

        Args:
            what: asks, as other ranks are told.
        """
        masters = self._masters(what)
        return {index: self._whole(index, masters) for index in self.registered}

    def _masters(self, what: str) -> dict[int, Tensor]:
        """This rank's masters; told to the other ranks if what follows is a collective."""
        plan, masters = self.stepper.plan, self.stepper.masters()
        if plan.cfg.stage == 3 or (masters and plan.splits_state):
            self.journal.enter(what)
        return masters

    def _whole(self, index: int, masters: Mapping[int, Tensor]) -> Tensor:
        plan = self.stepper.plan
        value = masters.get(index, self.stepper.locals[index]).detach()
        if plan.splits_state if index in masters else plan.cfg.stage == 3:
            device = self.reducer.device  # masters may live on the host
            value = self.transport.whole(value.to(device), self.reducer.leaves[index])
        return value.clone()

    def full_grad(self, index: int) -> Tensor | None:
        """The unscaled gradient of a leaf so far, or None; a collective that changes nothing."""
        self.reducer.refuse_half_done("a gradient was asked for")
        self.journal.enter("full_grad")
        total = self.reducer.full(index, reduces=self.rules.reduces)
        scale = self.stepper.opt_state.loss_scale
        return total if total is None or scale is None else total / scale.scale.to(total.dtype)

    def local_grad(self, index: int) -> Tensor | None:
        """This rank's part of it."""
        full, leaf = self.full_grad(index), self.reducer.leaves[index]
        if full is None or not self.reducer.scatter:
            return full
        return leaf.split(full, self.stepper.plan.mesh.shard_rank).clone()


def build_parts(
    model: nn.Module,
    params: dict[str, nn.Parameter],
    optimizer: Optimizer,
    cfg: Config,
    reduction: str,
    predivide: float | None,
    built: Recording | None = None,
) -> Parts:
    """The parts of an engine; every rank must call it.

    Args:
        model: whose parameters they are.
        params: these, by name.
        optimizer: what `Stepper` updates with.
        cfg: with all that is frozen.
        reduction: "mean" or "sum" over ranks.
        predivide: factor by which gradients are divided before they are added up, or None.
        built: what makes the values, where `params` have none.

    Raises:
        ConfigError: a combination that there isn't.
        RankMismatchError: ranks differ.
    """
    plan, tree_of, opt_state = start(cfg, optimizer, built or parameters(model), inside=True)
    leaves, axes = plan.sharding.layout.leaves, plan.axes
    indices = {leaf.name: index for index, leaf in enumerate(leaves)}
    registered = [indices[name] for name in params]
    journal = Journal(plan.mesh, active=cfg.stage == 3, limit=cfg.timeout)
    transport = Transport(plan.mesh, axes, journal, gathers=plan.cfg.stage == 3)
    # below stage 2 several micro-batches add up unreduced, and the update reduces their sum once
    reduces = axes.world > 1 and (cfg.stage >= 2 or cfg.accum_steps == 1)
    buffers = Buffers(
        model,
        world=axes.world,
        first=axes.shard.rank == axes.replicate.rank == 0,
        total=transport.sum,
        device_type=plan.mesh.device_type,
    )
    stepper = Stepper(plan, tree_of, opt_state, buffers, reduced=reduces)
    device = next(iter(params.values())).device
    # one rank holds every value, but a compute dtype still makes a copy to be freed
    lazy = cfg.stage == 3 and (axes.shard.size > 1 or any(x.compute for x in leaves))
    grouping = plan_grouping(leaves, registered, cfg, lazy=lazy, alone=axes.world == 1)
    units: Units | None = None
    if lazy:
        units = Units(
            leaves,
            grouping.units,
            stepper.locals,
            transport,
            device,
            keep=not cfg.reshard_after_forward,
            prefetch=units_ahead(cfg, axes.shard),
        )
    scaling = cfg.scaling
    rules = Rules(
        grouping.masks if reduces else (),
        reduces,
        cfg.accum_steps,
        # an external scale is on the loss already, put there by whoever computed it
        scaled=scaling is not None and not scaling.external,
    )
    reducer = Reducer(
        leaves,
        grouping.buckets,
        transport,
        scatter=cfg.stage >= 1,
        factors=factors(axes.world, cfg, reduction, predivide),
        device=device,
        accumulates=cfg.accum_steps > 1,
        on_sent=units.drop if units is not None else lambda indices: None,
    )
    return Parts(journal, transport, stepper, grouping, units, reducer, rules, registered)


def factors(
    world: int, cfg: Config, reduction: str, predivide: float | None
) -> tuple[float, float]:
    """Factors on gradients before and after they are added up, which make the mean or the sum."""
    if reduction not in ("mean", "sum"):
        raise ConfigError(
            f"Engine(gradient_reduction={reduction!r}): must be 'mean' or 'sum' (over ranks)."
        )
    if predivide is not None and not predivide > 0:
        raise ConfigError(f"Engine(gradient_predivide={predivide!r}): must be None or > 0.")
    share = 1 / cfg.accum_steps / (world if reduction == "mean" else 1)
    if predivide is None:
        low = cfg.dtypes.reduce or cfg.dtypes.param or torch.float32
        predivide = 1.0
        # FairScale's rule; wider sums have room, and need one division only
        while low.itemsize == 2 and world % predivide == 0 and world / predivide > predivide:
            predivide *= 2
    return 1 / predivide, share * predivide
