"""What happens to an engine, and what it does about it: the words of `fzero.engine.phases`."""

from typing import NamedTuple

# --- events: what happened -----------------------------------------------------------------------


class ForwardStarted(NamedTuple):
    """A forward begins; one without a `graph` is an evaluation, which is no micro-batch."""

    forward: int
    graph: bool = True


class ForwardEnded(NamedTuple):
    """A forward is over; `graph` says whether backward can go through it."""

    forward: int
    graph: bool = True


class ForwardRaised(NamedTuple):
    forward: int


class ForwardGone(NamedTuple):
    """Nobody can call backward on its output any more."""

    forward: int


class OutputReached(NamedTuple):
    """A gradient has come to an output of a forward."""

    forward: int
    task: int


class TaskMet(NamedTuple):
    """A forward begins inside a graph task, or one comes to an output of a forward of another's.

    It is the outermost task there is.
    """

    task: int


class ScaleApplied(NamedTuple):
    """The gradients of a task carry the loss scale."""

    task: int


class GradientReady(NamedTuple):
    """A leaf has got the gradient that one graph task had for it."""

    leaf: int
    task: int


class GradientsTaken(NamedTuple):
    """More leaves have got gradients of the running task, which has taken them: `phases.untold`.

    `leaves` is their bit mask.
    """

    leaves: int
    task: int


class LeafReached(NamedTuple):
    """A graph task has come to a leaf and has no gradient for it."""

    task: int


class GradientsReady(NamedTuple):
    """More leaves of a task that is not synced have got gradients; told at once, before its end."""

    task: int


class TaskEnded(NamedTuple):
    task: int


class TaskRaised(NamedTuple):
    task: int


class SyncPaused(NamedTuple):
    """A `no_sync` block was entered."""


class SyncResumed(NamedTuple):
    """A `no_sync` block was left."""


class BlockEntered(NamedTuple):
    """`local_forward` or `gathered`: from here to its end full parameters are there."""

    block: str


class BlockLeft(NamedTuple):
    block: str


class StepCalled(NamedTuple):
    """`boundary` says whether to update; None: go by the number of micro-batches."""

    boundary: bool | None = None


class GradientsZeroed(NamedTuple):
    pass


class GradientsUnscaled(NamedTuple):
    """A scaler has divided the step's gradients by its scale; `finite` on every rank, or not."""

    finite: bool


# --- actions: what to do -------------------------------------------------------------------------


class Watch(NamedTuple):
    """Have autograd tell when this task ends, or that it broke off."""

    task: int


class TakeEarly(NamedTuple):
    """The gradient that has just arrived waits for the task that will reach this forward."""

    leaf: int
    forward: int


class Adopt(NamedTuple):
    """The early gradients of this forward are the task's."""

    forward: int


class Forget(NamedTuple):
    """Drop the early gradients of this forward."""

    forward: int


class Take(NamedTuple):
    """The gradient that has just arrived is the task's."""

    leaf: int


class TakeAll(NamedTuple):
    """The gradients that have arrived since the last word of them are the task's."""


class Launch(NamedTuple):
    """Reduce a bucket: what is unreduced and what the task has of it, zeros for the rest."""

    bucket: int


class Commit(NamedTuple):
    """Wait for the reductions; what they gave, and what is left unreduced, is the step's."""


class Discard(NamedTuple):
    """Drop what the task brought; what it took of those early and unreduced is so again."""


class Flush(NamedTuple):
    """Reduce what is unreduced, if any rank has something."""


class Update(NamedTuple):
    """Update the parameters from the step's gradients, which are then gone."""


class Reshard(NamedTuple):
    """Full parameters may be freed."""


class Clear(NamedTuple):
    """Drop the step's gradients."""


Event = (
    TaskMet
    | ForwardStarted
    | ForwardEnded
    | ForwardRaised
    | ForwardGone
    | OutputReached
    | ScaleApplied
    | GradientReady
    | GradientsTaken
    | LeafReached
    | GradientsReady
    | TaskEnded
    | TaskRaised
    | SyncPaused
    | SyncResumed
    | BlockEntered
    | BlockLeft
    | StepCalled
    | GradientsZeroed
    | GradientsUnscaled
)
Action = (
    Watch
    | TakeEarly
    | Adopt
    | Forget
    | Take
    | TakeAll
    | Launch
    | Commit
    | Discard
    | Flush
    | Update
    | Reshard
    | Clear
)
