"""The update, staged out: gradients in, parameters and optimizer state overwritten."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.distributed.dtensor import local_tensor
from fzero.errors import ShardError
from fzero.numerics.loss_scale import LossScaleState
from fzero.numerics.rng import mix
from fzero.program import Program
from fzero.program.categories import (
    BATCH,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    PARAMETERS,
    RESULTS,
    SCALE,
    STATE,
)
from fzero.program.fitting import RESERVE
from fzero.program.graph import Held, output_node, tensors_of
from fzero.program.passes.seed import draws, insert_seeds, number_sites
from fzero.program.passes.users import run_passes
from fzero.program.pipeline import share_collectives
from fzero.program.trace import trace_program
from fzero.state.follow import Follower
from fzero.state.opt_state import LocalState
from fzero.state.plan import Plan
from fzero.step.update import Update, Updated
from fzero.transforms.notes import Notes, warn_of_recordings
from fzero.transforms.recorded import MAX_RECORDINGS, Recorded, Recordings, check_inputs


class UpdateProgram:
    """The update of a plan; once staged out, its Program runs, and `Update` itself before.

    Args:
        plan: of the step.
        local: shows the structure of the optimizer's state.
        reduced: whether gradients come summed over the ranks.
    """

    def __init__(self, plan: Plan, local: LocalState, *, reduced: bool) -> None:
        self.plan = plan
        self.reduced = reduced
        self.step_update = Update(
            plan.opt,
            plan.cfg,
            plan.sharding.layout,
            plan.axes,
            reduced=reduced,
            treedef=plan.foreign_tree if plan.opt.foreign else plan.trained_tree,
            inner_spec=local.inner_spec,
            whole=plan.whole,
            bucket_bytes=int(plan.cfg.bucket_mb * 2**20),
            device_type=plan.mesh.device_type,
        )
        self.follow: Follower | None = None
        self._recorded: Recordings[Recorded] = Recordings()
        self._count = 0

    def hold(self) -> bool:
        """Whether there is a Program for what the optimizer reads from outside; it is used now."""
        return self.plan.opt.foreign or self._recorded.find(None) is not None

    def differences(self) -> list[str]:
        """What the optimizer reads and is no longer as it was."""
        return self.recorded.notes.differences() if self.recorded else []

    @property
    def recorded(self) -> Recorded | None:
        """The Program that runs now; None of an optimizer that is not recorded."""
        return next(iter(self._recorded.of(None)), None)

    def resume(
        self,
        recorded: Recorded,
        trained: Sequence[Tensor],
        local: LocalState,
        grads: Sequence[Tensor],
        loss: Tensor,
        state: Sequence[Tensor],
    ) -> Program:
        """Go on with what was recorded in another process, or for another shape of batch.

        Gradients have one shape for all of these, and more of the batch an update does not see.

        Raises:
            Gone: it was recorded for others.
        """
        groups = self._groups(trained, local, grads, loss, state)
        check_inputs(recorded.program, [x for group in groups for x in group])
        self._recorded.add(None, recorded)
        return recorded.program

    def __call__(
        self,
        trained: Sequence[Tensor],
        local: LocalState,
        grads: list[Tensor],
        loss: Tensor,
        state: Sequence[Tensor],
    ) -> Updated:
        """Overwrite `trained` and what `local` has of masters and optimizer state.

        Masters start from what was written into the parameters; see [Note: masters follow].
        """
        if not self.plan.opt.foreign:
            _refuse_numbers(local)
        if local.masters:
            parts = self.plan.parts(trained)
            self.follow = self.follow or Follower(local.masters, parts)
            self.follow(local.masters, parts)
        groups = self._groups(trained, local, grads, loss, state)
        recorded = self.recorded
        if recorded is None:
            return self._eagerly(groups)
        flat = [x for group in groups for x in group]
        del groups
        grads.clear()
        # the same on all ranks: the noise is that of whole leaves
        key = (self.plan.cfg.seed, int(local.step), _UPDATE) if recorded.seeded else ()
        return _updated(recorded(flat, lambda: mix(*key)), len(state))

    def _groups(
        self,
        trained: Sequence[Tensor],
        local: LocalState,
        grads: Sequence[Tensor],
        loss: Tensor,
        state: Sequence[Tensor],
    ) -> list[Sequence[Tensor]]:
        """All that an update reads, in the order of `Update`'s arguments."""
        cfg = self.plan.cfg
        before = local.state if cfg.nonfinite_policy == "skip" else []
        step = [local.step] if cfg.dtypes.stochastic_rounding else []
        own = [trained, local.masters, local.inner]
        parts = [*own, grads, [loss], state, local.scale, before, step]
        return [list(part) for part in parts]

    def _eagerly(self, groups: Sequence[Sequence[Tensor]]) -> Updated:
        trained, masters, inner, grads, (loss,), state, scale, before, step = groups
        scaling = LossScaleState(*scale) if scale else None
        rest = (before, step[0] if step else None)
        with torch.no_grad():
            return self.step_update(trained, masters, inner, grads, loss, state, scaling, *rest)

    def trace(
        self,
        trained: Sequence[Tensor],
        local: LocalState,
        grads: Sequence[Tensor],
        loss: Tensor,
        state: Sequence[Tensor],
        *,
        resident: Sequence[Held] = (),
        budget: int = 0,
        bucket_bytes: int | None = None,
    ) -> Program:
        """Stage it out for tensors like these, and run the Program from now on.

        Args:
            trained, local, grads, loss, state: as `__call__` will get them.
            resident: what a rank holds besides.
            budget: bytes that the rest of the step needs in any case.
            bucket_bytes: a settled size of buckets; None: the best up to `cfg.bucket_mb`.
        """
        groups = self._groups(trained, local, grads, loss, state)
        cuts = [sum(map(len, groups[:i])) for i in range(len(groups) + 1)]

        def flat_fn(*flat: Tensor) -> tuple[Tensor, ...]:
            new = self._eagerly([flat[i:j] for i, j in itertools.pairwise(cuts)])
            return (*new[:3], *new.model_state, *(new.loss_scale or ()))

        trained_names = [leaf.name for leaf in self.plan.trained]
        names = [
            *trained_names,
            *[f"master.{name}" for name in trained_names[: len(local.masters)]],
            *[f"inner.{name}" for name in names_of_state(local)],
            *[f"grad.{name}" for name in trained_names],
            "loss",
            *[f"model_state.{i}" for i in range(len(state))],
            *[f"loss_scale.{i}" for i in range(len(local.scale))],
            *[f"model_state_before.{i}" for i in range(len(groups[-2]))],
            *["step"] * len(groups[-1]),
        ]
        kinds = (PARAMETERS, MASTERS, OPTIMIZER, GRADIENTS, RESULTS, STATE, SCALE, STATE, OPTIMIZER)
        categories = [kind for kind, group in zip(kinds, groups, strict=True) for _ in group]
        inputs = [x for group in groups for x in group]
        self._count += 1
        if self._count > MAX_RECORDINGS:
            warn_of_recordings("the update", self._count, self.differences())

        def record() -> Program:
            return trace_program("update", [("make_fx", flat_fn)], inputs, names)

        def passes(program: Program) -> Program:
            if draws(program):
                program = number_sites(program)
            cfg = self.plan.cfg
            program = replace(
                program,
                resident=tuple(resident),
                input_categories=tuple(categories),
                reduced_over=() if self.reduced else self.plan.axes.groups,
            )
            program = share_collectives(
                run_passes(program, cfg.named_passes, late=False),
                bucket_bytes=bucket_bytes or int(cfg.bucket_mb * 2**20),
                prefetch=cfg.prefetch,
                budget=budget,
                exact=bucket_bytes is not None,
                within=cfg.limit and cfg.limit - RESERVE,
            )
            return run_passes(insert_seeds(program), cfg.named_passes, late=True)

        notes = Notes({"the optimizer": self.plan.opt})
        cfg = self.plan.cfg
        recorded = Recorded(notes, record, passes, cfg.executor, cuda_graph=cfg.cuda_graph)
        self._recorded.add(None, recorded)
        return recorded.program


def _refuse_numbers(local: LocalState) -> None:
    """A number in the place of a tensor: an update overwrites its state."""
    if {*map(type, local.inner)} <= {Tensor} or all(map(_is_tensor, local.inner)):
        return
    for x, name in zip(local.inner, names_of_state(local), strict=True):
        if not _is_tensor(x):
            raise ShardError(
                f"opt_state.inner, {name}: it is {x!r}, and a step's state holds tensors. Write "
                "into the tensor that was there, such as hyperparams['lr'].fill_(x)."
            )


def _updated(results: Sequence[Tensor], states: int) -> Updated:
    loss, norm, nonfinite, *rest = results
    scale = LossScaleState(*rest[states:]) if len(rest) > states else None
    return Updated(loss, norm, nonfinite, tuple(rest[:states]), scale)


def shared_outputs(program: Program) -> list[bool]:
    """For each output, whether its memory is an input's, another output's, or overlaps itself."""
    inputs = {
        x.untyped_storage()._cdata
        for node in program.graph.nodes
        if node.op == "placeholder"
        for x in tensors_of(node)
    }
    seen: set[Any] = set()
    shared = []
    for node in output_node(program.graph).args[0]:  # pyright: ignore
        (x,) = tensors_of(node)  # pyright: ignore
        at = (x.untyped_storage()._cdata, x.storage_offset())
        dense = x.is_contiguous()
        shared.append(at in seen or at[0] in inputs or not dense)
        seen.add(at)
    return shared


def outputs_on(program: Program, count: int) -> list[int]:
    """The outputs behind the `count` gradients that are on the memory of a parameter or the batch.

    An update writes over the first, and a loader that fills one buffer again over the second: aux
    and model state must stay what they were in the forward pass.
    """
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    theirs = zip(nodes, program.input_categories, strict=False)  # a key of random numbers is last
    lent = [node for node, category in theirs if category in (PARAMETERS, BATCH)]
    inputs = {x.untyped_storage()._cdata for node in lent for x in tensors_of(node)}
    outputs: Any = output_node(program.graph).args[0]
    on = [any(x.untyped_storage()._cdata in inputs for x in tensors_of(n)) for n in outputs]
    return [index for index, shared in enumerate(on) if shared and index >= count]


def held_rows(plan: Plan, local: LocalState) -> list[Held]:
    """What `local.nbytes()` counts, row by row."""
    masters = zip(local.masters, plan.names[0], strict=False)
    inner = zip(local.inner, names_of_state(local), strict=True)
    rows = [(x, MASTERS, name) for x, name in masters] + [(x, OPTIMIZER, n) for x, n in inner]
    return [Held(local_tensor(x).nbytes, kind, name) for x, kind, name in rows if _is_tensor(x)]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def names_of_state(local: LocalState) -> list[str]:
    return tree.names(tree.unflatten(local.inner_spec, local.inner))


_UPDATE = 0x0DD  # tells the update's numbers from those of micro-batch and rank
