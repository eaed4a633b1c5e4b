"""`Engine`: ZeRO for people who call `loss.backward()`."""

import contextlib
import glob
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fzero import tree
from fzero.config import Config
from fzero.engine import outputs, phases
from fzero.engine.autograd import Scale, current_task, watch
from fzero.engine.gradients import Gradients
from fzero.engine.journal import Journal
from fzero.engine.leaves import LazyParameter, Units
from fzero.engine.phases import BackwardState, Rules, transition
from fzero.engine.slots import ParameterSlots
from fzero.engine.traffic import Traffic
from fzero.engine.units import plan_buckets, plan_units
from fzero.errors import BackwardError, ConfigError, ShardError
from fzero.mesh import is_gloo
from fzero.optim import as_optimizer
from fzero.plan import Held
from fzero.protocols import Optimizer
from fzero.sharding import locals_of
from fzero.staged import UpdateHalf
from fzero.start import start
from fzero.state import OptState
from fzero.tree import PyTree
from fzero.zero import divide

_WITHOUT = Optimizer(
    init=lambda params: (),
    update=lambda grads, state, params=None, **_: (grads, state),
    apply_=lambda grads, state, params, **_: state,
)


class Engine:
    """A module whose training state is sharded, trained with plain `loss.backward()`.

    The module is taken over: its parameters become this engine's, in place. At stage 3 they are
    there only while something reads them. Whatever Python the module runs is fine; nothing is
    traced.

    A micro-batch is a forward that a backward has reached since the last update. `step()` updates
    once `cfg.accum_steps` of them are there, and does nothing before; with `accum_steps=1` any
    number of backwards may come before it. Every gradient is divided by `accum_steps` once, however
    backward was called. An exception in forward or backward leaves gradients and counters as they
    were before that call.

    Args:
        model: any module, on the device it trains on, the same on every rank. What has
            `requires_grad=False` is frozen, as what `cfg.frozen` names.
        opt: one of `fzero.optim`, or any object with optax's `init` and `update`. Without it
            gradients can be computed, and `step()` says what is missing.
        cfg: see `Config`; what only a staged-out step needs (`executor`, `donate`, `has_aux`,
            `seed`) has no effect.
        gradient_reduction: "mean" of the ranks' gradients, or their "sum".
        gradient_predivide: factor by which gradients are divided before they are added up, so that
            16-bit sums don't overflow; the rest of the division comes after. None: for 16-bit
            reductions the largest doubling that keeps both divisions near the root of the world
            (FairScale's rule), else 1.

    Raises:
        ConfigError: a combination that there isn't.
        ShardError: the module has no values yet (`meta`, lazy modules), or has an engine already.
        RankMismatchError: ranks differ in config, names, shapes, dtypes or values.

    Examples:
        >>> import fzero
        >>> torch.manual_seed(0) and None
        >>> engine = Engine(nn.Linear(3, 1), fzero.optim.sgd(0.1))
        >>> loss = engine(torch.ones(2, 3)).square().mean()
        >>> loss.backward()
        >>> engine.full_grad("bias").shape
        torch.Size([1])
        >>> engine.step()
        >>> int(engine.state[1].step)
        1
    """

    def __init__(
        self,
        model: nn.Module,
        opt: Any = None,
        cfg: Config | None = None,
        *,
        gradient_reduction: Literal["mean", "sum"] = "mean",
        gradient_predivide: float | None = None,
    ) -> None:
        slots, params = _parameters_of(model)
        self.module = model
        self.cfg = cfg = _frozen_too(cfg or Config(), params)
        self._has_opt = opt is not None
        plan, tree_of, opt_state = start(
            cfg,
            as_optimizer(opt) if opt is not None else _WITHOUT,
            {name: p.detach() for name, p in params.items()},
        )
        self._plan, self._params, self._opt_state = plan, tree_of, opt_state
        self._names = [leaf.name for leaf in plan.sharding.layout]
        self._other_names = slots.other_names()
        self._locals: list[Tensor] = locals_of(tree.leaves(tree_of))
        world = plan.axes.world
        leaves = list(plan.sharding.layout)
        order = [self._names.index(name) for name in params]
        lazy = cfg.stage == 3 and (plan.axes.shard.size > 1 or any(x.compute for x in leaves))
        limit = int(cfg.bucket_mb * 2**20)
        self._journal = Journal(plan.mesh, active=lazy)
        self._traffic = Traffic(plan.mesh, plan.axes, self._journal)
        units, special = plan_units(leaves, order, limit, cfg.gather_together) if lazy else ([], 0)
        self._units: Units | None = None
        if lazy:
            group = plan.mesh.shard_group
            ahead = cfg.prefetch
            if ahead is None:  # over gloo a transfer takes the cores that compute
                ahead = 0 if plan.axes.shard.size == 1 or is_gloo(group) else 1
            self._units = Units(
                leaves,
                units,
                self._locals,
                self._traffic,
                next(iter(params.values())).device,
                keep=not cfg.reshard_after_forward,
                prefetch=ahead,
            )
        self._trained = [i for i, leaf in enumerate(leaves) if leaf.trainable]
        buckets = self._buckets(units, special, order, leaves, limit) if world > 1 else []
        bits = list(phases.masks(buckets))
        for i in range(len(bits) - special, len(bits)):
            bits[i] |= 1 << len(leaves)  # never complete: ranks may run parts of it only
        reduces = world > 1 and (cfg.stage >= 2 or cfg.accum_steps == 1)
        self._rules = Rules(
            tuple(bits) if reduces else (), reduces, cfg.accum_steps, cfg.scaling is not None
        )
        self._state = BackwardState()
        before, after = _factors(world, cfg, gradient_reduction, gradient_predivide)
        self._share = before * after
        self._gradients = Gradients(
            leaves,
            buckets,
            self._traffic,
            scatter=cfg.stage >= 1,
            factors=(before, after),
            device=next(iter(params.values())).device,
            gone=self._units.drop if self._units is not None else _ignore,
        )
        self._half: UpdateHalf | None = None
        self._forwards = itertools.count()
        self._losses: list[Tensor] = []  # given to backward()
        self._scalars: dict[int, Tensor] = {}  # outputs that look like losses, by forward
        self._divided = True
        # leaves of an unsynced task that have their gradients; None: each arrival is an event
        self._late: list[int] | None = None
        self._correction: Tensor | float | None = None  # on every gradient of the running task
        self._install(slots, params)

    # --- forward and backward ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for these arguments, floating ones cast to the compute dtype."""
        self._recover()
        forward = _Forward(self, next(self._forwards))
        self._journal.enter("forward" if torch.is_grad_enabled() else "evaluation")
        self._on(phases.ForwardStarted(forward.number))
        dtype = self.cfg.dtypes.param
        try:
            out = self.module(*outputs.cast(args, dtype), **outputs.cast(kwargs, dtype))
        except BaseException:
            self._on(phases.ForwardRaised(forward.number))
            raise
        self._on(phases.ForwardEnded(forward.number))
        if torch.is_grad_enabled():
            if isinstance(out, Tensor) and out.numel() == 1 and out.is_floating_point():
                forward.loss = out.detach().reshape(())
            for x in {id(x): x for x in outputs.tensors_in(out)}.values():
                if x.grad_fn is not None:
                    x.register_hook(forward.reached)
        elif self._units is not None and self._state.task is None:
            self._units.reshard()
        return out

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """`loss.backward()` with the loss scale applied, if there is one.

        Args:
            loss: a scalar that depends on the engine's parameters.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: divide by `cfg.accum_steps`, as every backward does. False leaves that
                out, for a loss that was divided already.

        Returns:
            The loss, divided by `accum_steps` if `scale_wrt_gas`; without a graph.

        Raises:
            BackwardError: `loss` is no scalar tensor with a graph.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.requires_grad is False:
            raise BackwardError(_no_loss(loss))
        self._divided = scale_wrt_gas
        try:
            self.scale(loss).backward(retain_graph=retain_graph)
        finally:
            self._divided = True
        shown = loss.detach()
        self._losses.append(shown.reshape(()))
        return shown / self.cfg.accum_steps if scale_wrt_gas else shown

    def scale(self, loss: Tensor) -> Tensor:
        """`loss`, or any tensor that backward will start from, times the loss scale.

        Several engines under one loss: `a.scale(b.scale(loss)).backward()`. Without a loss scale
        it is the tensor itself.

        Args:
            loss: of any shape, with a graph.

        Raises:
            BackwardError: it has no graph.
        """
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise BackwardError(_no_loss(loss).replace("backward(loss)", "scale(loss)"))
        if self._opt_state.loss_scale is None:
            return loss
        factor, applied = self._opt_state.loss_scale.scale, (self._scaled,)
        node: Any = loss.grad_fn
        if getattr(node, "applied", None) and hasattr(node, "unscaled"):  # another engine's scale
            if self._scaled in node.applied:
                return loss
            loss, factor, applied = node.unscaled, node.factor, (*node.applied, self._scaled)
        return Scale.apply(loss, factor.to(loss.device), applied)  # pyright: ignore

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block keep their gradients on this rank, in full.

        What comes after the block reduces them: the next backward, or `step()`. At every stage.
        """
        self._on(phases.SyncPaused())
        try:
            yield
        finally:
            self._on(phases.SyncResumed())

    # --- the step ---

    def step(self) -> None:
        """Update the parameters, if enough micro-batches are there; see `Engine`.

        Raises:
            BackwardError: without an optimizer, inside `no_sync()`, or with no backward since the
                last call.
            FzeroError: with `on_nonfinite="raise"`, a gradient is not finite; nothing has changed.
        """
        self._recover()
        if not self._has_opt:
            raise BackwardError(
                "engine.step() needs an optimizer, and this engine was made without one. Pass it: "
                "fzero.Engine(model, fzero.optim.adamw(3e-4), cfg)."
            )
        self._on(phases.StepCalled())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last update; accumulation starts again.

        Args:
            set_to_none: accepted for the sake of habit; gradients are always dropped.
        """
        self._recover()
        self._on(phases.GradientsZeroed())

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch of now is the last before an update.

        That is `(micro_step + 1) % accum_steps == 0`, where the micro-step counts from 0 and goes
        on with the first forward or `step()` after a backward.
        """
        return phases.is_boundary(self._rules, self._state)

    # --- looking at it ---

    @property
    def state(self) -> tuple[PyTree, OptState]:
        """`(params, opt_state)` as `step_fn` takes and gives them.

        The tensors are the engine's own: what changes them in place changes the engine. (A step
        function with `donate=True` does; assign what it returns.) Assigned values are copied.
        """
        return self._params, self._opt_state

    @state.setter
    def state(self, new: tuple[PyTree, OptState]) -> None:
        try:
            params, opt_state = new
        except (TypeError, ValueError):
            raise ShardError(
                f"engine.state must be (params, opt_state), and was given a {type(new).__name__}. "
                "Assign what step_fn, or another engine's state, returned."
            ) from None
        self._adopt(params, opt_state)

    def full_params(self) -> dict[str, Tensor]:
        """Copies of the full parameters by name, on every rank; every rank must call it."""
        self._recover()
        self._journal.enter("full_params")
        leaves = list(self._plan.sharding.layout)
        full: dict[str, Tensor] = {}
        for i in (self._names.index(name) for name in self._order):
            (value,) = (
                self._traffic.gather([self._locals[i]], [leaves[i]]).wait()
                if self._units is not None
                else [self._locals[i]]
            )
            full[self._names[i]] = value.detach().clone()
        return full

    def full_grad(self, name: str) -> Tensor | None:
        """The gradient of one parameter so far: the mean over ranks, unscaled.

        Reading it changes nothing. At world > 1 every rank must call it.

        Args:
            name: as in `model.named_parameters()`.

        Returns:
            A full tensor; None if no rank has a gradient for it.

        Raises:
            ShardError: there is no parameter of that name.
        """
        self._recover()
        place = self._place(name)
        gradients, leaf = self._gradients, self._plan.sharding.layout.leaves[place]
        self._journal.enter("full_grad")
        here = torch.tensor(float(place in gradients.present), device=gradients.device)
        if not self._traffic.sum(here):
            return None
        if self._rules.reduces:
            total = gradients.one(place)
            if gradients.scatter and leaf.dim is not None:
                total = self._traffic.whole(total, leaf)
        else:
            kept = gradients.kept.get(place)
            total = gradients.zeros(place, full=True) if kept is None else kept.clone()
            total = self._traffic.sum(total) * self._share
        if self._opt_state.loss_scale is not None:
            total = total / self._opt_state.loss_scale.scale.to(total.dtype)
        return total

    # --- events and actions ---

    def _on(self, event: phases.Event) -> None:
        self._state, actions = transition(self._rules, self._state, event)
        for action in actions:
            self._do(action)

    def _do(self, action: phases.Action) -> None:
        gradients = self._gradients
        match action:
            case phases.Launch(bucket):
                gradients.launch(bucket)
            case phases.Watch(task):
                self._correction = None if self._divided else float(self.cfg.accum_steps)
                self._journal.enter("backward")
                watch(lambda: self._ended(task), lambda: self._on(phases.TaskRaised(task)))
            case phases.Adopt(forward):
                scale = self._opt_state.loss_scale
                factor = 1.0 if self._divided else float(self.cfg.accum_steps)
                gradients.adopt(forward, factor if scale is None else scale.scale * factor)
            case phases.Forget(forward):
                gradients.forget(forward)
            case phases.Commit():
                gradients.commit()
            case phases.TakeAll():
                self._take_all()
            case phases.Discard():
                for place in self._late or ():
                    self._by_place[place].grad = None
                self._late = None
                gradients.discard()
            case phases.Flush():
                self._journal.enter("flush")
                gradients.flush()
            case phases.Clear():
                gradients.clear()
                self._losses, self._scalars = [], {}
            case phases.Reshard():
                if self._units is not None:
                    self._units.reshard()
            case phases.Update():
                self._update()
            case _:
                raise AssertionError(action)

    def _taker(self, place: int) -> Callable[[Tensor], None]:
        """What autograd calls when it has accumulated a gradient into a parameter."""

        def take(param: Tensor) -> None:
            late = self._late
            if late is not None:  # nothing waits for it: it stays where it is till the task ends
                late.append(place)
                return
            grad = param.grad
            assert grad is not None
            param.grad = None
            grad = _plain(grad)
            event = phases.GradientReady(place, current_task())
            self._state, actions = transition(self._rules, self._state, event)
            for action in actions:
                kind = type(action)
                if kind is phases.Take:
                    if self._correction is not None:
                        grad.mul_(self._correction)
                    self._gradients.take(place, grad)
                elif kind is phases.SetAside:
                    self._gradients.set_aside(place, action.forward, grad)  # pyright: ignore
                else:
                    self._do(action)
            task = self._state.task
            if task is not None and not task.synced:
                self._late = []

        return take

    def _take_late(self) -> None:
        """The gradients of an unsynced task, which are where autograd has put them."""
        if self._late:
            task = self._state.task
            assert task is not None
            self._on(phases.GradientsReady(task.number))
        self._late = None

    def _take_all(self) -> None:
        places = list(dict.fromkeys(self._late or ()))
        params = [self._by_place[place] for place in places]
        grads: list[Any] = [param.grad for param in params]
        for param in params:
            param.grad = None
        if any(grad.requires_grad or grad.layout is not torch.strided for grad in grads):
            grads = [_plain(grad) for grad in grads]
        if self._correction is not None:
            torch._foreach_mul_(grads, self._correction)
        self._gradients.take_all(places, grads)

    def _scaled(self, factor: Tensor) -> None:
        """Gradients that carry `factor` start on their way through the running task."""
        self._on(phases.ScaleApplied(current_task()))
        scale = self._opt_state.loss_scale.scale
        if factor is not scale:  # several engines share the larger one's
            correction = scale / factor.to(scale.device)
            self._correction = correction * (1.0 if self._divided else self.cfg.accum_steps)

    def _ended(self, task: int) -> None:
        try:
            self._take_late()
            self._on(phases.TaskEnded(task))
        except BaseException:
            self._gradients.discard()
            raise

    def _recover(self) -> None:
        """See to it that no task is open that is over: a call from outside of backward came."""
        task = self._state.task
        if task is not None and current_task() == -1:
            self._on(phases.TaskRaised(task.number))

    # --- the update ---

    def _update(self) -> None:
        plan, gradients = self._plan, self._gradients
        held = Held.of(self._opt_state, dtensors=plan.opt.foreign)
        reduces = self._rules.reduces
        source = gradients.reduced if reduces else gradients.kept
        full = not (reduces and gradients.scatter)
        grads = [
            source.pop(i) if i in source else gradients.zeros(i, full=full) for i in self._trained
        ]
        if not reduces and self._share != 1:
            torch._foreach_mul_(grads, self._share)
        trained, _ = divide(self._locals, plan.sharding.layout)
        losses = self._losses or list(self._scalars.values())
        loss = torch.stack(losses).float().mean() if losses else torch.zeros(())
        loss, known = loss.to(gradients.device) / plan.axes.world, bool(losses)
        self._losses, self._scalars = [], {}
        self._journal.enter("update")
        half = self._half
        if half is None:
            half = self._half = UpdateHalf(plan, held, reduced=reduces)
            if not plan.opt.foreign:
                size = int(self.cfg.bucket_mb * 2**20)
                half.stage_out(trained, held, grads, loss, [], bucket_bytes=size)
        updated = half(trained, held, grads, loss, [])
        gradients.clear()
        if self._units is not None:
            self._units.turn()
        skip = self.cfg.nonfinite_policy == "skip"
        scale = self._opt_state.loss_scale
        metrics = {
            "loss": updated.loss if known else torch.full_like(updated.loss, torch.nan),
            "grad_norm": updated.grad_norm,
            "nonfinite": updated.nonfinite,
            "skipped": updated.nonfinite if skip else torch.zeros_like(updated.nonfinite),
            "loss_scale": scale.scale if scale is not None else torch.ones_like(updated.loss),
        }
        self._opt_state = self._opt_state._replace(
            step=self._opt_state.step + 1, loss_scale=updated.loss_scale, metrics=metrics
        )

    # --- parameters ---

    def _install(self, slots: ParameterSlots, params: dict[str, nn.Parameter]) -> None:
        """Make the module's parameters this engine's."""
        self._order = list(params)
        self._by_place: dict[int, Tensor] = {}
        new: dict[str, Tensor] = {}
        for name, param in params.items():
            place = self._names.index(name)
            trainable = self._plan.sharding.layout.leaves[place].trainable
            param.grad = None
            if self._units is not None:
                new[name] = LazyParameter(self._units, place, None, trainable)
                param.data = param.data.new_empty(0)
            else:
                new[name] = param
                param.data = self._locals[place]
                param.requires_grad_(trainable)
            if trainable:
                self._by_place[place] = new[name]
                new[name].register_post_accumulate_grad_hook(self._taker(place))
        slots.install(new)

    def _buckets(
        self,
        units: Sequence[Sequence[int]],
        special: int,
        order: Sequence[int],
        leaves: Sequence[Any],
        limit: int,
    ) -> list[list[int]]:
        """Trained leaves that are reduced together, as backward is likely to bring them."""
        if self._units is None:
            trained = [i for i in order if leaves[i].trainable]
            return plan_buckets([leaf.nbytes for leaf in leaves], trained, limit)
        common = units[: len(units) - special]
        ordered = [*reversed(common), *units[len(units) - special :]]
        kept = [[i for i in unit if leaves[i].trainable] for unit in ordered]
        return [unit for unit in kept if unit]

    def _adopt(self, params: PyTree, opt_state: OptState) -> None:
        plan = self._plan
        self._recover()
        if self._state.task is not None or self._state.running:
            raise BackwardError(
                "engine.state was assigned inside a forward or backward. Assign it between passes."
            )
        leaves, spec = tree.flatten(params)
        plan.check(leaves, spec)
        own, given = tree.flatten(self._opt_state.inner), tree.flatten(opt_state.inner)
        plan.check_inner(given[1])
        pairs = [*zip(self._locals, locals_of(leaves), strict=True)]
        pairs += zip(locals_of(own[0]), locals_of(given[0]), strict=True)
        masters = tree.leaves(self._opt_state.master), tree.leaves(opt_state.master)
        pairs += zip(*map(locals_of, masters), strict=True)
        with torch.no_grad():
            for mine, theirs in pairs:
                if mine.data_ptr() != theirs.data_ptr() or not mine.numel():
                    mine.copy_(theirs)
        self._opt_state = self._opt_state._replace(
            step=opt_state.step.clone(),
            loss_scale=tree.map(torch.clone, opt_state.loss_scale),
            metrics=dict(opt_state.metrics),
        )
        if self._units is not None:
            self._units.reshard()

    def _place(self, name: str) -> int:
        name = self._other_names.get(name, name)
        if name in self._names:
            return self._names.index(name)
        near = get_close_matches(name, self._names, n=3)
        hint = f" Near ones: {', '.join(map(repr, near))}." if near else ""
        raise ShardError(
            f"full_grad({name!r}): the module has no parameter of that name.{hint} Names are those "
            "of model.named_parameters()."
        )


class _Forward:
    """One call of an engine, as the hooks on its outputs know it."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine, self.number = weakref.ref(engine), number
        self.loss: Tensor | None = None

    def reached(self, grad: Tensor) -> None:
        """A gradient has come to an output."""
        if (engine := self.engine()) is not None:
            engine._on(phases.OutputReached(self.number, current_task()))
            if self.loss is not None:
                engine._scalars[self.number] = self.loss

    def __del__(self) -> None:
        if (engine := self.engine()) is not None and engine._gradients.aside:
            engine._on(phases.ForwardGone(self.number))


def _parameters_of(model: Any) -> tuple[ParameterSlots, dict[str, nn.Parameter]]:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"Engine(model): model is a {type(model).__name__}; it must be a torch.nn.Module. For "
            "a function of parameters use fzero.make_train_step."
        )
    slots = ParameterSlots(model)
    params: Any = slots.tensors()
    if not params:
        raise ShardError(f"{type(model).__name__} has no parameters, so there is nothing to train.")
    for name, param in params.items():
        if isinstance(param, LazyParameter):
            raise ShardError(
                f"the parameter {name!r} belongs to another engine already. A parameter has one "
                "engine; make it of the module that holds all of them."
            )
        if param.device.type == "meta":
            raise ShardError(
                f"the parameter {name!r} is on the meta device and has no values. Build the module "
                "on a real device, or use make_train_step(...).init with a function that builds "
                "the parameters: then no rank ever holds the whole model."
            )
    return slots, params


def _frozen_too(cfg: Config, params: dict[str, nn.Parameter]) -> Config:
    """`cfg` with the names of what is frozen, by it or by `requires_grad=False`."""
    frozen = [n for n, p in params.items() if not p.requires_grad or cfg.is_frozen(n)]
    return cfg.replace(frozen=tuple(glob.escape(name) for name in frozen))


def _factors(
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
        while low.itemsize == 2 and world % predivide == 0 and world / predivide > predivide:
            predivide *= 2
    return 1 / predivide, share * predivide


def _no_loss(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.requires_grad is False:
        found = f"a tensor of shape {tuple(loss.shape)} without a graph"
    else:
        found = f"a tensor of shape {tuple(loss.shape)}"
    return (
        f"engine.backward(loss) was given {found}; it takes a scalar tensor that was computed from "
        "the engine's parameters, with gradients enabled. Reduce the loss with .mean(), do not "
        ".detach() it, and compute it outside of torch.no_grad(); outputs of other shapes go "
        "through engine.scale(out).backward(gradient)."
    )


def _plain(grad: Tensor) -> Tensor:
    """A gradient, dense and without a graph."""
    if grad.requires_grad:
        grad = grad.detach()
    return grad if grad.layout is torch.strided else grad.to_dense()


def _ignore(places: Sequence[int]) -> None:
    pass
