"""The gradient half of a step: `value_and_grad` of the model function, staged out for one batch.

A flat calling convention joins the halves. In: trained leaves, frozen leaves, model state, one
micro-batch, the loss scale if there is one. Out: gradients, loss, new model state, aux.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fzero import tree, zero
from fzero.config import Config
from fzero.distributed.mesh import Axes
from fzero.eager.lazy import changed_in_place, written_already
from fzero.errors import STATEFUL, FzeroError, ShardError
from fzero.numerics.casts import cast
from fzero.program import Program
from fzero.program.categories import BATCH, GRADIENTS, PARAMETERS, RESULTS, SCALE, STATE
from fzero.program.choice import Choice
from fzero.program.dynamic import InputDim
from fzero.program.graph import Held, placeholders, tensors_of
from fzero.program.memory import storages
from fzero.program.passes.lay import lay
from fzero.state.plan import Plan
from fzero.transforms.call import Call
from fzero.transforms.derivatives import gradients
from fzero.transforms.frames import Frame, take_apart
from fzero.transforms.loss import summable
from fzero.transforms.notes import Notes
from fzero.transforms.parts import Opened
from fzero.transforms.recorded import Recorded
from fzero.transforms.staging import staged_out, taking
from fzero.tree import PyTree
from fzero.zero import Leaves

ModelFn = Callable[..., Any]


@dataclass
class Signature:
    """What the flat leaves of one call stand for; the specs of what comes out are found on the way.

    Args:
        plan: of the step.
        state: structure of the model state, or None if there is none.
        batch: structure of the batch.
        scaled: whether the last input is a loss scale.
    """

    plan: Plan
    state: tree.Spec | None
    batch: Frame
    scaled: bool
    state_out: tree.Spec | None = field(default=None)
    aux_out: Frame | None = field(default=None)

    @property
    def batch_at(self) -> slice:
        """Where the batch is among the flat inputs."""
        start = len(self.plan.sharding.layout) + (self.state.num_leaves if self.state else 0)
        return slice(start, start + self.batch.num_leaves)

    def parts(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        """The flat inputs as (parameters, state, batch, scale)."""
        layout = self.plan.sharding.layout
        sizes = [len(layout), self.state.num_leaves if self.state else 0, self.batch.num_leaves]
        cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        params, *rest = [tuple(flat[a:b]) for a, b in itertools.pairwise(cuts)]
        trained = len(layout.trained)
        return (
            layout.merge(params[:trained], params[trained:]),
            *rest,
            tuple(flat[cuts[-1] :]),
        )

    def call(self, model_fn: ModelFn, leaves: Leaves, state: Leaves, batch: Leaves) -> Call:
        """The model function's call, as `value_and_grad` has it.

        Args:
            leaves: the parameters, as they live between steps.
            state, batch: leaves of the model state and of a micro-batch.
        """
        plan, sharding = self.plan, self.plan.sharding
        _check_takes(model_fn, self.state is not None)
        args: list[Any] = [
            Opened(
                sharding.spec,
                sharding.paths,
                sharding.layout,
                plan.mesh,
                sharding.dtensors,
                tuple(leaves),
                as_parts=True,
                own=False,
            )
        ]
        if self.state is not None:
            args.append(tree.unflatten(self.state, state))
        args.append(self.batch.unflatten(batch))

        def finish(result: Any) -> tuple[Any, Leaves]:
            return self._finished(result, state)

        room = plan.cfg.stage == 3  # below it gradients are cast where they are reduced
        watched = True  # by a recording, and by the eager executor
        return Call(model_fn, plan.cfg, (0,), args, {}, room=room, finish=finish, watched=watched)

    def results(self, flat: Sequence[Any]) -> tuple[list[Any], Any, list[Any], PyTree]:
        """The flat outputs as (gradients, loss, state leaves, aux)."""
        trained = len(self.plan.trained)
        states = self.state_out.num_leaves if self.state_out else 0
        grads, (loss, *rest) = list(flat[:trained]), flat[trained:]
        aux = self.aux_out.unflatten(rest[states:]) if self.aux_out else None
        return grads, loss, rest[:states], aux

    def _finished(self, result: Any, before: Leaves) -> tuple[Any, Leaves]:
        """What the model function returned, as (loss, leaves of model state and aux)."""
        cfg = self.plan.cfg
        loss, new_state, aux = _taken_apart(result, cfg, self.state is not None)
        leaves: list[Any] = []
        if self.state is not None:
            leaves, self.state_out = tree.flatten(new_state)
            _check_state(self, leaves, before)
        if cfg.has_aux:
            # numbers may differ between micro-batches, whose aux is stacked
            tensors, self.aux_out = take_apart(aux, "aux", numbers=True)
            leaves = [*leaves, *cast(tensors, cfg.dtypes.output)]
        return cast(loss, cfg.dtypes.output), tuple(leaves)


def gradient_fn(
    model_fn: ModelFn, signature: Signature, grad: zero.Grad
) -> Callable[..., tuple[Tensor, ...]]:
    """`value_and_grad` of the model function under the flat calling convention, before the mean.

    Gradients are scaled to sum to the mean over ranks and micro-batches. With accumulation they
    come in no less than float32, and stages 0 and 1 return this rank's own: they are reduced once a
    step.
    """
    plan = signature.plan
    cfg = plan.cfg

    def flat_fn(*flat: Tensor) -> tuple[Tensor, ...]:
        leaves, state, batch, scale = signature.parts(flat)
        with taking(grad, plan.mesh):
            call = signature.call(model_fn, leaves, state, batch)
            share = share_of(cfg, plan.axes, scale)
            loss, rest, grads = gradients(call, share, has_aux=True, way=way_of(cfg))
        return (*(summable(grads) if cfg.accum_steps > 1 else grads), loss, *rest)

    return flat_fn


def share_of(cfg: Config, axes: Axes, scale: Sequence[Tensor]) -> float | Tensor:
    """What a micro-batch's loss is multiplied by: its share of the mean, and the loss scale."""
    share = 1.0 / (axes.world * cfg.accum_steps)
    external = cfg.scaling is not None and cfg.scaling.external  # it is on the loss already
    # in double: the share may be a third, which rounded to the scale's own float32 would make
    # gradients of float64 no better than that
    return scale[0].double() * share if scale and not external else share


def way_of(cfg: Config) -> zero.Way:
    """Which way parameters come and gradients go at a stage."""
    if cfg.stage == 3:
        return zero.zero3
    if reduces_once(cfg):
        return zero.ddp_local
    return zero.zero2 if cfg.stage else zero.zero0


def reduces_once(cfg: Config) -> bool:
    """Whether gradients are accumulated before they are reduced."""
    return cfg.stage < 2 and cfg.accum_steps > 1


def trace_gradients(
    model_fn: ModelFn,
    signature: Signature,
    inputs: Sequence[Tensor],
    names: Sequence[str],
    resident: Sequence[Held],
    choice: Choice | None = None,
    dynamic: Sequence[InputDim] = (),
    uneven: int = 0,
) -> Recorded:
    """The gradient function, staged out.

    Args:
        inputs: example tensors for the flat calling convention.
        names: one per input.
        resident: what a rank holds beside them while the Program runs.
        choice: settled by all ranks; None: the best buckets up to `cfg.bucket_mb`, and the first
            plan that fits.
        dynamic: dims of inputs whose sizes may be others at other calls, if that can be had.
        uneven: bytes of state that the rank with the largest shards holds more than this one.

    Raises:
        ConfigError: nothing stays under `cfg.memory_limit`.
        FzeroError: the model function changes a parameter in place.
        TraceError: it can't be staged out.
    """
    cfg, layout = signature.plan.cfg, signature.plan.sharding.layout
    autograd = functools.partial(zero.autograd, must_depend=True)
    fixed = {leaf.name: leaf.compute or leaf.dtype for leaf in layout}
    at, overlap = signature.batch_at, signature.batch.overlap
    # what is written to one of them is in another then
    batch = {n: x.dtype for n, x in zip(names[at], inputs[at], strict=True)} if overlap else {}
    fixed |= batch
    return staged_out(
        "gradients",
        # in this order: the first is the definition, the second for what it refuses
        [
            ("torch.func.vjp", gradient_fn(model_fn, signature, zero.vjp)),
            ("torch.autograd.grad", gradient_fn(model_fn, signature, autograd)),
        ],
        Notes({"model_fn": model_fn}),
        inputs,
        names,
        cfg,
        roles=lambda: _roles(signature, resident),
        fixed=fixed,
        changed=lambda name: batch_changed(name) if name in batch else changed_in_place(name),
        choice=choice,
        slack=slack_of(cfg),
        uneven=uneven,
        last=lambda program: _last(program, signature.plan),
        dynamic=dynamic,
    )


def _last(program: Program, plan: Plan) -> Program:
    cfg = plan.cfg
    # inductor joins no operators that write where they are told
    if plan.axes.world == 1 and cfg.executor != "inductor" and cfg.limit is None:
        program = lay(program)
    return replace(program, resident=_batch_once(program))


def batch_changed(name: str, *, written: bool = False) -> FzeroError:
    """What to say of a model function that writes to its batch; `written`: the caller's own."""
    more = written_already(name) if written else ""
    return FzeroError(
        f"the model function changed {name} in place. The batch is an input of a pure function: "
        f"compute a new tensor instead (x - mean, not x.sub_(mean)).{more}"
    )


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


def _roles(signature: Signature, resident: Sequence[Held]) -> dict[str, Any]:
    """What the inputs and outputs of the flat calling convention are, as a Program has it."""
    plan = signature.plan
    trained = [leaf.name for leaf in plan.trained]
    states = signature.state_out.num_leaves if signature.state_out else 0
    aux = signature.aux_out.names if signature.aux_out else ()
    names = [*trained, "loss", *[f"model_state.{i}" for i in range(states)]]
    names += [f"aux.{name}".rstrip(".") for name in aux]
    return {
        "times": plan.cfg.accum_steps,
        "resident": tuple(resident),
        "outputs": tuple(names),
        "input_categories": (
            *[PARAMETERS] * len(plan.sharding.layout),
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
        "reduced_over": () if reduces_once(plan.cfg) else plan.axes.groups,
    }


def slack_of(cfg: Config) -> float:
    """How much of a step's peak fewer and larger collectives may cost.

    Who shards parameters is short of memory, and more so who cuts batches for it; who does not
    shard them holds them all in any case.
    """
    if cfg.accum_steps > 1 and (cfg.stage == 3 or reduces_once(cfg)):
        return 0.05
    return 0.1 if cfg.stage == 3 else 0.25


def _check_takes(model_fn: ModelFn, stateful: bool) -> None:
    """See that the model function can be called with what it will be given.

    A TypeError from the call itself would look like one of the model's own.
    """
    given = ["params"] + ["model_state"] * stateful + ["batch"]
    try:
        signature = inspect.signature(model_fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        name = getattr(model_fn, "__name__", type(model_fn).__name__)
        raise FzeroError(
            f"the model function {name}{signature} can't be called with ({', '.join(given)}): "
            f"{error}. init was given {'a' if stateful else 'no'} model state. A model function is "
            f"model_fn(params, batch) -> loss, and with model state {STATEFUL}. What else it "
            "needs, give it by a closure or functools.partial, or in the batch, which may be a "
            "tuple or a dict."
        ) from None


def _taken_apart(result: Any, cfg: Config, stateful: bool) -> tuple[Any, Any, Any]:
    """What the model function returned, as (loss, model state, aux)."""
    form = ["loss"] + ["new_model_state"] * stateful + ["aux"] * cfg.has_aux
    if len(form) == 1:
        if isinstance(result, (tuple, list)):
            raise FzeroError(
                f"the model function returned a {type(result).__name__} of {len(result)}, and one "
                "of (params, batch) must return the loss alone. What changes from call to call, "
                f"such as BatchNorm's buffers, is model state: {STATEFUL}. What is only told is "
                "aux: Config(has_aux=True) and model_fn(params, batch) -> (loss, aux)."
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
