"""What moves an engine: autograd's callbacks become events, and actions are carried out.

The rules are `fzero.engine.phases`', a pure function. Here is what it can't be: hooks, tensors and
collectives.
"""

import contextlib
import itertools
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fzero import tree
from fzero.config import Config
from fzero.distributed.rendezvous import says
from fzero.eager.owned import raw_grad, set_raw_grad
from fzero.engine import events, phases
from fzero.engine.attach import gather_around, install
from fzero.engine.autograd import (
    AccumulateHooks,
    accumulates,
    current_node,
    own,
    scaled,
    take_left,
    watch,
)
from fzero.engine.backward_state import BackwardState
from fzero.engine.compiled import CompiledCalls, explained
from fzero.engine.correction import Correction
from fzero.engine.forward import Door, Forward
from fzero.engine.frozen import Wishes
from fzero.engine.grouping import plan_order
from fzero.engine.losses import Losses
from fzero.engine.parts import Parts
from fzero.engine.phases import transition
from fzero.engine.threads import Seat
from fzero.engine.writes import Writes
from fzero.errors import BackwardError, users_line
from fzero.functional.slots import ParameterSlots
from fzero.functional.tasks import current_task
from fzero.layout import LeafLayout


class Driver:
    """The moving part of an `Engine`: the only code there that acts.

    Hooks on the module, its parameters and its outputs hold it weakly: it is gone with its engine.

    Args:
        model: taken over, in place.
        slots: where its parameters sit.
        params: these, by name.
        parts: what the engine is made of.
        cfg: the engine's.

    Attributes:
        state: of the state machine; only events change it.
        params: the module's parameters by index, from now on.
        writes: what sees to it that they stay so.
        losses: of the step.
        handles: of its hooks on modules.
        seat: of the thread that is inside; see [Note: one thread at a time].
    """

    def __init__(
        self,
        model: nn.Module,
        slots: ParameterSlots,
        params: dict[str, nn.Parameter],
        parts: Parts,
        cfg: Config,
    ) -> None:
        self.module, self.cfg = model, cfg
        self.journal, self.transport, self.stepper = parts.journal, parts.transport, parts.stepper
        self.units, self.reducer, self.rules = parts.units, parts.reducer, parts.rules
        self._registered, self._grouping = parts.registered, parts.grouping
        self._is_ordered = not parts.rules.reduces  # there are no buckets to order
        self.state = BackwardState()
        self.losses = Losses()
        self._forwards = itertools.count()
        self._gone: deque[int] = deque()  # forwards that are over, not told yet
        self._open: set[int] = set()  # forwards of this step that a backward may yet reach
        self._busy = False  # between an event and the state that follows from it
        self._thread = threading.get_ident()
        self._calling = False  # inside the engine's own call
        self._cut_short = 0  # accumulations since the last update that zero_grad() has ended
        self._told_of_several = False
        self._came = False  # whether a backward has come to something of this engine
        # of a synced one, those that were taken untold: see `phases.untold`
        self._quiet, self._awaited, self._taken = -1, 0, 0
        self._correction = Correction(cfg.accum_steps, self.stepper)
        # of the running task: whether other ranks take part; a node that it runs through
        self._entered = False
        self._node: Any = None
        # for hooks, which must not keep it alive
        me: weakref.ref[Any] = weakref.ref(self)
        self.seat = Seat(me)
        # of an unsynced task they tell of the first arrival; of others each is an event
        self._hooks = AccumulateHooks(me)
        leaves = self.reducer.leaves
        self.handles: list[RemovableHandle] = []
        if self.units is not None:
            self.handles += gather_around(model, self.units, parts.grouping)
        self.params = install(
            slots, params, leaves, self.stepper.locals, self.units, self._hooks, me
        )
        self._hooked = {leaf: x for leaf, x in self.params.items() if leaves[leaf].trainable}
        door = Door(me).install(model)
        self.handles += door
        if self.units is None:  # else its parameters are gone with it, and what is left says so
            # many engines on one module, one after the other: each takes its own hooks with it
            weakref.finalize(self, _take_out, door).atexit = False
        self.writes = Writes(model, self.params, leaves, self.stepper, lazy=self.units is not None)
        self._wishes = Wishes(self.params, leaves)
        self._order: list[int] = list(reversed(self._registered))  # of gradients, as they come
        self._versions = self.writes.versions()  # of before a forward without the engine's call
        self.compiled: CompiledCalls | None = None
        if self.units is not None:
            self.compiled = CompiledCalls(self.units, tree.leaves(self.stepper.params))

    # --- what its engine asks ---

    @contextlib.contextmanager
    def forward(self) -> Iterator[Forward]:
        """The engine's own call runs in it, and gives to `returned` what it gives out."""
        self.seat.take("a forward", "engine(...) was called", current_task())
        try:
            self._begin()
            forward = Forward(self, next(self._forwards))
            # a checkpoint computes again: backwards inside this forward are nested in that task
            if (task := current_task()) != -1:
                self.on(events.TaskMet(task))
            calling = self._calling
            try:  # around the event, too: an interrupt may come at any line
                self.on(events.ForwardStarted(forward.number, self._trains()))
                self._calling = True  # the door is to keep quiet meanwhile
                yield forward
            except BaseException as error:
                self._forward_raised(forward.number)
                if self.units is not None and (told := explained(error)) is not None:
                    raise told from error
                raise
            finally:
                self._calling = calling
        finally:
            self._leave()

    def returned(self, forward: Forward, out: Any) -> None:
        """A forward has ended: backward is to tell when it reaches what it gave."""
        trains = self._trains()
        self.on(events.ForwardEnded(forward.number, trains))
        if torch.is_grad_enabled():
            forward.hook(out, trains=trains)
        if trains:
            self._open.add(forward.number)
        self._end()

    def _trains(self) -> bool:
        """Whether a forward of now is a micro-batch, and no evaluation or another's forward."""
        return torch.is_grad_enabled() and self._wishes.any()

    def _begin(self) -> None:
        """A pass through the module begins, on all ranks unless they are in a local block."""
        evaluates = not torch.is_grad_enabled()
        if evaluates:
            self.stepper.refuse_interrupted()
        else:
            self.stepper.refuse_donated("a forward began")
        if self.units is not None:
            assert self.compiled is not None
            self.compiled.find(self.writes.modules)
            if self.is_at_rest:
                self.units.reshard()  # engine.state may have been written since they were gathered
            # of one rank's own passes the others' guesses of what comes next would know nothing
            if evaluates and not self.state.is_local:
                self.units.evaluate()
        if not evaluates and self.is_at_rest and not self.state.is_local:
            self._settle()
        if not self.state.is_local:
            self.journal.enter("evaluation" if evaluates else "forward")

    def _settle(self) -> None:
        """See which parameters are trained; see [Note: frozen between steps]."""
        wishes = self._wishes
        # what an earlier forward of this step has read may yet get a gradient
        if not wishes.changed(grows=not self.reducer.is_empty or bool(self._open)):
            return
        plan = self.stepper.plan
        wishes.agree(plan)
        leaves = wishes.now()
        self.stepper.train(leaves)
        self._group(leaves)

    def _group(self, leaves: Sequence[LeafLayout]) -> None:
        """Reduce what is trained of these, in the order in which it is likely to come."""
        alone = self.stepper.plan.axes.world == 1
        grouping = plan_order(self._grouping, leaves, self._order, self.cfg, alone=alone)
        self.reducer.group(leaves, grouping.buckets)
        self.rules = self.rules._replace(buckets=grouping.masks if self.rules.reduces else ())

    def _end(self) -> None:
        """A pass has ended; after an evaluation no backward will free what it has gathered."""
        if self.units is not None and not torch.is_grad_enabled():
            self.units.train()
            if self.is_at_rest:
                self.units.reshard()

    def _forward_raised(self, number: int) -> None:
        self.on(events.ForwardRaised(number))
        if self.state.task is None:
            self._broke_off(sent=False)
        self._end()

    def _broke_off(self, *, sent: bool) -> None:
        """A pass has raised; in a local block no other rank waits for it."""
        if not self.state.is_local:
            self.journal.raised(sent=sent)

    def backward(self, loss: Tensor, *, retain_graph: bool, divided: bool) -> bool:
        """Run `loss.backward()`; whether it came to something of this engine.

        Args:
            loss: with the loss scale on it.
            retain_graph: as of `Tensor.backward`.
            divided: whether to divide by `accum_steps`.
        """
        self.seat.take("a backward", "engine.backward(loss) was called", current_task())
        try:
            # one inside another's task, or inside a forward, may come to nothing that is told yet
            self._came = current_task() != -1 or bool(self.state.running)
            self._correction.divides = divided
            try:
                loss.backward(retain_graph=retain_graph)
            finally:
                self._correction.divides = True
            return self._came
        finally:
            self._leave()

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale; itself if there is none, or if it has this one's already."""
        now = self.stepper.opt_state.loss_scale
        if now is None or not self.rules.scaled:
            return loss
        return scaled(loss, now.scale, self.scale_applied)

    @property
    def weight(self) -> float:
        """Of this rank's gradients and losses among all ranks'; 0 where its data is over."""
        return self._correction.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._correction.weight = self.losses.weight = weight

    @property
    def is_at_rest(self) -> bool:
        """Whether neither a forward nor a backward runs."""
        return self.state.task is None and not self.state.running

    def recover(self, what: str) -> None:
        """See to it that no task and no forward is open that is over: a call from outside of
        backward came.

        Autograd destroys a task that raised, and its watcher with it, but not at once where the
        exception's traceback still holds them. A forward tells by itself, unless an interrupt has
        come to the very line that would.

        Args:
            what: happened, for the message: "engine.step() was called".

        Raises:
            BackwardError: another thread is inside.
        """
        self.seat.refuse(what)
        self._close(is_over=self.state.task is not None and current_task() == -1)

    def abandoned(self) -> None:
        """The thread that had the seat is gone: no task and no forward of its goes on."""
        self._close(is_over=True)

    def _close(self, *, is_over: bool) -> None:
        task = self.state.task
        if task is not None and is_over:
            self._raised(task.number)
        if (self.state.running or self._calling) and not self._is_called():
            self._calling = False
            if self.state.running:
                self._forward_raised(self.state.running[0])
            self._leave()

    @contextlib.contextmanager
    def alone(self, where: str, what: str = "") -> Iterator[None]:
        """`recover`, and inside no other thread begins anything.

        Args:
            where: what begins, for others' messages: "step()".
            what: happened, for one's own; empty: that this was called.

        Raises:
            BackwardError: another thread is inside.
        """
        what = what or f"engine.{where} was called"
        self.recover(what)
        free = self.seat.take(where, what, current_task())
        try:
            yield
        finally:
            if free:
                self._leave()

    def _leave(self) -> None:
        """A pass is over, and with the outermost one the seat is free."""
        if self.is_at_rest and not self._calling:
            self.seat.leave()

    def _is_called(self) -> bool:
        """Whether some thread is inside `forward`: who is there has both in its frame."""
        for top in sys._current_frames().values():
            frame = top
            while frame is not None:
                if "driver" in frame.f_code.co_varnames:
                    there = frame.f_locals
                    if there.get("driver") is self and isinstance(there.get("forward"), Forward):
                        return True
                frame = frame.f_back
        return False

    def settle(self, what: str) -> None:
        """`recover`, and the engine trains what the module has: a call that reads or writes it."""
        self.recover(what)
        self.writes.take()

    # --- what hooks tell ---

    def calls_directly(self) -> None:
        """The module is about to run without the engine's call: a forward like any other.

        A function made of it by `functionalize` runs it too, with tensors of its caller's.
        """
        if not self._is_calling() and not self.writes.is_lent():
            self.recover("the module was called")
            self.seat.take("a forward", "the module was called", current_task())
            self._versions = self.writes.versions()
            self._begin()

    def called_directly(self, out: Any) -> None:
        """The module has run without the engine's call.

        Raises:
            FzeroError: it changed a trained parameter in place, and there are several ranks.
        """
        if self._is_calling() or self.writes.is_lent():
            return
        self.recover("the module was called")
        self.writes.unwritten_since(self._versions)
        forward = Forward(self, next(self._forwards))
        self.on(events.ForwardStarted(forward.number, self._trains()))
        self.returned(forward, out)

    def left_directly(self) -> None:
        """It has, or it has raised: then nothing has ended yet."""
        if not self._calling and not self.seat.is_taken_by_another():  # which had it refused
            self._end()
            self._leave()

    def _is_calling(self) -> bool:
        """Whether this thread is inside the engine's own call."""
        # Dynamo reads along where a whole module is compiled, and asks for no thread
        compiling = torch.compiler.is_compiling()
        return self._calling and (compiling or not self.seat.is_taken_by_another())

    def output_reached(self, forward: int, loss: Tensor | None, *, trains: bool) -> None:
        """A gradient has come to an output of a forward, which may have had a loss."""
        self._take_task(current_task())
        self._came = True
        if not trains:  # on its way to another's parameters; what it gathers is freed at its end
            self.on(events.TaskMet(current_task()))
            return
        self.on(events.OutputReached(forward, current_task()))
        self._open.discard(forward)
        if self._node is None:
            self._node = current_node()
        if loss is not None:
            self.losses.reached[forward] = loss

    def forward_gone(self, forward: int) -> None:
        """Nobody can call backward on its outputs any more."""
        # The collector comes whenever it likes: between an event and the state that follows, or in
        # another thread. So it is noted, and told with the next event.
        self._open.discard(forward)
        self._gone.append(forward)
        if not self._busy and threading.get_ident() == (self.seat.thread or self._thread):
            self._tell_gone()

    def _tell_gone(self) -> None:
        while self._gone:
            forward = self._gone.popleft()
            if self.reducer.early:  # else there is nothing to forget, and most forwards end here
                self.on(events.ForwardGone(forward))

    def scale_applied(self, factor: Tensor) -> None:
        """Gradients that carry `factor` start on their way through the running task."""
        self._take_task(current_task())
        self.on(events.ScaleApplied(current_task()))  # opens the task, and with it the correction
        self._correction.carries(factor)

    # --- what its parameters ask ([Note: owned parameters]) ---

    def holds(self, index: int) -> bool:
        """Whether there is a gradient of this leaf."""
        return self.reducer.has(index)

    def drop(self, index: int) -> None:
        """Drop the gradients of one leaf; with the last one accumulation starts again."""
        with self.alone("zero_grad()", "zero_grad(), or p.grad = None, came"):
            if not self.holds(index):
                return
            phases.refuse_inside(self.state, "zero_grad(), or p.grad = None,")
            self.reducer.drop(index)
            if not any(map(self.holds, self.params)):
                self.zero()

    def zero(self) -> None:
        """Drop all gradients; warn if it is for want of that that nothing is ever updated."""
        # step() has been called since the last backward, and was not yet at the boundary
        if self.state.reached and not self.state.moved:
            self._cut_short += 1
            if self._cut_short == 2:
                warnings.warn(_CUT_SHORT.format(self.cfg.accum_steps), stacklevel=users_line())
        self.on(events.GradientsZeroed())

    def tell_of_several(self) -> None:
        """Warn, once, if `step()` goes by a number that one backward raised by more than one."""
        several, wanted = self.state.together, self.cfg.accum_steps
        if several > 1 and wanted > 1 and not self._told_of_several:
            self._told_of_several = True
            warnings.warn(_SEVERAL.format(several, wanted, wanted - 1), stacklevel=users_line())

    def unscale(self, factor: Tensor) -> bool:
        """Multiply the gradients of this step by `factor`; whether all ranks' were finite."""
        with self.alone("unscale_()", "scaler.unscale_(engine.optimizer) was called"):
            return self._unscale(factor)

    def _unscale(self, factor: Tensor) -> bool:
        if self.cfg.scaling is not None:
            raise BackwardError(
                "a GradScaler was given engine.optimizer, and Config has a loss scale of its own "
                f"(loss_scale={self.cfg.loss_scale!r}, precision={self.cfg.precision!r}). Use one "
                "of them: Config(loss_scale=None) with autocast, or engine.backward(loss) without "
                "a scaler. No gradient was changed."
            )
        phases.refuse_to_unscale(self.rules, self.state)
        self.reducer.refuse_half_done("a GradScaler was to divide an engine's gradients")
        self.journal.enter("unscale")
        finite = self.reducer.unscale(factor)
        self.losses.unscale(factor)
        self.on(events.GradientsUnscaled(finite))
        self.reducer.unscaled()
        return finite

    # --- events and actions ---

    def on(self, event: events.Event) -> None:
        """Something happened: do what follows from it.

        Raises:
            BackwardError: it was out of order; nothing has changed.
        """
        self._tell_taken()
        busy, before, begun = self._busy, self.state, False
        try:
            self._busy = True
            actions = self._move(event)
            self._busy = busy
            for action in actions:
                begun = True
                self._do(action)
        except BaseException:
            self._busy = busy
            # where nothing was done, nothing has happened; a step that failed before it used its
            # gradients up can be called again; of a task that failed at its end, TaskRaised is to
            # find that it was open
            untouched = isinstance(event, events.StepCalled) and self.reducer.present
            if not begun or isinstance(event, events.TaskEnded) or untouched:
                self.state = before
                self._quiet, self._awaited = phases.untold(self.rules, before)
            raise
        if self._gone and not busy:
            self._tell_gone()

    def _move(self, event: events.Event) -> Sequence[events.Action]:
        self.state, actions = transition(self.rules, self.state, event)
        self._quiet, self._awaited = phases.untold(self.rules, self.state)
        return actions

    def _tell_taken(self) -> None:
        if self._taken:
            event, self._taken = events.GradientsTaken(self._taken, self._quiet), 0
            self.on(event)

    def _do(self, action: events.Action) -> None:
        reducer = self.reducer
        match action:
            case events.Launch(bucket):
                if not self._entered:  # a task that reduces nothing is no business of other ranks
                    self._entered = True
                    self.journal.enter("backward")
                reducer.launch(bucket)
            case events.Watch(task):
                self._correction.open()
                # backward of lazy parameters gathers them, which other ranks take part in
                self._entered, self._node = self.units is not None, None
                if self._entered and not self.state.is_local:
                    self.journal.enter("backward")
                # the graph task holds these, and so this, for as long as it runs
                watch(lambda: self._ended(task), lambda: self._raised(task))
            case events.Adopt(forward):
                reducer.adopt(forward, self._correction.of_aside(scaled=self.rules.scaled))
            case events.Forget(forward):
                reducer.forget(forward)
            case events.Commit():
                reducer.commit()
                self.losses.commit()
            case events.TakeAll():
                self._take_all()
            case events.Discard():
                for param in self._hooked.values():
                    set_raw_grad(param, None)
                self._hooks.tell()
                self.losses.discard()
                reducer.discard()
            case events.Flush():
                # where leaves are counted, a rank may be alone with what it kept, or without
                if not self.rules.counts or reducer.anywhere(bool(reducer.unreduced))[0]:
                    self.journal.enter("flush")
                    reducer.flush()
            case events.Clear():
                self._clear()
            case events.Reshard():
                if self.units is not None:
                    self.units.reshard()
            case events.Update():
                self._update()
            case _:
                raise AssertionError(action)

    # --- gradients arrive ---

    def arrived(self, param: Any) -> None:
        """Autograd has accumulated a gradient into a parameter."""
        grad = raw_grad(param)
        if grad is None:  # a function took the parameter and returned None for it
            self._take_task(current_task())
            self._came = True
            self.on(events.LeafReached(current_task()))
            return
        set_raw_grad(param, None)
        index = param.fzero_owner.leaf_index
        bit = 1 << index
        grad = own(grad)
        number = current_task()
        if number == self._quiet and not self._taken & bit:  # this runs once a parameter
            self._came = True
            if self._correction.factor is not None:
                self._correction.apply([grad])
            self.reducer.take(index, grad)
            self._taken |= bit
            self._awaited &= ~bit
            if not self._awaited:
                self._tell_taken()
            return
        self._take_task(number)
        self._came = True
        self._tell_taken()
        self._busy = True
        try:
            actions = self._move(events.GradientReady(index, number))
        finally:
            self._busy = False
        for action in actions:
            kind = type(action)
            if kind is events.Take:
                if self._correction.factor is not None:
                    self._correction.apply([grad])
                self.reducer.take(index, grad)
            elif kind is events.TakeEarly:
                self.reducer.take_early(index, action.forward, grad)  # pyright: ignore
            else:
                self._do(action)
        task = self.state.task
        if task is not None and not task.synced:
            self._hooks.clear()  # the first has opened the task; the others need no event

    def _take_task(self, task: int) -> None:
        """The running graph task brings something: it is of the thread that is inside, if any."""
        self.seat.take("a backward", "backward came to this engine", task)

    def _take_deferred(self) -> None:
        """The gradients of an unsynced task, which are where autograd has put them."""
        if not self._hooks:
            task = self.state.task
            assert task is not None
            self.on(events.GradientsReady(task.number))
            self._hooks.tell()

    def _take_all(self) -> None:
        factor, writes = self._correction.factor, self.reducer.accumulates
        grads = take_left(self._hooked, alone=writes or factor is not None)
        if factor is not None:
            self._correction.apply([*grads.values()])
        self.reducer.take_all(grads)

    # --- a task is over ---

    def _ended(self, task: int) -> None:
        try:
            self._end_task(task)
        finally:
            self._leave()

    def _end_task(self, task: int) -> None:
        running, arrived = self.state.task, list[int]()
        try:
            if not self._is_ordered:  # the commit forgets in which order they came
                arrived += self.reducer.arrived
            node, self._node = self._node, None
            brought = running is not None and running.brought
            if not brought and node is not None and accumulates(node):
                brought = True  # a backward, which has reached no parameter of ours
                self.on(events.LeafReached(task))
            self._take_deferred()
            self.on(events.TaskEnded(task))
        except BaseException:
            self.on(events.TaskRaised(task))
            raise
        if brought and running is not None and running.synced and not self._is_ordered:
            self._order_buckets(arrived, running.inside)

    def _raised(self, number: int) -> None:
        task = self.state.task
        # a watcher may be collected late, in any thread
        if task is None or task.number != number:
            return
        try:
            self.on(events.TaskRaised(number))
            self._broke_off(sent=task.launched > 0)
        finally:
            self._leave()

    def _order_buckets(self, arrived: list[int], inside: bool) -> None:
        """From now on reduce in the order in which the first backward brought gradients.

        All ranks take the first one's order. What never came then goes last. They also agree on
        whether gradients came from backwards inside; see [Note: extra gradients].
        """
        self._is_ordered = True
        plan, reducer = self.stepper.plan, self.reducer
        mine = " ".join(map(str, arrived))
        said = says(
            f"engine {self.journal.number}, order of gradients",
            mine,
            plan.mesh,
            timeout=self.cfg.timeout,
        )
        order = dict.fromkeys([*map(int, said.split()), *reversed(self._registered)])
        self._order = list(order)
        self._group(reducer.leaves)
        (counts,) = reducer.anywhere(inside)
        self.rules = self.rules._replace(counts=counts)

    # --- the update ---

    def _update(self) -> None:
        self.stepper.refuse_donated("engine.step() was called")
        self._cut_short = 0
        self.writes.see()
        refuses = self.cfg.nonfinite_policy == "raise"  # and leaves everything as it is
        losses, sums = self.losses.of_step(), self.reducer.sums_held
        grads = self.reducer.for_update(reduces=self.rules.reduces, in_place=not refuses)
        if not refuses:
            self._clear()  # before the update, which then is alone with their memory
        self.journal.enter("update")
        with self.transport.circle.within():
            self.stepper.update(grads, losses, sums)
        self._clear()
        self.writes.ours()
        if self.units is not None:
            self.units.turn()

    def _clear(self) -> None:
        """No gradients, and no losses that they are of."""
        self._open.clear()
        self.reducer.clear()
        self.losses.clear()


def _take_out(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


_SEVERAL = (
    "one backward has reached {0} forwards of this engine, and engine.step() counts each as one of "
    "accum_steps={1} micro-batches. If they are one loss (two views of a sample, real and fake "
    "batches), it updates too early: say when, engine.step(i % {1} == {2}). If they are "
    "micro-batches, call backward for each, or filter this warning."
)
_CUT_SHORT = (
    "zero_grad() has dropped the gradients of a step that was not complete, for the second time "
    "since the last update: with accum_steps={} engine.step() updates once so many micro-batches "
    "have come, and each time they began anew. Leave zero_grad() out, as an update drops gradients "
    "by itself; or call it after updates alone (engine.is_gradient_accumulation_boundary())."
)
