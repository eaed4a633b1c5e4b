"""`make_train_step`: a whole training step as one function from state to state."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.config import Config
from fzero.distributed.agree import agree, smallest
from fzero.distributed.mesh import Mesh, default_store, resolve_mesh
from fzero.distributed.rendezvous import rendezvous
from fzero.distributed.whereabouts import circle_of
from fzero.errors import ConfigError, RankMismatchError, ShardError
from fzero.numerics.casts import refuse_outer_autocast
from fzero.numerics.loss_scale import LossScaleState, Watch, exhausted
from fzero.optim import as_optimizer
from fzero.optim.base import Optimizer
from fzero.program import Program
from fzero.state.init import agree_on_start, start
from fzero.state.masters import copied
from fzero.state.opt_state import LocalState, OptState
from fzero.state.plan import Plan
from fzero.state.sharding import check_tensors, like, locals_of, plan_sharding
from fzero.step.eager import Eager
from fzero.step.frames import take_apart
from fzero.step.gradients import ModelFn
from fzero.step.metrics import metrics_of, refuse_nonfinite
from fzero.step.notes import ONE_AT_A_TIME, warn_of_recordings
from fzero.step.traced import Traced
from fzero.step.update import Updated
from fzero.tree import PyTree

MAX_SIGNATURES = 8


def make_train_step(model_fn: ModelFn, opt: Any, cfg: Config | None = None) -> "TrainStep":
    """A pure, sharded training step.

    Args:
        model_fn: `(params, batch) -> loss`, a 0-d floating tensor: the mean over this rank's batch.
            `-> (loss, aux)` with `cfg.has_aux`; with model state `(params, model_state, batch) ->
            (loss, new_model_state)`; with both `-> (loss, new_model_state, aux)`.
        opt: one of `fzero.optim`, or any object with optax's `init` and `update`.
        cfg: see `Config`.

    Raises:
        ConfigError: `opt` is no optimizer, or `cfg` asks for what there isn't.

    Examples:
        >>> import fzero
        >>> def model_fn(params, batch):
        ...     return ((params["w"] * batch).sum(-1) ** 2).mean()
        >>> step_fn = make_train_step(model_fn, fzero.optim.sgd(0.1))
        >>> params, opt_state = step_fn.init({"w": torch.ones(3)})
        >>> params, opt_state = step_fn(params, opt_state, torch.ones(2, 3))
        >>> opt_state.metrics["loss"]
        tensor(9.)
    """
    if not callable(model_fn):
        raise ConfigError(
            f"model_fn is a {type(model_fn).__name__}; it must be a function "
            "(params, batch) -> loss."
        )
    return TrainStep(model_fn, as_optimizer(opt), cfg or Config())


class TrainStep:
    """A step from `(params, opt_state, batch)` to `(params, opt_state)`; see `make_train_step`.

    Nothing that a call computes depends on earlier calls: what is kept are Programs, by the shapes
    that they were staged out for.
    """

    def __init__(self, model_fn: ModelFn, opt: Optimizer, cfg: Config) -> None:
        _check_available(cfg)
        self.model_fn = model_fn
        self.opt = opt
        self.cfg = cfg
        self._takes_state = _takes_state(model_fn)
        self._plan: Plan | None = None
        self._staged: dict[Any, list[Traced]] = {}  # by shapes; the last used comes first
        self._eager: dict[Any, Eager] = {}
        self._bucket_bytes: tuple[int, int] | None = None
        self._number, self._calls = 0, 0
        self._warned = False
        self._last_collectives: str | None = None
        self._watch = Watch()

    def init(
        self, params: PyTree | Callable[[], PyTree], model_state: PyTree = None
    ) -> tuple[PyTree, OptState]:
        """Sharded parameters and the state of the first step.

        Args:
            params: pytree of full tensors, the same on every rank; they are copied. Or a function
                without arguments that builds it: its operators are recorded and run again leaf by
                leaf, so that no rank ever holds the whole model. Values, and the state of torch's
                random generator afterwards, are those of calling it.
            model_state: what the model function carries from call to call (BatchNorm's running
                statistics), or None.

        Returns:
            `(params, opt_state)`.

        Raises:
            ShardError: a leaf is not a tensor.
            RankMismatchError: ranks differ in config, structure, shapes, dtypes or values.
            TraceError: the function that builds the parameters can't be recorded.

        Examples:
            >>> import fzero
            >>> apply, _ = fzero.functionalize(torch.nn.Linear(3, 2, device="meta"))
            >>> def model_fn(params, batch):
            ...     return apply(params, batch).square().mean()
            >>> step_fn = make_train_step(model_fn, fzero.optim.sgd(0.1))
            >>> build = lambda: fzero.functionalize(torch.nn.Linear(3, 2))[1]
            >>> params, opt_state = step_fn.init(build)
            >>> {name: tuple(leaf.shape) for name, leaf in params.items()}
            {'weight': (2, 3), 'bias': (2,)}
        """
        if model_state is not None and not self._takes_state:
            raise ConfigError(
                "step_fn.init was given a model_state, and model_fn takes (params, batch). Make it "
                "model_fn(params, model_state, batch) -> (loss, new_model_state), or leave it out."
            )
        plan, params, opt_state = start(self.cfg, self.opt, params, model_state)
        self._use(plan)
        return params, opt_state

    def __call__(
        self, params: PyTree, opt_state: OptState, batch: PyTree
    ) -> tuple[PyTree, OptState]:
        """One step.

        Args:
            params, opt_state: from `init` or the last call. With `cfg.donate` their memory is
                reused: do not read them again. A model function of two arguments gets no model
                state; one that is there (an engine's, of its module's buffers) is carried along.
            batch: pytree of tensors, this rank's part of the global batch. With `accum_steps=k`
                each leaf's leading dim is cut into k micro-batches; 0-d leaves go to all.
                Dataclasses and mappings may be among its containers, numbers and strings among
                its leaves: the step is staged out anew for other ones.

        Returns:
            `(params, opt_state)`; `opt_state.metrics` tells loss and gradient norm.

        Raises:
            ConfigError: the call is under the caller's own `torch.autocast`.
            TraceError: the model function can't be staged out.
            ShardError: `params` or `batch` does not fit.
            RankMismatchError: ranks would run different collectives, or a rank is gone: it is
                named.
            FzeroError: the loss is no 0-d floating tensor; with `on_nonfinite="raise"`, a gradient
                is not finite (nothing was changed then); a dynamic loss scale was at its minimum
                and gradients overflowed (nothing was changed; from a GPU it is told two calls
                later).
        """
        self._watch.look()
        plan, leaves, held = self._unpack(params, opt_state)
        micro = micro_batches(batch, self.cfg.accum_steps)
        staged = self._agreed(self._stage(plan, leaves, held, micro[0]), leaves, held, micro[0])
        trained, frozen = plan.sharding.layout.divide(leaves)
        circle = circle_of(plan.mesh.device_mesh)
        sent = circle.sent
        try:
            with circle.at(self._meeting, self.cfg.timeout):
                grads, loss, state, aux = staged.gradients(
                    trained, frozen, held, micro, opt_state.step
                )
        except BaseException:
            if circle.sent == sent:  # the others know nothing of this call: the next one is it
                self._calls -= 1
            raise
        if self.cfg.nonfinite_policy == "raise":
            refuse_nonfinite(loss, grads, plan, int(opt_state.step))
        if not self.cfg.donate:
            trained = tuple(map(copied, trained))
            inner, kept = list(map(copied, held.inner)), list(map(copied, held.masters))
            held = held._replace(masters=kept, inner=inner)
        with circle.within():
            updated = staged.update(trained, held, grads, loss, state)
        if self.cfg.scaling is not None:
            before = LossScaleState(*held.scale)
            self._watch.add(exhausted(before, ~updated.nonfinite, self.cfg.scaling))
        new = plan.sharding.layout.merge(trained, frozen)
        return self._pack(params, opt_state, new, held, updated, aux)

    def lower(self, params: PyTree, opt_state: OptState, batch: PyTree) -> Program:
        """The step's Program for these arguments, without running it; changes nothing.

        Printed it is a listing; `.collectives()` has a row per collective, `.peak_bytes()` the most
        bytes that this rank holds at once.
        """
        plan, leaves, held = self._unpack(params, opt_state)
        micro = micro_batches(batch, self.cfg.accum_steps)
        return self._stage(plan, leaves, held, micro[0]).program

    def _use(self, plan: Plan) -> Plan:
        """Go on with `plan`; Programs for other parameters are of no use then."""
        old = self._plan
        if old is plan:
            return plan
        if old is None or (old.sharding, old.mesh) != (plan.sharding, plan.mesh):
            self._staged, self._eager = {}, {}
            self._bucket_bytes, self._last_collectives = None, None
        self._plan = plan
        return plan

    def _unpack(self, params: PyTree, opt_state: OptState) -> tuple[Plan, list[Tensor], LocalState]:
        """The plan for this tree, its local leaves, and the local leaves of the state."""
        refuse_outer_autocast()
        leaves, spec = tree.flatten(params)
        if not isinstance(opt_state, OptState):
            raise ShardError(
                f"opt_state is a {type(opt_state).__name__}; pass the second value that "
                "step_fn.init or the last call of step_fn returned."
            )
        plan = self._plan
        if plan is None:  # a state from elsewhere: a checkpoint, another step function
            check_tensors("params", leaves, tree.paths(params))
            device_type = leaves[0].device.type if leaves else "cpu"
            mesh = resolve_mesh(self.cfg.mesh, device_type)
            agree_on_start(self.cfg, params, opt_state.model_state, mesh, values=False)
            sharding = plan_sharding(params, self.cfg, mesh, sharded=self.cfg.stage == 3)
            plan = Plan(self.cfg, self.opt, mesh, sharding)
        plan.check(leaves, spec)
        _check_scale(opt_state, self.cfg)
        carried = opt_state if self._takes_state else opt_state._replace(model_state=None)
        held = LocalState.of(carried, dtensors=self.opt.foreign)
        plan.check_inner(held.inner_spec)
        return self._use(plan), locals_of(leaves), held

    def _pack(
        self,
        params: PyTree,
        opt_state: OptState,
        leaves: Sequence[Tensor],
        held: LocalState,
        updated: Updated,
        aux: PyTree,
    ) -> tuple[PyTree, OptState]:
        """The trees to return; with donation their leaves are the very tensors that came in."""
        master, inner = opt_state.master, opt_state.inner
        if not self.cfg.donate:
            old, spec = tree.flatten(params)
            params = tree.unflatten(spec, map(like, leaves, old))
            old, spec = tree.flatten(master)
            master = tree.unflatten(spec, map(like, held.masters, old))
            old, spec = tree.flatten(inner)
            inner = tree.unflatten(spec, map(like, held.inner, old))
        if updated.inner is not None:
            inner = tree.unflatten(held.inner_spec, map(like, updated.inner, tree.leaves(inner)))
        scale = opt_state.loss_scale.scale if opt_state.loss_scale is not None else None
        metrics = metrics_of(updated, updated.loss, scale, self.cfg)
        if self.cfg.has_aux:
            metrics["aux"] = aux
        state = opt_state.model_state
        if held.state_spec is not None:
            state = tree.unflatten(held.state_spec, updated.model_state)
        advance = 1 if self.cfg.scaling is None else ~updated.nonfinite
        new = OptState(opt_state.step + advance, inner, master, updated.loss_scale, state, metrics)
        return params, new

    def _stage(
        self, plan: Plan, leaves: list[Tensor], held: LocalState, micro: PyTree
    ) -> Traced | Eager:
        """What runs a step of these shapes; staged out the first time."""
        if self.cfg.executor == "eager":  # one for all shapes
            if held.state_spec not in self._eager:
                self._eager[held.state_spec] = Eager(self.model_fn, plan, held)
            return self._eager[held.state_spec]
        batch, spec = take_apart(micro)
        key = ((held.state_spec, spec), *[(x.shape, x.stride(), x.dtype, x.device) for x in batch])
        known = self._staged.get(key, [])
        for staged in known:
            if staged.hold():  # see [Note: stale]
                break
        else:
            if sum(map(len, self._staged.values())) >= MAX_SIGNATURES and not self._warned:
                self._warned = True
                if known:
                    count = sum(map(len, self._staged.values())) + 1
                    warn_of_recordings("this step function", count, known[0].differences())
                else:
                    _warn_of_signatures(list(self._staged), key)
            like = next((one for one in known if one.notes.hold()), None)
            sizes = self._bucket_bytes
            with ONE_AT_A_TIME:
                staged = Traced(self.model_fn, plan, leaves, held, batch, spec, sizes, like)
        if not known or known[0] is not staged:
            known = [staged, *(one for one in known if one is not staged)][:MAX_SIGNATURES]
            self._staged[key] = known
        return staged

    def _agreed(
        self, staged: Traced | Eager, leaves: list[Tensor], held: LocalState, micro: PyTree
    ) -> Traced | Eager:
        """`staged` with the buckets, and so the collectives, that all ranks have.

        The best size of a bucket depends on what differs between ranks: the rows of an uneven
        shard, the shapes of a batch. The first call settles it for all that follow.
        """
        self._calls += 1
        mesh = staged.plan.mesh
        if self._bucket_bytes is None:
            first, second = smallest(
                "the size of buckets", staged.bucket_bytes, mesh, self.cfg.timeout
            )
            self._bucket_bytes = (first, second)
        if staged.bucket_bytes != self._bucket_bytes:
            self._forget(staged)
            staged = self._stage(staged.plan, leaves, held, micro)
        if staged.collectives != self._last_collectives:
            try:
                self._agree_on_collectives(mesh, staged.collectives)
            except RankMismatchError:
                self._forget(staged)  # the model function may do otherwise when called again
                raise
        return staged

    def _forget(self, staged: Traced | Eager) -> None:
        rest = {k: [one for one in v if one is not staged] for k, v in self._staged.items()}
        self._staged = {k: v for k, v in rest.items() if v}
        self._eager = {k: v for k, v in self._eager.items() if v is not staged}

    @property
    def _meeting(self) -> str:
        """Where ranks meet whose collectives change in this call."""
        return f"step function {self._number}, call {self._calls}"

    def _agree_on_collectives(self, mesh: Mesh, collectives: str) -> None:
        """Whenever this rank's collectives change, see that all ranks' do, before any runs."""
        if self._last_collectives is None:
            lines = [(f"line {i}", line) for i, line in enumerate(collectives.split("\n"), 1)]
            agree("the step's collectives", lines, mesh, self.cfg.timeout)
            if not circle_of(mesh.device_mesh).alone:
                # ranks make their step functions in the same order: the n-th is the same on all
                key = f"fzero/step functions/{mesh.ranks}/{mesh.rank}"
                self._number = default_store().add(key, 1)
        else:
            rendezvous(f"{self._meeting}, new collectives", collectives, mesh, self.cfg.timeout)
        self._last_collectives = collectives


def micro_batches(batch: PyTree, count: int) -> list[PyTree]:
    """`batch` cut into `count` parts along every leaf's leading dim; 0-d leaves go to all.

    Raises:
        ShardError: a leaf is not a tensor, or its leading dim is not divisible by `count`.

    Examples:
        >>> micro_batches({"x": torch.arange(4)}, 2)
        [{'x': tensor([0, 1])}, {'x': tensor([2, 3])}]
    """
    leaves, frame = take_apart(batch)
    for x, path in zip(leaves, frame.paths, strict=True):
        _check_leaf(x, path)
    if count == 1:
        return [batch]
    for x, path in zip(leaves, frame.paths, strict=True):
        if x.dim() and x.shape[0] % count:
            raise ShardError(
                f"batch{path} has {x.shape[0]} rows, which Config.accum_steps={count} does not "
                f"divide; every micro-batch must have the same rows. Pass {count} x n rows, or "
                "drop the last ones (drop_last=True in a DataLoader)."
            )
    columns = [x.chunk(count) if x.dim() else (x,) * count for x in leaves]
    return [frame.unflatten([column[i] for column in columns]) for i in range(count)]


def _check_leaf(x: Tensor, path: str) -> None:
    if isinstance(x, DTensor):
        raise ShardError(
            f"batch{path} is a DTensor, a parameter that is sharded over ranks; a batch is made of "
            "plain tensors. Pass fzero.unshard(...) of it, which every rank must call."
        )
    if x.layout != torch.strided:
        raise ShardError(
            f"batch{path} is a sparse tensor ({x.layout}), which can't be staged out. Pass its "
            "indices() and values(), and make the sparse tensor in the model function."
        )


def _check_scale(opt_state: OptState, cfg: Config) -> None:
    found, wanted = opt_state.loss_scale is not None, cfg.scaling is not None
    if found != wanted:
        raise ShardError(
            f"opt_state.loss_scale is {'there' if found else 'None'}, and this step function's "
            f"Config.loss_scale={cfg.loss_scale!r} with precision={cfg.precision!r} keeps "
            f"{'one' if wanted else 'none'}. Start a state with step_fn.init, or say "
            "opt_state._replace(loss_scale=...) with that of a fresh one."
        )


def _check_available(cfg: Config) -> None:
    if cfg.executor == "inductor":
        raise ConfigError(
            "Config.executor='inductor' is not supported by make_train_step; 'traced' runs the "
            "Program as it is."
        )


def _takes_state(model_fn: ModelFn) -> bool:
    """Whether a model function takes more than `(params, batch)`; if nobody can tell, it does."""
    try:
        given = inspect.signature(model_fn).parameters.values()
    except (TypeError, ValueError):
        return True
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [x for x in given if x.kind in places and x.default is inspect.Parameter.empty]
    return len(required) != 2 or any(x.kind is inspect.Parameter.VAR_POSITIONAL for x in given)


def _warn_of_signatures(old: list[Any], new: Any) -> None:
    (_, frame), *leaves = new
    paths = frame.paths
    before, *last = old[-1]
    changed = ["its structure"]
    if before == new[0]:
        rows = zip(paths, last, leaves, strict=True)
        changed = [f"batch{p} from {_describe(a)} to {_describe(b)}" for p, a, b in rows if a != b]
    warnings.warn(
        f"this step function has been staged out for {len(old)} kinds of batch, and now comes "
        f"another; since the last one changed {', '.join(changed[:3])}. Each costs a recording and "
        "its memory. Pad batches to a few shapes, or drop the last incomplete one.",
        stacklevel=4,
    )


def _describe(leaf: tuple[Any, ...]) -> str:
    shape, stride, dtype, device = leaf
    text = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"
    dense = torch.empty(shape, device="meta").stride()
    return text if stride == dense else f"{text} with strides {stride}"
