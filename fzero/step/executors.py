"""The executors of one step function: found by what comes in, handed out once all ranks agree.

After that a step meets no question any more: it is unpack, gradients, update, pack.
"""

import contextlib
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.config import Config
from fzero.errors import FzeroError, ShardError, users_line
from fzero.program.choice import Choice
from fzero.program.collector import collector_paused
from fzero.program.dynamic import InputDim
from fzero.program.fitting import NothingFits
from fzero.program.strides import layout_of
from fzero.state.opt_state import LocalState
from fzero.state.plan import Plan
from fzero.step.alternatives import alternatives
from fzero.step.eager import Eager
from fzero.step.gradients import ModelFn, reduces_once
from fzero.step.saved import SavedPrograms, save_programs
from fzero.step.traced import Traced, signature_for
from fzero.step.update_program import UpdateProgram
from fzero.transforms.agreement import Agreement, Mine
from fzero.transforms.frames import AS_TENSORS, Frame, take_apart, values_apart
from fzero.transforms.notes import ONE_AT_A_TIME, warn_of_recordings
from fzero.transforms.recorded import MAX_RECORDINGS, Recordings
from fzero.tree import PyTree

Executor = Traced | Eager


class Executors:
    """What runs the steps of one step function.

    Args:
        model_fn: the user's.
        cfg: the step's.
    """

    def __init__(self, model_fn: ModelFn, cfg: Config) -> None:
        self.model_fn, self.cfg = model_fn, cfg
        self._traced: Recordings[Traced] = Recordings()
        self._eager: dict[Any, Eager] = {}
        self._update: UpdateProgram | None = None  # of batches of all shapes: it sees none
        self._warned = False
        self._agreement = Agreement("step function", cfg.timeout)
        self.saved: SavedPrograms | None = None

    def save(self, path: Path, plan: Plan | None) -> None:
        """Write all that is staged out to a folder, this rank's part of it.

        Raises:
            FzeroError: nothing is, or it holds what can't be written.
        """
        if self.cfg.executor == "eager":
            raise FzeroError("Config.executor='eager' stages nothing out: it has no Programs.")
        every = [(key, one) for key, one in self._traced if one.hold()]
        if plan is None or not every:
            gone = [change for _, one in self._traced for change in one.differences()]
            changed = f"what was no longer holds ({', '.join(gone[:3])})"
            raise FzeroError(
                f"there are no Programs to save: {changed if gone else 'nothing is staged out yet'}"
                ". Call step_fn(params, opt_state, batch) or step_fn.lower(...) first."
            )
        with ONE_AT_A_TIME:
            save_programs(path, plan, every)

    def clear(self) -> None:
        """Forget everything that was made for other parameters."""
        self._drop()
        self._agreement.clear()

    def _drop(self) -> None:
        self._traced, self._eager, self._update = Recordings(), {}, None

    def settle(self, choice: Choice) -> None:
        """Take buckets that were found elsewhere."""
        self._agreement.choice = choice

    def find(
        self,
        plan: Plan,
        leaves: list[Tensor],
        local: LocalState,
        micro: PyTree,
        *,
        exact: bool = True,
    ) -> Executor:
        """What runs a step of these shapes; staged out the first time. Asks no other rank.

        Args:
            exact: of these very shapes; else one that serves other sizes will do.

        Raises:
            ShardError: parameters have no values, and the batch has some.
            TraceError: the model function can't be staged out.
        """
        if self.cfg.executor == "eager":  # one for all shapes
            if local.state_spec not in self._eager:
                _refuse_meta(plan, leaves, tree.leaves(micro))
                self._eager[local.state_spec] = Eager(self.model_fn, plan)
            return self._eager[local.state_spec]
        batch, frame = take_apart(micro)
        frame = frame.of_inputs(batch)
        key = _key(local, batch, frame)
        traced = self._traced.find(key, exact=exact)
        if traced is None:
            _refuse_meta(plan, leaves, batch)
            known = self._traced.of(key)
            self._warn_of_many(key, known)
            # where only the optimizer's reads have changed, the half of the gradients still holds
            like = next((one for one in known if one.notes.hold()), None)
            dynamic = self._traced.dynamic(key, self.cfg)
            if self._update is None:
                self._update = UpdateProgram(
                    plan, reduced=not reduces_once(self.cfg), over=True, at_home=True
                )
            with ONE_AT_A_TIME:
                traced = self._resumed(key, plan, leaves, local, batch, frame)
                if traced is not None:
                    dynamic = frozenset()  # a file is of its own sizes: no try has failed yet
                else:
                    traced = self._record(plan, leaves, local, batch, frame, like, dynamic)
            self._traced.add(key, traced, dynamic)
        return traced

    def _resumed(
        self,
        key: Any,
        plan: Plan,
        leaves: list[Tensor],
        local: LocalState,
        batch: list[Tensor],
        frame: Frame,
    ) -> Traced | None:
        """What another process saved for this; None if there is nothing that holds."""
        if self.saved is None:
            return None
        settled = self._agreement.choice
        assert self._update is not None
        make = partial(Traced, self.model_fn, plan, leaves, local, batch, frame, settled)
        signature = signature_for(plan, local, frame)
        with collector_paused():
            return self.saved.find(key, make, self.model_fn, self._update, signature, settled)

    def _record(
        self,
        plan: Plan,
        leaves: list[Tensor],
        local: LocalState,
        batch: list[Tensor],
        frame: Frame,
        like: Traced | None,
        dynamic: frozenset[InputDim],
    ) -> Traced:
        settled = self._agreement.choice
        try:
            return Traced(
                self.model_fn,
                plan,
                leaves,
                local,
                batch,
                frame,
                settled,
                like,
                self._update,
                dynamic=dynamic,
            )
        except NothingFits as error:
            if settled is not None and settled.thrift is not None:
                raise  # with other collectives it may
            refusal = error

        def peak(plan: Plan, leaves: Any, local: LocalState, batch: Any) -> int:
            try:
                made = Traced(self.model_fn, plan, leaves, local, batch, frame)
            except NothingFits as error:
                return error.program.peak_bytes() + error.uneven
            return made.program.peak_bytes()

        ways_on = alternatives(peak, plan, leaves, local, batch)
        raise NothingFits(refusal.program, refusal.limit, refusal.uneven, ways_on) from None

    def agreed(
        self, plan: Plan, leaves: list[Tensor], local: LocalState, micro: PyTree
    ) -> Executor:
        """`find`, with the buckets, and so the collectives, that all ranks have; all must call it.

        Raises:
            ConfigError: a rank can't stay under `cfg.memory_limit`; on all ranks.
            RankMismatchError: ranks would run different collectives.
        """
        mine = Mine(
            lambda: self.find(plan, leaves, local, micro, exact=False),
            lambda: (*(one for _, one in self._traced), *self._eager.values()),
            self._forget,
            self._drop,
        )
        return self._agreement.together(mine, plan.mesh)

    def running(self, plan: Plan) -> contextlib.AbstractContextManager[None]:
        """This call's collectives run inside: other ranks can see which call this one is at."""
        return self._agreement.running(plan.mesh)

    def _forget(self, executor: Executor) -> None:
        if isinstance(executor, Traced):
            self._traced.forget(executor)
        self._eager = {k: v for k, v in self._eager.items() if v is not executor}

    def _warn_of_many(self, key: Any, known: Sequence[Traced]) -> None:
        """Once, when there are as many recordings as are kept: each costs time and memory."""
        count = len(self._traced)
        if self._warned or count < MAX_RECORDINGS:
            return
        self._warned = True
        if known:
            warn_of_recordings("this step function", count + 1, known[0].differences())
        else:
            _warn_of_shapes(list(dict.fromkeys(kind for kind, _ in self._traced)), key)


def _refuse_meta(plan: Plan, leaves: Sequence[Tensor], batch: Sequence[Any]) -> None:
    """See that what has values does not meet parameters that have none."""
    # all on meta is a plan: shapes go through a Program as values do
    real = [x for x in batch if isinstance(x, Tensor) and x.dim() and x.device.type != "meta"]
    for x, path in zip(leaves, plan.sharding.paths, strict=True):
        if real and x.device.type == "meta":
            raise ShardError(
                f"params{path} is on the meta device and has no values, and the batch is on "
                f"{real[0].device}. Pass the function that builds the parameters, "
                "step_fn.init(build), without torch.device('meta') in it or around it: then no "
                "rank ever holds the whole model. For a plan alone pass a batch on the meta device "
                "to step_fn.lower, or see fzero.simulate."
            )


def _key(local: LocalState, batch: list[Tensor], frame: Frame) -> Any:
    shapes = [(x.shape, layout_of(x), x.dtype, x.device) for x in batch]
    # what a gradient penalty asks of its inputs
    asked = tuple((x.requires_grad, x.is_leaf, x.is_conj(), x.is_neg()) for x in batch)
    return ((local.state_spec, local.state_orders, frame, asked), *shapes)


def _warn_of_shapes(old: list[Any], new: Any) -> None:
    (*state, frame, asked), *leaves = new
    (*state_before, frame_before, asked_before), *last = old[-1]
    changed = [
        "its structure, the order of its keys, or which of its leaves are one tensor or require "
        "grad"
    ]
    advice = "Pad batches to a few shapes, or drop the last incomplete one."
    values = values_apart(frame_before, frame)
    if (state_before, frame_before, asked_before) == (state, frame, asked):
        rows = zip(frame.paths, last, leaves, strict=True)
        changed = [f"batch{p} from {_describe(a)} to {_describe(b)}" for p, a, b in rows if a != b]
    elif values:
        changed = [f"batch{path} from {before} to {now}" for path, before, now in values]
        advice = AS_TENSORS
    warnings.warn(
        f"this step function has been staged out for {len(old)} kinds of batch, and now comes "
        f"another; since the last one changed {', '.join(changed[:3])}. Each costs a recording and "
        f"its memory. {advice}",
        stacklevel=users_line(),
    )


def _describe(leaf: tuple[Any, ...]) -> str:
    shape, stride, dtype, device = leaf
    text = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"
    dense = torch.empty(shape, device="meta").stride()
    return text if stride in (None, dense) else f"{text} with strides {stride}"
