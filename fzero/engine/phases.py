"""What the eager adapter does when: a pure function from (state, event) to (state, actions).

[Note: graph tasks] Each call into autograd that runs a backward pass is a *graph task* with a
number of its own. The user's call is the outermost one. Re-entrant checkpoints, and functions that
run backward inside backward, start nested ones: gradients that arrive there count for the outermost
task. A backward inside a *forward*, with no task around it, makes early gradients: they wait
until the user's own backward reaches that forward's output. Inside an evaluation, whose output none
reaches, it is a task like any other.

A task is a transaction: what it brought becomes part of the step's gradients at its end, or, if it
raised, not at all.

[Note: buckets] Leaves are reduced in buckets whose order is fixed, and each task reduces every
bucket once, with zeros for what did not come: ranks whose backwards take different ways still run
the same collectives.

[Note: extra gradients] A bucket is sent once its leaves are complete. A leaf that gets gradients
from inside others is complete once it has got as many as the last time; what comes after that is
extra: kept until the next reduction, which is `step()`'s at the latest. A rank may be alone with
extra ones, so where there may be any, all ranks ask each other in `step()`. To spare that word
where no such gradients are, the first backward decides whether leaves are completed by counting at
all.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fzero.engine.backward_state import BackwardState, Rules, Task
from fzero.engine.counts import Counts, add, as_often, count, rarer
from fzero.engine.events import (
    Action,
    Adopt,
    BlockEntered,
    BlockLeft,
    Clear,
    Commit,
    Discard,
    Event,
    Flush,
    Forget,
    ForwardEnded,
    ForwardGone,
    ForwardRaised,
    ForwardStarted,
    GradientReady,
    GradientsReady,
    GradientsTaken,
    GradientsUnscaled,
    GradientsZeroed,
    Launch,
    LeafReached,
    OutputReached,
    Reshard,
    ScaleApplied,
    StepCalled,
    SyncPaused,
    SyncResumed,
    Take,
    TakeAll,
    TakeEarly,
    TaskEnded,
    TaskMet,
    TaskRaised,
    Update,
    Watch,
)
from fzero.errors import BackwardError

Result = tuple[BackwardState, Sequence[Action]]


def transition(rules: Rules, state: BackwardState, event: Event) -> Result:
    """The state after an event, and what to do about it, in order.

    Args:
        rules: of the engine.
        state: before the event; unchanged.
        event: one that can happen now: autograd's tasks nest, forwards end in reverse order.

    Raises:
        BackwardError: the user did something out of order; the state stays as it was.

    Examples:
        >>> rules = Rules(buckets=(0b11,))
        >>> state, actions = BackwardState(), []
        >>> for event in (OutputReached(0, task=7), GradientReady(1, 7), GradientReady(0, 7)):
        ...     state, actions = transition(rules, state, event)
        >>> actions
        (Take(leaf=0), Launch(bucket=0))
        >>> transition(rules, state, TaskEnded(7))[1]
        (Commit(), Reshard())
    """
    return _HANDLERS[type(event)](rules, state, event)


def is_boundary(rules: Rules, state: BackwardState) -> bool:
    """Whether the micro-batch of now is the last one before an update.

    >>> rules = Rules((), accum_steps=2)
    >>> is_boundary(rules, BackwardState()), is_boundary(rules, BackwardState(reached={0}))
    (False, True)
    """
    # `fresh` stands for the micro-batch of now, which no backward has reached yet
    return len(state.reached) + state.fresh >= rules.accum_steps


def untold(rules: Rules, state: BackwardState) -> tuple[int, int]:
    """Which gradients are to be taken without a word, until there is something to do.

    Returns:
        A graph task, of which gradients can be taken; -1 is none. And a bit mask: when the last of
        these leaves has come, or one for the second time, all that came are to be told at once.

    Examples:
        >>> rules = Rules(buckets=(0b11, 0b100))
        >>> state, _ = transition(rules, BackwardState(), GradientReady(1, task=7))
        >>> untold(rules, state)
        (7, 1)
        >>> transition(rules, state, GradientsTaken(0b101, task=7))[1]
        (Launch(bucket=0), Launch(bucket=1))
    """
    task = state.task
    if task is None or not task.synced or state.is_local or (rules.scaled and not task.scaled):
        return -1, 0
    if state.unscaled is not None:  # the first one is to be refused
        return -1, 0
    if task.launched == len(rules.buckets):
        return task.number, -1  # every bit there is: nothing is left to do before the task ends
    return task.number, rules.buckets[task.launched] & ~task.complete


# --- forward -------------------------------------------------------------------------------------


def _forward_started(rules: Rules, state: BackwardState, event: ForwardStarted) -> Result:
    actions: Sequence[Action] = ()
    rests = state.task is None and not state.running
    if state.unscaled is False and event.graph and rests:  # the scaler has passed over their step
        state, actions = _gradients_zeroed(rules, state, GradientsZeroed())
    state = state._replace(running=(*state.running, event.forward))
    if event.graph:
        state = state._replace(training=(*state.training, event.forward), fresh=True)
    return state, actions


def _forward_ended(rules: Rules, state: BackwardState, event: ForwardEnded) -> Result:
    # an evaluation in between leaves the last one that a backward can be of
    latest = (event.forward,) if event.graph else state.latest
    return _out_of(state, event.forward)._replace(latest=latest), ()


def _forward_raised(rules: Rules, state: BackwardState, event: ForwardRaised) -> Result:
    before = state.running
    state = _out_of(state, event.forward)
    # with those inside of it that have not told of it themselves
    broken = before[len(state.running) :]
    actions: list[Action] = []
    for forward in broken:
        state, more = _forward_gone(rules, state, ForwardGone(forward))
        actions += more
    # a forward inside a backward is a checkpoint's: the rest of the task reads parameters yet
    return state, (*actions, Reshard()) if state.task is None else actions


def _forward_gone(rules: Rules, state: BackwardState, event: ForwardGone) -> Result:
    task, early = state.task, _without(state.early, event.forward)
    if len(early) < len(state.early):
        return state._replace(early=early), (Forget(event.forward),)
    if task is not None and len(adopted := _without(task.adopted, event.forward)) < len(
        task.adopted
    ):
        return state._replace(task=task._replace(adopted=adopted)), (Forget(event.forward),)
    return state, ()


def _without(pairs: tuple[tuple[int, Counts], ...], forward: int) -> tuple[tuple[int, Counts], ...]:
    return tuple(pair for pair in pairs if pair[0] != forward)


def _out_of(state: BackwardState, forward: int) -> BackwardState:
    """After a forward and all inside of it."""
    if forward not in state.running:
        return state
    running = state.running[: state.running.index(forward)]
    training = tuple(x for x in state.training if x in running)
    return state._replace(running=running, training=training)


# --- backward ------------------------------------------------------------------------------------


def _task_met(rules: Rules, state: BackwardState, event: TaskMet) -> Result:
    task, actions = _task_of(rules, state, event.task)
    return state._replace(task=task), actions


def _scale_applied(rules: Rules, state: BackwardState, event: ScaleApplied) -> Result:
    task, actions = _task_of(rules, state, event.task)
    return state._replace(task=task._replace(scaled=True)), actions


def _output_reached(rules: Rules, state: BackwardState, event: OutputReached) -> Result:
    task, opened = _task_of(rules, state, event.task)
    if event.forward in task.reached:  # by another output, or another path to this one
        return state, ()
    task = task._replace(reached=task.reached | {event.forward})
    mine = dict(state.early).get(event.forward)
    if mine is None:
        return state._replace(task=task), opened
    early = _without(state.early, event.forward)
    seen = add(task.seen, mine)
    task = task._replace(
        seen=seen,
        complete=task.complete | (as_often(seen, state.last) if rules.counts else 0),
        # what was early may belong to buckets that have left before backward came to the output
        extra=task.extra | mine[0] & task.sent,
        adopted=(*task.adopted, (event.forward, mine)),
        inside=True,
    )
    return state._replace(task=task, early=early), (*opened, Adopt(event.forward))


_WAYS_ON = {
    True: "Call scaler.step(engine.optimizer) and scaler.update() before the next backward, or "
    "engine.zero_grad().",
    False: "They are not finite, so scaler.step(engine.optimizer) passes over them: they are "
    "dropped by the next forward of the module. Before a backward whose forward came earlier, or "
    "was of a part of the module, call engine.zero_grad() after scaler.update().",
}
"""After unscaling, by whether all was finite."""


def _gradient_ready(rules: Rules, state: BackwardState, event: GradientReady) -> Result:
    bit, task, actions = 1 << event.leaf, state.task, ()
    if state.unscaled is not None:
        raise BackwardError(
            "backward reached a parameter after a GradScaler had divided this step's gradients by "
            f"its scale, and more of them would carry it. {_WAYS_ON[state.unscaled]} No gradient "
            "was changed."
        )
    if task is None:
        # an evaluation has no output through which a backward would come to what it kept
        if state.training:  # it carries no loss scale, nor needs it: adopting it puts it on
            forward = state.training[-1]
            counts = dict(state.early)
            counts[forward] = count(counts.get(forward, ()), bit)
            return state._replace(early=tuple(counts.items())), (TakeEarly(event.leaf, forward),)
        task, actions = _task_of(rules, state, event.task)
    if state.blocks and state.is_local:
        raise BackwardError(
            "backward reached a parameter inside engine.local_forward(), where ranks may do "
            "different things, and a gradient is reduced over all of them. Leave the block first; "
            "a backward may come after it. No gradient was changed."
        )
    if rules.scaled and not task.scaled:
        raise BackwardError(
            "backward reached a parameter, and the gradient does not carry the loss scale. With a "
            "loss scale every backward needs it: call engine.backward(loss), or "
            "engine.scale(loss).backward(). No gradient was changed."
        )
    return _counted(rules, state, task, event.task, bit, (*actions, Take(event.leaf)))


def _gradients_taken(rules: Rules, state: BackwardState, event: GradientsTaken) -> Result:
    assert state.task is not None, "told before the first one"
    return _counted(rules, state, state.task, event.task, event.leaves, ())


def _counted(
    rules: Rules,
    state: BackwardState,
    task: Task,
    number: int,
    bits: int,
    actions: tuple[Action, ...],
) -> Result:
    """The running task has one more gradient of each of these leaves, from graph task `number`."""
    seen = count(task.seen, bits)
    complete, inside = task.complete, task.inside
    # a nested task may come again for this leaf, and may yet come if it did the last time
    if number == task.number:
        complete |= bits & ~rarer(seen, state.last)
    else:
        inside = True
        if rules.counts:
            complete |= bits & as_often(seen, state.last)
    launched, sent, buckets = task.launched, task.sent, ()
    extra = task.extra | bits & sent
    if task.synced:
        buckets = rules.buckets
    # in their order only: a bucket that is complete waits for those before it, as on other ranks
    while launched < len(buckets) and not buckets[launched] & ~complete:
        actions = (*actions, Launch(launched))
        sent |= buckets[launched]
        launched += 1
    task = Task(  # not _replace, which takes three times as long
        task.number,
        task.synced,
        task.scaled,
        seen,
        complete,
        launched,
        sent,
        extra,
        task.reached,
        task.adopted,
        inside,
        True,
    )
    return state._replace(task=task), actions


def _leaf_reached(rules: Rules, state: BackwardState, event: LeafReached) -> Result:
    # a task that came to leaves reduces at its end, which in a local block it must not
    if state.task is None or state.is_local:
        return state, ()
    return state._replace(task=state.task._replace(brought=True)), ()


def _gradients_ready(rules: Rules, state: BackwardState, event: GradientsReady) -> Result:
    task = state.task
    assert task is not None, "told before any gradient"
    assert not task.synced, "reductions have to know one by one"
    return state, (TakeAll(),)


def _task_ended(rules: Rules, state: BackwardState, event: TaskEnded) -> Result:
    task = state.task
    if task is None or task.number != event.task:
        return state, ()
    if not task.brought:  # torch.autograd.grad, which is none of our business
        return _task_raised(rules, state, TaskRaised(event.task))
    state = state._replace(task=None)
    # a loss that was left on the module, or a penalty on gradients, reaches no output
    mine = task.reached or frozenset(state.latest)
    state = state._replace(
        reached=state.reached | mine,
        latest=(),
        moved=True,
        fresh=False,
        counted=state.counted or bool(mine),
        together=max(state.together, len(mine - state.reached)),
    )
    if not task.synced:
        return state._replace(unreduced=state.unreduced or bool(task.seen)), (Commit(), Reshard())
    # other ranks may have got gradients of leaves that stayed without one here
    rest = tuple(Launch(i) for i in range(task.launched, len(rules.buckets)))
    return state._replace(last=task.seen, unreduced=bool(task.extra)), (*rest, Commit(), Reshard())


def _task_raised(rules: Rules, state: BackwardState, event: TaskRaised) -> Result:
    if state.task is None or state.task.number != event.task:
        return state, ()
    # the same backward may be run again, and adopts it again
    early = (*state.early, *state.task.adopted)
    return state._replace(task=None, early=early), (Discard(), Reshard())


def _task_of(rules: Rules, state: BackwardState, number: int) -> tuple[Task, tuple[Action, ...]]:
    """The outermost task, opened if there is none."""
    if state.task is not None:
        return state.task, ()
    return Task(number, synced=rules.reduces and not state.paused), (Watch(number),)


# --- between backwards ---------------------------------------------------------------------------


def _sync_paused(rules: Rules, state: BackwardState, event: SyncPaused) -> Result:
    return state._replace(paused=state.paused + 1), ()


def _sync_resumed(rules: Rules, state: BackwardState, event: SyncResumed) -> Result:
    return state._replace(paused=state.paused - 1), ()


def _block_entered(rules: Rules, state: BackwardState, event: BlockEntered) -> Result:
    return state._replace(blocks=(*state.blocks, event.block)), ()


def _block_left(rules: Rules, state: BackwardState, event: BlockLeft) -> Result:
    blocks = [*state.blocks]
    blocks.reverse()
    blocks.remove(event.block)  # the innermost of its name
    return state._replace(blocks=tuple(reversed(blocks))), ()


def _step_called(rules: Rules, state: BackwardState, event: StepCalled) -> Result:
    refuse_inside(state, "step()")
    refuse_in_block(state, "step()")
    if state.paused:
        raise BackwardError(
            "engine.step() was called inside engine.no_sync(), where gradients are not reduced. "
            "Leave the block first: the next step() reduces what it kept."
        )
    # a boundary by word takes what calls before it, which did nothing, have left
    if not state.moved and not (event.boundary and state.reached):
        raise BackwardError(
            "engine.step() was called, and no backward has brought a gradient since the last "
            "step(). Call loss.backward() first, on a loss that depends on the engine's parameters."
        )
    if event.boundary is None and rules.accum_steps > 1 and not state.counted:
        raise BackwardError(
            "engine.step() was called, and no backward since the last step() has reached an output "
            f"of this engine: with accum_steps={rules.accum_steps} there is no micro-batch to "
            "count. Compute the loss from engine(...) or the whole module, not from a part of it, "
            "or use accum_steps=1, where step() is the boundary."
        )
    # before the update: a second call without a backward is an error also below accum_steps
    state = state._replace(moved=False, fresh=True, counted=False)
    few = _lacks_micro_batches(rules, state)
    if few if event.boundary is None else not event.boundary:
        return state, ()
    # where leaves are counted another rank may have kept something: all ask
    flush = (Flush(),) if rules.reduces and (state.unreduced or rules.counts) else ()
    state = state._replace(
        reached=frozenset(), unreduced=False, latest=(), unscaled=None, together=0
    )
    return state, (*flush, Update(), Reshard())


def _gradients_zeroed(rules: Rules, state: BackwardState, event: GradientsZeroed) -> Result:
    refuse_inside(state, "zero_grad()")
    state = state._replace(reached=frozenset(), unreduced=False, moved=False, fresh=True, latest=())
    return state._replace(counted=False, unscaled=None, together=0), (Clear(),)


def _gradients_unscaled(rules: Rules, state: BackwardState, event: GradientsUnscaled) -> Result:
    refuse_to_unscale(rules, state)
    return state._replace(unscaled=event.finite), ()


def refuse_to_unscale(rules: Rules, state: BackwardState) -> None:
    """Raise if what is held is not the gradient of one whole step, with a scaler's scale on it.

    Args:
        rules: of the engine.
        state: of the engine.
    """
    refuse_inside(state, "optimizer, by a GradScaler,")
    refuse_in_block(state, "optimizer, by a GradScaler,")
    asked = "scaler.unscale_(engine.optimizer), or scaler.step(engine.optimizer), was called"
    if not state.moved:
        raise BackwardError(
            f"{asked}, and no backward has brought a gradient since the last step. Call "
            "scaler.scale(loss).backward() first, on a loss that depends on the engine's "
            "parameters."
        )
    if state.unscaled is not None:
        raise BackwardError(f"{asked} twice in one step, whose gradients are divided already.")
    if _lacks_micro_batches(rules, state):
        raise BackwardError(
            f"{asked} after {len(state.reached)} of {rules.accum_steps} micro-batches: it "
            "would divide what is there, and not what is still to come. Call the scaler's step "
            "and update once in so many: if engine.is_gradient_accumulation_boundary(): ..."
        )


def _lacks_micro_batches(rules: Rules, state: BackwardState) -> bool:
    return rules.accum_steps > 1 and len(state.reached) < rules.accum_steps


def refuse_inside(state: BackwardState, what: str) -> None:
    """Raise if a forward or a backward runs.

    Args:
        state: of the engine.
        what: was called.
    """
    if state.task is not None or state.running:
        where = "a backward" if state.task is not None else "a forward"
        raise BackwardError(
            f"engine.{what} was called inside {where} of this engine. Call it between passes."
        )


def refuse_in_block(state: BackwardState, what: str) -> None:
    """Raise inside `local_forward` and `gathered`, which hold the parameters of before.

    Args:
        state: of the engine.
        what: was called.
    """
    if state.blocks:
        raise BackwardError(
            f"engine.{what} was called inside engine.{state.blocks[-1]}(), which holds full "
            "parameters as they were: what it wrote would not be seen, or be overwritten. Leave "
            "the block first."
        )


_HANDLERS: dict[type, Callable[[Rules, BackwardState, Any], Result]] = {
    ForwardStarted: _forward_started,
    TaskMet: _task_met,
    ForwardEnded: _forward_ended,
    ForwardRaised: _forward_raised,
    ForwardGone: _forward_gone,
    OutputReached: _output_reached,
    ScaleApplied: _scale_applied,
    GradientReady: _gradient_ready,
    GradientsTaken: _gradients_taken,
    LeafReached: _leaf_reached,
    GradientsReady: _gradients_ready,
    TaskEnded: _task_ended,
    TaskRaised: _task_raised,
    SyncPaused: _sync_paused,
    SyncResumed: _sync_resumed,
    BlockEntered: _block_entered,
    BlockLeft: _block_left,
    StepCalled: _step_called,
    GradientsZeroed: _gradients_zeroed,
    GradientsUnscaled: _gradients_unscaled,
}
