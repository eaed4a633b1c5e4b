"""`Engine`: ZeRO for people who call `loss.backward()`."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fzero.config import Config
from fzero.distributed.journal import Journal
from fzero.distributed.rendezvous import first_says
from fzero.distributed.transport import Transport
from fzero.eager.owned import raw_grad, set_raw_grad
from fzero.eager.units import Units
from fzero.engine import events, outputs, phases
from fzero.engine.attach import (
    WITHOUT,
    factors,
    frozen_too,
    gather_around,
    install,
    owned_hook,
    parameters_of,
)
from fzero.engine.autograd import Scale, accumulates, own, watch
from fzero.engine.buffers import Buffers
from fzero.engine.forward import Door, Forward, no_loss
from fzero.engine.grouping import plan_grouping, plan_order, units_ahead
from fzero.engine.phases import BackwardState, Rules, transition
from fzero.engine.reducer import Reducer
from fzero.engine.stepper import Stepper
from fzero.engine.writes import Writes
from fzero.errors import BackwardError, FzeroError, ShardError
from fzero.functional.functionalize import parameters
from fzero.functional.tasks import current_task
from fzero.numerics.casts import in_force, refuse_outer_autocast
from fzero.optim import as_optimizer
from fzero.state.init import start
from fzero.state.opt_state import OptState
from fzero.tree import PyTree


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
        slots, params = parameters_of(model)
        self.module = model
        self.cfg = cfg = frozen_too(cfg or Config(), params)
        self._has_opt = opt is not None
        optimizer = WITHOUT if opt is None else as_optimizer(opt)
        plan, tree_of, opt_state = start(cfg, optimizer, parameters(model))
        leaves, world = plan.sharding.layout.leaves, plan.axes.world
        self._names = {leaf.name: index for index, leaf in enumerate(leaves)}
        self._other_names = slots.other_names()
        self._registered = [self._names[name] for name in params]
        self._journal = Journal(plan.mesh, active=cfg.stage == 3, limit=cfg.timeout)
        self._transport = Transport(plan.mesh, plan.axes, self._journal)
        reduces = world > 1 and (cfg.stage >= 2 or cfg.accum_steps == 1)
        self._stepper = Stepper(
            plan,
            tree_of,
            opt_state,
            Buffers(
                model,
                world=world,
                first=plan.axes.shard.rank == plan.axes.replicate.rank == 0,
                total=self._transport.sum,
                device_type=plan.mesh.device_type,
            ),
            reduced=reduces,
        )
        device = next(iter(params.values())).device
        lazy = cfg.stage == 3 and (plan.axes.shard.size > 1 or any(x.compute for x in leaves))
        grouping = plan_grouping(leaves, self._registered, cfg, lazy=lazy, alone=world == 1)
        self._grouping, self._is_ordered = grouping, not reduces
        self._units: Units | None = None
        if lazy:
            self._units = Units(
                leaves,
                grouping.units,
                self._stepper.locals,
                self._transport,
                device,
                keep=not cfg.reshard_after_forward,
                prefetch=units_ahead(cfg, plan.axes.shard),
            )
            first = len(grouping.units) - len(grouping.special)
            special = {name: first + i for i, name in enumerate(grouping.special)}
            gather_around(model, self._units, special)
        scaling = cfg.scaling
        self._rules = Rules(
            grouping.masks if reduces else (),
            reduces,
            cfg.accum_steps,
            scaled=scaling is not None and not scaling.external,
        )
        self._state = BackwardState()
        before, after = factors(world, cfg, gradient_reduction, gradient_predivide)
        self._share = before * after
        self._reducer = Reducer(
            leaves,
            grouping.buckets,
            self._transport,
            scatter=cfg.stage >= 1,
            factors=(before, after),
            device=device,
            accumulates=cfg.accum_steps > 1,
            gone=self._units.drop if self._units is not None else _ignore,
        )
        self._forwards = itertools.count()
        self._calling = False  # inside the engine's own call
        self._losses: list[Tensor] = []  # given to backward()
        # outputs that look like losses, by forward: of the running task, and of those before
        self._pending: dict[int, Tensor] = {}
        self._scalars: dict[int, Tensor] = {}
        self._divided = True
        self._came = False  # whether a backward has come to something of this engine
        # leaves of an unsynced task that have their gradients; None: each arrival is an event
        self._late: list[int] | None = None
        # of the running task: on every gradient; the loss scale that it carries; whether other
        # ranks take part; a node that it runs through
        self._correction: Tensor | float | None = None
        self._factor: Tensor | None = None
        self._entered = False
        self._node: Any = None
        self._by_index = install(
            slots,
            params,
            leaves,
            self._stepper.locals,
            self._units,
            self._taker,
            weakref.ref(self),
        )
        model.register_forward_hook(Door(weakref.ref(self)))
        self._writes = Writes(model, self._by_index, leaves, self._stepper, lazy=lazy)

    # --- forward and backward ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for these arguments, floating ones cast to the compute dtype.

        Raises:
            ConfigError: `Precision(autocast=...)`, under the caller's own `torch.autocast`.
            FzeroError: the module's parameters are no longer those that the engine was made with;
                or its forward changed a trained one in place, and there are several ranks.
        """
        self._recover()
        self._writes.same_module()
        if self.cfg.dtypes.autocast is not None:  # else the caller's own reaches the module
            refuse_outer_autocast()
        if self._units is not None and self._state.task is None and not self._state.running:
            self._units.reshard()  # engine.state may have been written since they were gathered
        forward = Forward(self, next(self._forwards))
        self._journal.enter("forward" if torch.is_grad_enabled() else "evaluation")
        if (task := current_task()) != -1:
            self._on(events.TaskMet(task))
        self._on(events.ForwardStarted(forward.number))
        dtypes = self.cfg.dtypes
        args, kwargs = outputs.cast((args, kwargs), dtypes.param)
        calling, self._calling = self._calling, True
        try:
            with in_force(dtypes, self._reducer.device.type):
                versions = self._writes.versions()
                out = outputs.cast(self.module(*args, **kwargs), dtypes.output)
                self._writes.unwritten_since(versions)
        except BaseException:
            self._on(events.ForwardRaised(forward.number))
            if self._state.task is None:
                self._journal.raised(sent=False)
            raise
        finally:
            self._calling = calling
        self._returned(forward, out)
        return out

    def _called_directly(self, out: Any) -> None:
        """The module has run without the engine's call: a forward like any other."""
        if self._calling:
            return
        self._recover()
        forward = Forward(self, next(self._forwards))
        self._on(events.ForwardStarted(forward.number))
        self._returned(forward, out)

    def _returned(self, forward: Forward, out: Any) -> None:
        """A forward has ended: backward is to tell when it reaches what it gave."""
        self._on(events.ForwardEnded(forward.number, torch.is_grad_enabled()))
        if torch.is_grad_enabled():
            forward.loss = outputs.loss_in(out)
            for x in outputs.tensors_in(out):
                for y in (x, x._base):
                    if y is not None and y.grad_fn is not None:
                        y.register_hook(forward.reached)
        elif self._units is not None and self._state.task is None:
            self._units.reshard()

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
            BackwardError: `loss` is no scalar tensor with a graph, or depends on nothing of this
                engine's.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise BackwardError(no_loss(loss))
        outermost = current_task() == -1 and not self._state.running
        self._divided, self._came = scale_wrt_gas, not outermost
        try:
            self.scale(loss).backward(retain_graph=retain_graph)
        finally:
            self._divided = True
        if not self._came:
            raise BackwardError(
                "engine.backward(loss) ran, and came to no parameter and no output of this engine: "
                "the loss depends on none. Compute it from what engine(...) returned, without "
                ".detach() and outside of torch.no_grad(). The engine's gradients are as before."
            )
        shown = loss.detach().clone()
        self._losses.append(shown.clone().reshape(()))
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
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise BackwardError(no_loss(loss).replace("backward(loss)", "scale(loss)"))
        if not self._rules.scaled:
            return loss
        factor, applied = self._loss_scale.scale, (self._scaled,)
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
        self._on(events.SyncPaused())
        try:
            yield
        finally:
            self._on(events.SyncResumed())

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
        self._on(events.StepCalled())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last update; accumulation starts again.

        Args:
            set_to_none: accepted for the sake of habit; gradients are always dropped.
        """
        self._recover()
        self._on(events.GradientsZeroed())

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch of now is the last before an update.

        That is `(micro_step + 1) % accum_steps == 0`, where the micro-step counts from 0 and goes
        on with the first forward or `step()` after a backward.
        """
        return phases.is_boundary(self._rules, self._state)

    def __deepcopy__(self, memo: Any) -> Any:
        raise FzeroError(_NO_COPY.format("copied"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FzeroError(_NO_COPY.format("copied or pickled"))

    # --- looking at it ---

    @property
    def state(self) -> tuple[PyTree, OptState]:
        """`(params, opt_state)` as `step_fn` takes and gives them.

        The tensors are the engine's own: what changes them in place changes the engine. (A step
        function with `donate=True` does; assign what it returns.) Assigned values are copied.
        """
        return self._stepper.read()

    @state.setter
    def state(self, new: tuple[PyTree, OptState]) -> None:
        try:
            params, opt_state = new
        except (TypeError, ValueError):
            raise ShardError(
                f"engine.state must be (params, opt_state), and was given a {type(new).__name__}. "
                "Assign what step_fn, or another engine's state, returned."
            ) from None
        self._recover()
        if self._state.task is not None or self._state.running:
            raise BackwardError(
                "engine.state was assigned inside a forward or backward. Assign it between passes."
            )
        self._stepper.write(params, opt_state)
        self._writes.ours()
        if self._units is not None:
            self._units.reshard()

    def full_params(self) -> dict[str, Tensor]:
        """Copies of the full parameters by name. At stage 3 every rank must call it."""
        self._recover()
        if self.cfg.stage == 3:
            self._journal.enter("full_params")
        leaves, shards = self._reducer.leaves, self._stepper.locals
        full: dict[str, Tensor] = {}
        for i in self._registered:
            value = shards[i].detach()
            if self.cfg.stage == 3:
                value = self._transport.whole(value, leaves[i])
            full[leaves[i].name] = value.clone()
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
        index = self._index(name)
        gradients = self._reducer
        leaf = gradients.leaves[index]
        self._journal.enter("full_grad")
        present, kept = self._anywhere(index in gradients.present, index in gradients.kept)
        if not present:
            return None
        if self._rules.reduces:
            total = gradients.one(index, kept=kept)
            if gradients.scatter and leaf.dim is not None:
                total = self._transport.whole(total, leaf)
        else:
            total = self._transport.sum(gradients.local(index)) * self._share
        if self._loss_scale is not None:
            total = total / self._loss_scale.scale.to(total.dtype)
        return total

    # --- what its parameters ask ([Note: owned parameters]) ---

    def _holds(self, index: int) -> bool:
        """Whether there is a gradient of this leaf."""
        return self._reducer.has(index)

    def _drop(self, index: int) -> None:
        """Drop the gradients of one leaf; with the last one accumulation starts again."""
        self._recover()
        if not self._holds(index):
            return
        phases.refuse_inside(self._state, "zero_grad(), or p.grad = None,")
        self._reducer.drop(index)
        if not any(map(self._holds, self._by_index)):
            self.zero_grad()

    # --- events and actions ---

    def _on(self, event: events.Event) -> None:
        before = self._state
        self._state, actions = transition(self._rules, before, event)
        try:
            for action in actions:
                self._do(action)
        except BaseException:
            untouched = isinstance(event, events.StepCalled) and self._reducer.present
            if isinstance(event, events.TaskEnded) or untouched:
                self._state = before
            raise

    def _do(self, action: events.Action) -> None:
        gradients = self._reducer
        match action:
            case events.Launch(bucket):
                if not self._entered:  # a task that reduces nothing is no business of other ranks
                    self._entered = True
                    self._journal.enter("backward")
                gradients.launch(bucket)
            case events.Watch(task):
                self._correction = None if self._divided else float(self.cfg.accum_steps)
                self._factor, self._entered, self._node = None, self._units is not None, None
                if self._entered:
                    self._journal.enter("backward")
                watch(lambda: self._ended(task), lambda: self._raised(task))
            case events.Adopt(forward):
                factor = 1.0 if self._divided else float(self.cfg.accum_steps)
                scaled = self._rules.scaled
                gradients.adopt(forward, self._loss_scale.scale * factor if scaled else factor)
            case events.Forget(forward):
                gradients.forget(forward)
            case events.Commit():
                gradients.commit()
                self._scalars.update(self._pending)
                self._pending = {}
            case events.TakeAll():
                self._take_all()
            case events.Discard():
                for index in self._late or ():
                    set_raw_grad(self._by_index[index], None)
                self._late, self._pending = None, {}
                gradients.discard()
            case events.Flush():
                if not self._rules.counts or self._anywhere(bool(gradients.kept))[0]:
                    self._journal.enter("flush")
                    gradients.flush()
            case events.Clear():
                self._clear()
            case events.Reshard():
                if self._units is not None:
                    self._units.reshard()
            case events.Update():
                self._update()
            case _:
                raise AssertionError(action)

    def _taker(self, index: int) -> Callable[[Tensor], None]:
        """What autograd calls when it has accumulated a gradient into a parameter."""

        engine = weakref.ref(self)  # autograd's hold of a hook is hidden from the collector

        def take(param: Tensor) -> None:
            self = engine()
            if self is None:
                return
            late = self._late
            if late is not None:  # nothing waits for it: it stays where it is till the task ends
                late.append(index)
                return
            grad = raw_grad(param)
            if grad is None:  # a function took the parameter and returned None for it
                self._came = True
                self._on(events.LeafReached(current_task()))
                return
            set_raw_grad(param, None)
            grad, self._came = own(grad), True
            event = events.GradientReady(index, current_task())
            self._state, actions = transition(self._rules, self._state, event)
            for action in actions:
                kind = type(action)
                if kind is events.Take:
                    if self._correction is not None:
                        grad.mul_(self._correction)
                    self._reducer.take(index, grad)
                elif kind is events.SetAside:
                    self._reducer.set_aside(index, action.forward, grad)  # pyright: ignore
                else:
                    self._do(action)
            task = self._state.task
            if task is not None and not task.synced:
                self._late = []

        return owned_hook(take, engine)

    def _take_late(self) -> None:
        """The gradients of an unsynced task, which are where autograd has put them."""
        if self._late:
            task = self._state.task
            assert task is not None
            self._on(events.GradientsReady(task.number))
        self._late = None

    def _take_all(self) -> None:
        params, dense, grads = self._by_index, torch.strided, {}
        writes = self._reducer.accumulates or self._correction is not None
        for index in self._late or ():
            param = params[index]
            grad = raw_grad(param)
            if grad is None:  # it came twice, or a function returned None for it
                continue
            set_raw_grad(param, None)
            if writes or grad.requires_grad or grad.layout is not dense:
                grad = own(grad)
            grads[index] = grad
        if self._correction is not None and grads:
            torch._foreach_mul_(list(grads.values()), self._correction)
        self._reducer.take_all(grads)

    def _scaled(self, factor: Tensor) -> None:
        """Reducer that carry `factor` start on their way through the running task."""
        self._on(events.ScaleApplied(current_task()))
        if self._factor is not None and self._factor is not factor:
            raise BackwardError(
                "two different loss scales met in one backward of this engine, and its gradients "
                "cannot be told apart. Put one nest of scales around the whole loss: "
                "a.scale(b.scale(loss)).backward()."
            )
        self._factor = factor
        scale = self._loss_scale.scale
        if factor is not scale:  # another engine's, or one that has changed since
            correction = scale / factor.to(scale.device)
            self._correction = correction * (1.0 if self._divided else self.cfg.accum_steps)

    def _ended(self, task: int) -> None:
        arrived = [] if self._is_ordered else list(self._reducer.arrived)
        running, node = self._state.task, self._node
        self._node = None
        try:
            brought = running is not None and running.brought
            if not brought and node is not None and accumulates(node):
                brought = True  # a backward, which has reached no parameter of ours
                self._on(events.LeafReached(task))
            self._take_late()
            self._on(events.TaskEnded(task))
        except BaseException:
            self._on(events.TaskRaised(task))
            raise
        if brought and running is not None and running.synced and not self._is_ordered:
            self._order_buckets(arrived, running.inside)

    def _order_buckets(self, arrived: list[int], inside: bool) -> None:
        """From now on reduce in the order in which the first backward brought gradients.

        All ranks take the first one's order. What never came then goes last. They also agree on
        whether gradients came from backwards inside; see [Note: early and late].
        """
        self._is_ordered = True
        plan, gradients = self._stepper.plan, self._reducer
        mine = " ".join(map(str, arrived))
        said = first_says(
            f"engine {self._journal.number}, order of gradients", mine, plan.mesh, self.cfg.timeout
        )
        order = dict.fromkeys([*map(int, said.split()), *reversed(self._registered)])
        grouping = plan_order(self._grouping, gradients.leaves, list(order), self.cfg)
        gradients.buckets = grouping.buckets
        (counts,) = self._anywhere(inside)
        self._rules = self._rules._replace(buckets=grouping.masks, counts=counts)

    def _anywhere(self, *here: bool) -> list[bool]:
        """Whether any rank says so; all of them must ask."""
        flags = torch.tensor(here, dtype=torch.float32).to(self._reducer.device)
        return [flag > 0 for flag in self._transport.sum(flags).tolist()]

    def _recover(self) -> None:
        """See to it that no task is open that is over: a call from outside of backward came."""
        task = self._state.task
        if task is not None and current_task() == -1:
            self._raised(task.number)

    def _raised(self, number: int) -> None:
        task = self._state.task
        self._on(events.TaskRaised(number))
        if task is not None and task.number == number:
            self._journal.raised(sent=task.launched > 0)

    # --- the update ---

    def _update(self) -> None:
        gradients, reduces = self._reducer, self._rules.reduces
        self._writes.see()
        source = gradients.reduced if reduces else gradients.kept
        full = not (reduces and gradients.scatter)
        trained = [i for i, leaf in enumerate(gradients.leaves) if leaf.trainable]
        grads = [source[i] if i in source else gradients.zeros(i, full=full) for i in trained]
        losses = self._losses or list(self._scalars.values())
        refuses = self.cfg.nonfinite_policy == "raise"  # and leaves everything as it is
        if not refuses:
            self._clear()
        if not reduces and self._share != 1 and grads:
            multiply = torch._foreach_mul if refuses else torch._foreach_mul_
            grads = list(multiply(grads, self._share) or grads)
        self._journal.enter("update")
        with self._transport.circle.within():
            self._stepper.update(grads, losses)
        self._clear()
        self._writes.ours()
        if self._units is not None:
            self._units.turn()

    def _clear(self) -> None:
        """No gradients, and no losses that they are of."""
        self._reducer.clear()
        self._losses, self._scalars = [], {}

    @property
    def _loss_scale(self) -> Any:
        return self._stepper.opt_state.loss_scale

    def _index(self, name: str) -> int:
        name = self._other_names.get(name, name)
        if name in self._names:
            return self._names[name]
        near = get_close_matches(name, list(self._names), n=3)
        hint = f" Near ones: {', '.join(map(repr, near))}." if near else ""
        raise ShardError(
            f"full_grad({name!r}): the module has no parameter of that name.{hint} Names are those "
            "of model.named_parameters()."
        )


_NO_COPY = (
    "the engine was to be {}, and a copy would share its parameters, process groups and hooks. "
    "Make a second engine of a second module and assign engine.state, save engine.state with "
    "fzero.checkpoint.save, or take copies of the values: engine.full_params()."
)


def _ignore(indices: Sequence[int]) -> None:
    pass
