"""One step, staged out for one shape of batch: its Programs, compiled, and how they are run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.layout import LeafLayout, uneven_bytes
from fzero.numerics.rng import mix
from fzero.program import Program
from fzero.program.categories import BATCH, GRADIENTS, PARAMETERS
from fzero.program.choice import Choice
from fzero.program.dynamic import InputDim
from fzero.program.fitting import RESERVE, NothingFits
from fzero.program.graph import Held, output_node, tensors_of
from fzero.state.opt_state import LocalState
from fzero.state.plan import Plan
from fzero.step.gradients import (
    REST,
    ModelFn,
    Signature,
    reduces_once,
    slack_of,
    trace_gradients,
)
from fzero.step.update import Updated
from fzero.step.update_program import UpdateProgram, held_rows, outputs_on, shared_outputs
from fzero.transforms.agreement import signature_of
from fzero.transforms.frames import Frame, stacked, take_apart
from fzero.transforms.notes import Notes
from fzero.transforms.recorded import Recorded, check_inputs
from fzero.tree import PyTree


class GradientHalf(NamedTuple):
    """The half of a step that is its gradients.

    Args:
        signature: what its inputs and outputs stand for.
        gradient_fn: the Program.
    """

    signature: Signature
    gradient_fn: Recorded


def signature_for(plan: Plan, local: LocalState, batch: Frame) -> Signature:
    """What the inputs of a step's gradients stand for."""
    return Signature(plan, local.state_spec, batch, scaled=bool(local.scale))


class Traced:
    """Programs of the gradients of one micro-batch and of the update, ready to run.

    Args:
        like: one for the same shapes, whose gradients' half can be shared if its notes hold.
        choice: of buckets, settled by all ranks; None: this rank's own.
        update: of this plan, which steps of other batches have as well; None: one of its own.
        saved: an update of another process, if it is not to be recorded.
        dynamic: dims of leaves of the batch, (leaf, dim), whose sizes may be others at other steps,
            if that can be had.

    Raises:
        TraceError: the model function can't be staged out.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        plan: Plan,
        leaves: Sequence[Tensor],
        local: LocalState,
        batch: Sequence[Tensor],
        batch_spec: Frame,
        choice: Choice | None = None,
        like: "Traced | GradientHalf | None" = None,
        update: UpdateProgram | None = None,
        saved: tuple[Recorded, Frame] | None = None,
        dynamic: Iterable[InputDim] = (),
    ) -> None:
        self.plan = plan
        self._fed_from = len(leaves) + len(local.state)
        self._whole: tuple[Program, Program, Program] | None = None
        cfg, layout = plan.cfg, plan.sharding.layout
        shared = like if like is not None and like.gradient_fn.hold() else None
        self.signature = shared.signature if shared else signature_for(plan, local, batch_spec)
        trained, frozen = layout.divide(leaves)
        if plan.homes is not None:
            trained = tuple(plan.homes.stand_ins(trained))
        names = [name for group in plan.names for name in group]
        names += [f"model_state.{i}" for i in range(len(local.state))]
        names += [f"batch.{name}".rstrip(".") for name in batch_spec.names]
        names += ["loss_scale"] * bool(local.scale)
        inputs = [*trained, *frozen, *local.state, *batch, *local.scale[:1]]
        fed = sum(x.nbytes for x in batch)
        # the other micro-batches: parts of one batch, which stays there as a whole
        gaps = [Held(plan.homes.gaps, PARAMETERS, "gaps of flats")] if plan.homes else []
        beside = [*gaps, *held_rows(plan, local), Held((cfg.accum_steps - 1) * fed, BATCH, REST)]
        if cfg.accum_steps > 1:  # the sum so far
            beside += [
                Held(_sum_bytes(x, leaf, plan), GRADIENTS, leaf.name)
                for x, leaf in zip(trained, plan.trained, strict=True)
            ]
        uneven = 0 if cfg.limit is None else self._uneven(leaves, local)
        if shared:
            self.gradient_fn = shared.gradient_fn
            check_inputs(shared.gradient_fn.program, inputs)
        else:
            self.gradient_fn = trace_gradients(
                model_fn,
                self.signature,
                inputs,
                names,
                beside,
                choice,
                sorted((self._fed_from + leaf, dim) for leaf, dim in dynamic),
                uneven,
            )
        gradients = self.gradient_fn.program
        fakes = [x for n in output_node(gradients.graph).args[0] for x in tensors_of(n)]  # pyright: ignore
        # gradients that are summed or scaled in place, and others see; see `_own`
        self.shared: list[int] = []
        if cfg.accum_steps > 1 or cfg.clip_norm is not None or cfg.scaling is not None:
            self.shared = shared_outputs(gradients, count=len(plan.trained))
        self.borrowed = outputs_on(gradients, count=len(plan.trained))
        self.update_program = update or UpdateProgram(
            plan, reduced=not reduces_once(cfg), over=True, at_home=True
        )
        grads, loss, state, _ = self.signature.results(fakes)
        grads = self._own(grads)
        given: list[Held] = []
        if not cfg.donate:
            pairs = zip(trained, plan.names[0], strict=True)
            given = [Held(x.nbytes, PARAMETERS, name) for x, name in pairs]
            given += held_rows(plan, local)
        rows = zip(frozen, plan.names[1], strict=True)
        still = [Held(x.nbytes, PARAMETERS, name) for x, name in rows]
        self.resident = (*gaps, Held(cfg.accum_steps * fed, BATCH, "batch"), *still, *given)
        inputs = (trained, local, grads, loss, state)
        # up to where the gradients come in any case, memory is free
        room = gradients.peak_bytes() if cfg.limit is None else cfg.limit - RESERVE
        self.updating = self.update_program.staged(
            *inputs,
            choice=choice and Choice(choice.update),
            budget=max(room - sum(row.bytes for row in self.resident), 0),
            # the other half has had its share, where it has collectives
            slack=slack_of(cfg) if reduces_once(cfg) and cfg.limit is None else 0.0,
            saved=saved,
        )
        if cfg.limit is not None and self.program.peak_bytes() + uneven > cfg.limit:
            raise NothingFits(self.program, cfg.limit, uneven)
        self.choice = Choice.of(self.program)
        self.collectives = signature_of(self.program, plan.mesh, cfg.named_passes)

    def _own(self, grads: list[Tensor]) -> list[Tensor]:
        """Gradients, each in memory that is no others' where it will be written to."""
        for i in self.shared:
            grads[i] = grads[i].clone()
        return grads

    def _uneven(self, leaves: Sequence[Tensor], local: LocalState) -> int:
        """How many bytes of state the rank with the largest shards holds more than this one."""
        plan = self.plan
        layout, trained = plan.sharding.layout, plan.trained
        parts: list[tuple[LeafLayout, int]] = []
        if plan.cfg.stage == 3:
            parts += [(leaf, x.dtype.itemsize) for leaf, x in zip(layout, leaves, strict=True)]
        if plan.splits_state:
            inner = plan.leaves_of(tree.unflatten(local.inner_spec, local.inner))
            rows = [
                *zip(trained, local.masters, strict=False),
                *zip(inner, local.inner, strict=True),
            ]
            parts += [(leaf, x.dtype.itemsize) for leaf, x in rows if leaf is not None]
        if plan.cfg.accum_steps > 1 and plan.cfg.stage >= 2:
            rows = zip(trained, layout.divide(leaves)[0], strict=True)
            parts += [(leaf, _sum_dtype(x, leaf).itemsize) for leaf, x in rows]
        return uneven_bytes(parts, plan.mesh.shard_rank)

    @property
    def program(self) -> Program:
        """The Program of the gradients, and that of the update after it."""
        if self.updating is None:
            return self.gradient_fn.program
        gradients, update = self.gradient_fn.program, self.updating.program
        made = self._whole
        # not for good: inductor notes in a Program's log what it could not compile
        if made is None or made[0] is not gradients or made[1] is not update:
            whole = gradients.then(replace(update, resident=self.resident))
            made = self._whole = (gradients, update, whole)
        return made[2]

    @property
    def notes(self) -> Notes:
        """What the model function reads from outside."""
        return self.gradient_fn.notes

    def hold(self) -> bool:
        """Whether all that was read from outside while recording is as it was."""
        update = self.updating
        return self.gradient_fn.hold() and (update is None or update.hold())

    @property
    def is_dynamic(self) -> bool:
        """Whether it may serve batches of other sizes: see [Note: dynamic dims]."""
        return self.gradient_fn.is_dynamic

    def serves(self, sizes: Mapping[InputDim, int]) -> bool:
        """Whether it takes batches whose leaves have these sizes by (leaf, dim) as well."""
        flat = {(self._fed_from + leaf, dim): size for (leaf, dim), size in sizes.items()}
        return self.gradient_fn.serves(flat)

    def differences(self) -> list[str]:
        """What is no longer as it was."""
        update = self.updating
        return self.notes.differences() or (update.notes.differences() if update else [])

    def gradients(
        self,
        trained: Sequence[Tensor],
        frozen: Sequence[Tensor],
        local: LocalState,
        micro: Sequence[PyTree],
        step: Tensor,
    ) -> tuple[list[Tensor], Tensor, list[Tensor], PyTree]:
        """Gradients and loss summed over the micro-batches, the last model state, all aux."""
        plan, state = self.plan, local.state
        total: list[Tensor] = []
        losses, auxes = [], []
        for i, batch in enumerate(micro):
            flat = [*trained, *frozen, *state, *take_apart(batch)[0], *local.scale[:1]]
            words = (i, plan.mesh.rank)
            results = self.gradient_fn(flat, lambda w=words: mix(plan.cfg.seed, int(step), *w))
            # aux and state on the memory of a parameter or the batch, which is written over
            for index in self.borrowed:
                results[index] = results[index].clone()
            grads, loss, state, aux = self.signature.results(results)
            if not total:
                total = self._own(grads)
            elif total:
                torch._foreach_add_(total, grads)
            # or they would live on while the next micro-batch makes its own
            del grads, results
            losses.append(loss)
            auxes.append(aux)
        loss = losses[0] if len(micro) == 1 else torch.stack(losses).sum()
        count = plan.axes.world * len(micro)
        aux = stacked(auxes)
        return total, loss / count if count > 1 else loss, state, aux

    def update(
        self,
        trained: Sequence[Tensor],
        local: LocalState,
        grads: list[Tensor],
        loss: Tensor,
        state: Sequence[Tensor],
    ) -> Updated:
        """Overwrite `trained` and what `local` has of masters and optimizer state."""
        return self.update_program(self.updating, trained, local, grads, loss, state)


def _sum_bytes(x: Tensor, leaf: LeafLayout, plan: Plan) -> int:
    """Bytes of this rank's sum of gradients of a leaf that lives as `x` between steps."""
    numel = plan.part(x, leaf).numel() if plan.cfg.stage == 2 else x.numel()
    return numel * _sum_dtype(x, leaf).itemsize


def _sum_dtype(x: Tensor, leaf: LeafLayout) -> torch.dtype:
    dtype = torch.promote_types(x.dtype, leaf.reduce or x.dtype)
    return torch.promote_types(dtype, torch.float32)
