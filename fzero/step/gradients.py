"""The gradient half of a step: a user's model function, differentiated and staged out.

A flat calling convention joins the halves. In: trained leaves, frozen leaves, model state, one
micro-batch, the loss scale if there is one. Out: gradients, loss, new model state, aux.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fzero import tree, zero
from fzero.config import Config
from fzero.distributed.mesh import Axes
from fzero.eager.lazy import changed_in_place
from fzero.errors import FzeroError, ShardError
from fzero.functional.differentiate import no_gradient
from fzero.layout import Layout
from fzero.numerics.casts import cast, in_force, widened
from fzero.program import Program
from fzero.program.categories import BATCH, GRADIENTS, PARAMETERS, RESULTS, SCALE, STATE
from fzero.program.graph import Held, placeholders, tensors_of
from fzero.program.memory import storages
from fzero.program.passes.functionalise import written_inputs
from fzero.program.pipeline import optimise
from fzero.program.trace import trace_program
from fzero.transforms.frames import Frame, take_apart
from fzero.transforms.loss import check_loss, summable, with_room
from fzero.transforms.notes import Notes
from fzero.transforms.recorded import Recorded
from fzero.tree import PyTree
from fzero.zero import GradFn, Leaves, LossFn

ModelFn = Callable[..., Any]


@dataclass
class Signature:
    """What the flat leaves of one call stand for; the specs of what comes out are found on the way.

    Args:
        params: structure of the parameters.
        layout: of their leaves.
        state: structure of the model state, or None if there is none.
        batch: structure of the batch.
        scaled: whether the last input is a loss scale.
    """

    params: tree.Spec
    layout: Layout
    state: tree.Spec | None
    batch: Frame
    scaled: bool
    state_out: tree.Spec | None = field(default=None)
    aux_out: Frame | None = field(default=None)

    def parts(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        """The flat inputs as (trained, frozen, state, batch, scale)."""
        trained = sum(leaf.trainable for leaf in self.layout)
        sizes = [trained, len(self.layout) - trained]
        sizes += [self.state.num_leaves if self.state else 0, self.batch.num_leaves]
        cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        parts = [tuple(flat[a:b]) for a, b in itertools.pairwise(cuts)]
        return (*parts, tuple(flat[cuts[-1] :]))

    def results(self, flat: Sequence[Any]) -> tuple[list[Any], Any, list[Any], PyTree]:
        """The flat outputs as (gradients, loss, state leaves, aux)."""
        trained = sum(leaf.trainable for leaf in self.layout)
        states = self.state_out.num_leaves if self.state_out else 0
        grads, (loss, *rest) = list(flat[:trained]), flat[trained:]
        aux = self.aux_out.unflatten(rest[states:]) if self.aux_out else None
        return grads, loss, rest[:states], aux


def gradient_fn(
    model_fn: ModelFn, cfg: Config, signature: Signature, axes: Axes, grad: zero.Grad
) -> Callable[..., tuple[Tensor, ...]]:
    """The gradient function of `cfg.stage` under the flat calling convention.

    Gradients are scaled to sum to the mean over ranks and micro-batches. With accumulation they
    come in no less than float32, and stages 0 and 1 return this rank's own: they are reduced once a
    step.
    """

    def flat_fn(*flat: Tensor) -> tuple[Tensor, ...]:
        trained, frozen, state, batch, scale = signature.parts(flat)
        loss_fn = zero.scaled(flat_loss_fn(model_fn, cfg, signature), share_of(cfg, axes, scale))
        layout = signature.layout
        if cfg.stage == 3:
            trained, layout = with_room(trained, layout)
        grads_of = transform(cfg, loss_fn, layout, axes, grad)
        grads, (_, (loss, aux)) = grads_of(trained, frozen, state, batch)
        # the fused optimizer kernels read memory in order, whatever the strides
        grads = [grad.contiguous() for grad in grads]
        return (*(summable(grads) if cfg.accum_steps > 1 else grads), widened(loss), *aux)

    return flat_fn


def share_of(cfg: Config, axes: Axes, scale: Sequence[Tensor]) -> float | Tensor:
    """What a micro-batch's loss is multiplied by: its share of the mean, and the loss scale."""
    share = 1.0 / (axes.world * cfg.accum_steps)
    external = cfg.scaling is not None and cfg.scaling.external  # it is on the loss already
    return scale[0] * share if scale and not external else share


def transform(cfg: Config, loss_fn: LossFn, layout: Layout, axes: Axes, grad: zero.Grad) -> GradFn:
    """The composition of one ZeRO stage."""
    if cfg.stage == 3:
        return zero.zero3(loss_fn, layout, axes, grad)
    if reduces_once(cfg):
        return zero.ddp_local(loss_fn, layout, grad)
    return (zero.zero2 if cfg.stage else zero.zero0)(loss_fn, layout, axes, grad)


def reduces_once(cfg: Config) -> bool:
    """Whether gradients are accumulated before they are reduced."""
    return cfg.stage < 2 and cfg.accum_steps > 1


def trace_gradients(
    model_fn: ModelFn,
    cfg: Config,
    signature: Signature,
    axes: Axes,
    inputs: Sequence[Tensor],
    names: Sequence[str],
    resident: Sequence[Held],
    bucket_bytes: int | None = None,
    rung: int | None = None,
) -> Recorded:
    """The gradient function, staged out.

    Args:
        inputs: example tensors for the flat calling convention.
        names: one per input.
        resident: what a rank holds beside them while the Program runs.
        bucket_bytes: a settled size of buckets; None: the best up to `cfg.bucket_mb`.
        rung: a settled plan for `cfg.memory_limit`; None: the first that fits.

    Raises:
        ConfigError: nothing stays under `cfg.memory_limit`.
        FzeroError: the model function changes a parameter in place.
        TraceError: it can't be staged out.
    """
    autograd = functools.partial(zero.autograd, must_depend=True)
    # in this order: the first is the definition, the second for what it refuses
    front_ends = [
        ("torch.func.vjp", gradient_fn(model_fn, cfg, signature, axes, zero.vjp)),
        ("torch.autograd.grad", gradient_fn(model_fn, cfg, signature, axes, autograd)),
    ]

    def record() -> Program:
        return trace_program(
            "gradients", front_ends, inputs, names, opaque=cfg.opaque, remat=cfg.remat_rules
        )

    def passes(program: Program) -> Program:
        program = replace(
            program,
            times=cfg.accum_steps,
            resident=tuple(resident),
            **_roles(cfg, signature, axes),
        )
        given = {leaf.name: leaf.compute or leaf.dtype for leaf in signature.layout}
        for name in written_inputs(program, given):
            raise changed_in_place(name)
        program = optimise(
            program,
            reshard_after_forward=cfg.reshard_after_forward,
            bucket_bytes=bucket_bytes or int(cfg.bucket_mb * 2**20),
            exact=bucket_bytes is not None,
            prefetch=cfg.prefetch,
            slack=_SLACK_SHARDED if cfg.stage == 3 else _SLACK,
            limit=cfg.limit,
            rung=rung,
            passes=cfg.named_passes,
        )
        return replace(program, resident=_batch_once(program))

    return Recorded(Notes({"model_fn": model_fn}), record, passes)


REST = "the rest"
"""Of the batch: the other micro-batches."""


def _batch_once(program: Program) -> tuple[Held, ...]:
    """What is resident, less what the memory of the batch's own inputs holds of the rest.

    A micro-batch is a part of the batch, and is recorded with all of its memory unless a pass has
    recorded the graph anew: then with its own.
    """
    inputs = zip(placeholders(program.graph), program.input_categories, strict=False)
    mine = [node for node, category in inputs if category == BATCH]
    own = sum(x.nbytes for node in mine for x in tensors_of(node))
    there = sum(storages(mine).values())
    rows = program.resident
    return tuple(
        row._replace(bytes=max(0, row.bytes + own - there)) if row.name == REST else row
        for row in rows
    )


def _roles(cfg: Config, signature: Signature, axes: Axes) -> dict[str, Any]:
    """What the inputs and outputs of the flat calling convention are, as a Program has it."""
    trained = [leaf.name for leaf in signature.layout if leaf.trainable]
    states = signature.state_out.num_leaves if signature.state_out else 0
    aux = signature.aux_out.names if signature.aux_out else ()
    names = [*trained, "loss", *[f"model_state.{i}" for i in range(states)]]
    names += [f"aux.{name}".rstrip(".") for name in aux]
    return {
        "outputs": tuple(names),
        "input_categories": (
            *[PARAMETERS] * len(signature.layout),
            *[STATE] * (signature.state.num_leaves if signature.state else 0),
            *[BATCH] * signature.batch.num_leaves,
            *[SCALE] * signature.scaled,
        ),
        "output_categories": (
            *[GRADIENTS] * len(trained),
            RESULTS,
            *[STATE] * states,
            *[RESULTS] * len(aux),
        ),
        "reduced_over": () if reduces_once(cfg) else axes.groups,
    }


# How much of the peak fewer and larger collectives may cost. Who shards parameters is short of
# memory; who doesn't holds them all in any case.
_SLACK_SHARDED, _SLACK = 0.1, 0.25


def flat_loss_fn(model_fn: ModelFn, cfg: Config, signature: Signature) -> LossFn:
    """The user's function on flat leaves, its result checked and its aux flattened."""

    def loss_fn(leaves: Leaves, state: Leaves, batch: Leaves) -> tuple[Tensor, Leaves]:
        args: list[Any] = [tree.unflatten(signature.params, leaves)]
        if signature.state is not None:
            args.append(tree.unflatten(signature.state, state))
        args.append(signature.batch.unflatten(batch))
        with in_force(cfg.dtypes, leaves[0].device.type if leaves else "cpu"):
            returned = model_fn(*args)
        loss, new_state, aux = _taken_apart(returned, cfg, signature.state is not None)
        check_loss(loss)
        if not loss.requires_grad and any(x.requires_grad for x in leaves):
            raise no_gradient()
        loss = cast(loss, cfg.dtypes.output)
        state_leaves: list[Any] = []
        aux_leaves: list[Any] = []
        if signature.state is not None:
            state_leaves, signature.state_out = tree.flatten(new_state)
            _check_state(signature, state_leaves, state)
        if cfg.has_aux:
            # numbers may differ between micro-batches, whose aux is stacked
            aux_leaves, signature.aux_out = take_apart(aux, "aux", numbers=True)
            aux_leaves = cast(aux_leaves, cfg.dtypes.output)
        return loss, tuple(map(_as_output, (*state_leaves, *aux_leaves)))

    return loss_fn


def _taken_apart(result: Any, cfg: Config, stateful: bool) -> tuple[Any, Any, Any]:
    """What the model function returned, as (loss, model state, aux)."""
    form = ["loss"] + ["new_model_state"] * stateful + ["aux"] * cfg.has_aux
    if len(form) == 1:
        if isinstance(result, (tuple, list)):
            raise FzeroError(
                f"the model function returned a {type(result).__name__} of {len(result)}, and must "
                "return the loss alone. To return more, set Config(has_aux=True), or pass model "
                "state to step_fn.init(params, model_state)."
            )
        return result, None, None
    if not isinstance(result, tuple) or len(result) != len(form):
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise FzeroError(
            f"the model function returned {found}, and must return ({', '.join(form)}): has_aux is "
            f"{cfg.has_aux}, and init was given {'a' if stateful else 'no'} model state."
        )
    rest = list(result[1:])
    return result[0], rest.pop(0) if stateful else None, rest.pop(0) if cfg.has_aux else None


def _check_state(signature: Signature, new: Sequence[Any], old: Sequence[Tensor]) -> None:
    if signature.state_out != signature.state:
        raise ShardError(
            f"the model function returned a model state of structure {signature.state_out}, and "
            f"was given {signature.state}; it must return the same structure."
        )
    for i, (after, before) in enumerate(zip(new, old, strict=True)):
        if after.shape != before.shape or after.dtype != before.dtype:
            raise ShardError(
                f"leaf {i} of the model state came back as {after.dtype} {tuple(after.shape)} and "
                f"was {before.dtype} {tuple(before.shape)}; shapes and dtypes must stay."
            )


def _as_output(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        x = torch.as_tensor(x)
    return x.detach()
