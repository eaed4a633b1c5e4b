"""Where an engine is between two events: plain data, which `fzero.engine.phases` maps.

A gradient is named alike here and in `reducer.py`: see [Note: where a gradient is] there.
"""

from typing import NamedTuple

from fzero.engine.counts import Counts


class Rules(NamedTuple):
    """What a state machine goes by. `buckets` and `counts` are settled by the first backward.

    Args:
        buckets: bit masks of the leaves that are reduced together, in the order of reduction.
        reduces: whether a backward reduces; else gradients wait for the update, unreduced.
        accum_steps: micro-batches per update.
        scaled: whether gradients must carry a loss scale.
        counts: whether as many gradients as the last time complete a leaf; the same on all ranks.
    """

    buckets: tuple[int, ...]
    reduces: bool = True
    accum_steps: int = 1
    scaled: bool = False
    counts: bool = False


class Task(NamedTuple):
    """The outermost graph task that is running.

    Args:
        number: autograd's.
        synced: whether its gradients are reduced.
        scaled: whether the loss scale was applied in it.
        seen: gradients that have arrived.
        complete: mask of leaves that will get no more.
        launched: how many buckets are under way.
        sent: mask of their leaves.
        extra: mask of leaves that got one more gradient after they were sent.
        reached: the forwards whose outputs got a gradient.
        adopted: their early gradients, which are early again if the task raises.
        inside: whether some gradients came from backwards inside this one or inside a forward.
        brought: whether it came to a leaf; if not, it is `torch.autograd.grad`.
    """

    number: int
    synced: bool
    scaled: bool = False
    seen: Counts = ()
    complete: int = 0
    launched: int = 0
    sent: int = 0
    extra: int = 0
    reached: frozenset[int] = frozenset()
    adopted: tuple[tuple[int, Counts], ...] = ()
    inside: bool = False
    brought: bool = False


class BackwardState(NamedTuple):
    """Where an engine is between two events.

    Args:
        task: the running one, or None.
        running: forwards that have started and not ended, innermost last.
        training: those of them that a backward may reach.
        early: what forwards got from backwards inside them.
        last: the arrivals of the last synced task.
        reached: forwards that a backward has reached since the last update.
        unreduced: whether there are gradients that are not reduced.
        moved: whether a backward has brought gradients since the last call of step.
        fresh: whether a forward or a step came after the last backward.
        paused: how many `no_sync` blocks are open.
        counted: whether one of these backwards has reached a forward.
        latest: the last forward that no backward has reached since the last update, or nothing.
        blocks: the open ones of `local_forward` and `gathered`, innermost last.
        unscaled: whether the gradients were finite when a scaler divided them by its scale; None if
            none did since the last update.
        together: the most forwards that one backward has reached since the last update.
    """

    task: Task | None = None
    running: tuple[int, ...] = ()
    training: tuple[int, ...] = ()
    early: tuple[tuple[int, Counts], ...] = ()
    last: Counts = ()
    reached: frozenset[int] = frozenset()
    unreduced: bool = False
    moved: bool = False
    fresh: bool = True
    paused: int = 0
    counted: bool = False
    latest: tuple[int, ...] = ()
    blocks: tuple[str, ...] = ()
    unscaled: bool | None = None
    together: int = 0

    @property
    def is_local(self) -> bool:
        """Whether this rank may do what other ranks don't: no collective may run."""
        return LOCAL in self.blocks


LOCAL, GATHERED = "local_forward", "gathered"
"""Names of blocks, as messages call them."""
