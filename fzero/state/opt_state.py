"""What a step keeps beside the parameters."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from fzero import tree
from fzero.distributed.dtensor import local_tensor
from fzero.errors import ShardError
from fzero.state.masters import copied
from fzero.state.sharding import locals_of
from fzero.tree import PyTree


class OptState(NamedTuple):
    """The state of a `TrainStep` between two calls; a pytree.

    Args:
        step: 0-d int64, calls so far: on the host. With a loss scale those that did not overflow,
            which only the device knows: there, reading it waits.
        inner: the optimizer's state; leaves like the parameters are `DTensor`s at stage >= 1.
        master: high-precision shards of the trained leaves, where the parameters themselves are in
            a low precision; or None.
        loss_scale: the loss scale's state, or None.
        model_state: what the model function carries from call to call, or None; the same on every
            rank.
        metrics: of the last call: `loss`, `grad_norm`, `nonfinite`, `skipped`, `loss_scale`, and
            `lr` if the optimizer tells one: 0-d tensors, the same on every rank; `aux` is this
            rank's own. Reading one is the only synchronisation with a device.
    """

    step: Tensor
    inner: PyTree
    master: PyTree
    loss_scale: Any
    model_state: PyTree
    metrics: dict[str, Any]

    def __repr__(self) -> str:
        def said(name: str) -> str:
            leaves = [x for x in tree.leaves(getattr(self, name)) if isinstance(x, Tensor)]
            mine = sum(local_tensor(x).nbytes for x in leaves)
            whole = sum(x.numel() * x.itemsize for x in leaves)
            sizes = f"{_size(mine)} here" + (f" of {_size(whole)}" if mine != whole else "")
            return f"{name}={len(leaves)} tensors, {sizes}" if leaves else ""

        parts = [said("inner"), said("master"), said("model_state")]
        parts += ["a loss scale"] if self.loss_scale is not None else []
        parts += [f"metrics={list(self.metrics)}"] if self.metrics else []
        shown = [part for part in parts if part]
        return f"OptState({'; '.join([f'step={self.step}', *shown])})"


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 2**20 else f"{nbytes / 2**20:,.1f} MiB"


class _Note(NamedTuple):
    """[Note: what is written over] Nobody is to take a state twice that a step writes over.

    So there is a note on its `step`, the one tensor of a state that each call makes anew: from
    before the first write on that an update has it in hand, at the end that it is spent. An update
    that breaks off in between (Ctrl-C, ranks that differ) can't be undone, and leaves the first
    note. It holds for these very containers: not for a copy, nor for what `fzero.checkpoint.load`
    gives back.
    """

    owner: "Owner"
    spent: bool


Owner = tuple[Any, Any]
"""The containers of a state, its `inner` and `metrics`."""


def spend(opt_state: OptState) -> None:
    """Note that a step has written over what this state holds."""
    setattr(opt_state.step, _NOTE, _Note((opt_state.inner, opt_state.metrics), True))


@contextlib.contextmanager
def in_hand(local: "LocalState", untouched: Callable[[BaseException], bool]) -> Iterator[None]:
    """An update writes over this state inside, and notes it; see [Note: what is written over].

    Args:
        local: of the state, or of a copy.
        untouched: whether nothing was written yet when this was raised.
    """
    if local.owner is None:
        yield
        return
    before = getattr(local.step, _NOTE, None)
    setattr(local.step, _NOTE, _Note(local.owner, False))
    try:
        yield
    except BaseException as error:
        if untouched(error):
            setattr(local.step, _NOTE, before)
        raise


def not_written(local: "LocalState") -> None:
    """Note that an update of this state has come to its end, and has changed nothing."""
    if local.owner is not None:
        setattr(local.step, _NOTE, None)


def refuse_spent(opt_state: OptState) -> None:
    """Raise a ShardError if a step has written over this state, or has begun to.

    Examples:
        >>> import fzero, torch
        >>> step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(0.1))
        >>> params, opt_state = step_fn.init({"w": torch.ones(3)})
        >>> _ = step_fn(params, opt_state, torch.ones(3))
        >>> step_fn(params, opt_state, torch.ones(3))
        Traceback (most recent call last):
        ...
        fzero.errors.ShardError: opt_state is that of an earlier step, ...
    """
    refuse_interrupted(opt_state)
    if is_spent(opt_state):
        raise ShardError(
            f"opt_state is that of an earlier step, {opt_state.step}, and the step has written its "
            "results over it, and over params. Go on with what that call returned, params, "
            "opt_state = step_fn(params, opt_state, batch), or with engine.state, read anew; keep "
            "a copy, fzero.tree_map(torch.clone, (params, opt_state)), made before the call; or, "
            "of a step function, say Config(donate=False)."
        )


def refuse_interrupted(opt_state: OptState) -> None:
    """Raise a ShardError if an update of this state did not come to its end."""
    if (note := _note_of(opt_state)) is not None and not note.spent:
        raise ShardError(
            f"opt_state is that of step {opt_state.step}, and an update of this state "
            "broke off after it began to write: some of its tensors, or of params, may be of the "
            "next step, and what they were is gone. Go on from a checkpoint: params, opt_state, or "
            "engine.state, = fzero.checkpoint.load(path, params, opt_state)."
        )


def is_spent(opt_state: OptState) -> bool:
    """Whether a step has written over this state."""
    return (note := _note_of(opt_state)) is not None and note.spent


def _note_of(opt_state: OptState) -> _Note | None:
    note = getattr(opt_state.step, _NOTE, None)
    if note is None:
        return None
    inner, metrics = note.owner
    return note if inner is opt_state.inner and metrics is opt_state.metrics else None


_NOTE = "_fzero_note"


class LocalState(NamedTuple):
    """The local tensors of an `OptState`, in flat lists, and what rebuilds it."""

    masters: list[Tensor]
    inner: list[Any]  # tensors, but for the numbers in a state written by others
    scale: list[Tensor]
    state: list[Tensor]
    inner_spec: tree.Spec
    state_spec: tree.Spec | None
    step: Tensor
    state_orders: tuple[Any, ...] = ()
    owner: Owner | None = None  # None: of a copy, which nobody else has

    @classmethod
    def of(
        cls, opt_state: OptState, *, dtensors: bool, known: tree.Known | None = None
    ) -> "LocalState":
        """Unpack.

        Args:
            opt_state: a step's.
            dtensors: leave the optimizer's state as DTensors.
            known: a structure that the optimizer's state probably has.
        """
        inner, inner_spec = tree.flatten(opt_state.inner, known)
        state, state_spec = tree.flatten(opt_state.model_state)
        return cls(
            locals_of(tree.leaves(opt_state.master)),
            inner if dtensors else locals_of(inner),
            tree.leaves(opt_state.loss_scale),
            state,
            inner_spec,
            None if opt_state.model_state is None else state_spec,
            opt_state.step,
            tree.orders(opt_state.model_state),
            (opt_state.inner, opt_state.metrics),
        )

    def copied(self) -> "LocalState":
        """The same with copies of what an update overwrites."""
        masters, inner = map(copied, self.masters), map(copied, self.inner)
        return self._replace(masters=list(masters), inner=list(inner), owner=None)

    def nbytes(self) -> int:
        """Bytes on this rank of what an update overwrites."""
        overwritten = (*self.masters, *self.inner)
        return sum(local_tensor(x).nbytes for x in overwritten if isinstance(x, Tensor))
