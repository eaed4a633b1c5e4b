"""`make_train_step`: a whole training step as one function from state to state."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.config import Config, as_config
from fzero.distributed.dtensor import local_tensor
from fzero.distributed.mesh import resolve_mesh
from fzero.errors import ConfigError, FzeroError, ShardError, arguments_by_name
from fzero.functional.memory import Apart
from fzero.functional.surroundings import refuse_fakes, refuse_transforms
from fzero.functional.uncompiled import never_compiled
from fzero.inference import makes_normal
from fzero.numerics.casts import refuse_outer_autocast
from fzero.numerics.loss_scale import LossScaleState, Watch, at_minimum, exhausted
from fzero.optim import as_optimizer
from fzero.optim.base import Optimizer
from fzero.program import Program
from fzero.program.choice import Choice
from fzero.program.program import Pass
from fzero.state.agreement import agree_on_optimizer, agree_on_start
from fzero.state.init import start
from fzero.state.masters import copied
from fzero.state.opt_state import LocalState, OptState, not_written, refuse_spent, spend
from fzero.state.plan import Plan
from fzero.state.sharding import check_tensors, like, locals_of, plan_sharding
from fzero.step.alike import late
from fzero.step.executors import Executors
from fzero.step.gradients import ModelFn
from fzero.step.metrics import metrics_of, rate_of, refuse_nonfinite
from fzero.step.saved import SavedPrograms
from fzero.step.update import Updated
from fzero.step.update_program import names_of_state
from fzero.transforms.function import refuse_module
from fzero.transforms.micro import micro_batches
from fzero.tree import PyTree


@arguments_by_name
def make_train_step(model_fn: ModelFn, opt: Any, cfg: Config | None = None) -> "TrainStep":
    """A pure, sharded training step: `value_and_grad` of the model function for each micro-batch,
    clipping, and the optimizer on the shards.

    Args:
        model_fn: `(params, batch) -> loss`, a 0-d floating tensor: the mean over this rank's batch.
            `-> (loss, aux)` with `cfg.has_aux`; with model state `(params, model_state, batch) ->
            (loss, new_model_state)`; with both `-> (loss, new_model_state, aux)`.
        opt: one of `fzero.optim`, or any object with optax's `init` and `update`.
        cfg: see `Config`.

    Raises:
        ConfigError: `opt` is no optimizer, or `cfg` asks for what there isn't.

    Examples:
        >>> import fzero, torch
        >>> def model_fn(params, batch):
        ...     return ((params["w"] * batch).sum(-1) ** 2).mean()
        >>> step_fn = make_train_step(model_fn, fzero.optim.sgd(0.1))
        >>> params, opt_state = step_fn.init({"w": torch.ones(3)})
        >>> params, opt_state = step_fn(params, opt_state, torch.ones(2, 3))
        >>> opt_state.metrics["loss"]
        tensor(9.)
    """
    refuse_module("make_train_step", model_fn)
    if not callable(model_fn):
        raise ConfigError(
            f"model_fn is a {type(model_fn).__name__}; it must be a function "
            "(params, batch) -> loss."
        )
    return TrainStep(model_fn, as_optimizer(opt), as_config("make_train_step", cfg))


class TrainStep:
    """A step from `(params, opt_state, batch)` to `(params, opt_state)`; see `make_train_step`.

    Nothing that a call computes depends on earlier calls: what is kept are Programs, by the shapes
    that they were staged out for.
    """

    def __init__(self, model_fn: ModelFn, opt: Optimizer, cfg: Config) -> None:
        _check_available(cfg, opt)
        self.opt = opt
        self.cfg = cfg
        self._takes_state = _takes_state(model_fn)
        self._plan: Plan | None = None
        self._executors = Executors(model_fn, cfg)
        self._watch = Watch()
        self._apart = Apart()

    @property
    def model_fn(self) -> ModelFn:
        """The user's function; another one counts from the next recording on."""
        return self._executors.model_fn

    @model_fn.setter
    def model_fn(self, model_fn: ModelFn) -> None:
        self._executors.model_fn = model_fn

    def __repr__(self) -> str:
        name = getattr(self.model_fn, "__name__", type(self.model_fn).__name__)
        told = ""
        if (plan := self._plan) is not None:
            count = sum(leaf.numel for leaf in plan.sharding.layout.leaves)
            told = f", world {plan.mesh.world_size}, {count:,} parameters"
        return f"TrainStep({name}, {self.cfg!r}{told})"

    def __copy__(self) -> "TrainStep":
        """Another step function, which is staged out for itself: ranks all copy it, or none."""
        return self._again(self.cfg)

    def __deepcopy__(self, memo: Any) -> "TrainStep":
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FzeroError(
            "a step function is code and Programs, and can't be pickled. Make it anew from its "
            "model function, optimizer and Config; save_programs(path) keeps what was staged out."
        )

    @partial(arguments_by_name, name="step_fn.init")
    def init(
        self, params: PyTree | Callable[[], PyTree], model_state: PyTree = None
    ) -> tuple[PyTree, OptState]:
        """Sharded parameters and the state of the first step.

        Args:
            params: pytree of full tensors, the same on every rank; they are copied, and one that
                is at two places becomes two parameters, which start alike (`functionalize` gives
                tied ones once). Or a function without arguments that builds it: its operators are
                recorded and run again leaf by leaf, so that no rank ever holds the whole model.
                Values, and the state of torch's random generator afterwards, are those of calling
                it.
            model_state: what the model function carries from call to call (BatchNorm's running
                statistics), or None.

        Returns:
            `(params, opt_state)`.

        Raises:
            ShardError: a leaf is not a tensor, or there is none.
            RankMismatchError: ranks differ in config, structure, shapes, dtypes or values.
            TraceError: the function that builds the parameters can't be recorded.

        Examples:
            >>> import fzero, torch
            >>> apply, _ = fzero.functionalize(torch.nn.Linear(3, 2, device="meta"))
            >>> def model_fn(params, batch):
            ...     return apply(params, batch).square().mean()
            >>> step_fn = make_train_step(model_fn, fzero.optim.sgd(0.1))
            >>> build = lambda: fzero.functionalize(torch.nn.Linear(3, 2))[1]
            >>> params, opt_state = step_fn.init(build)
            >>> {name: tuple(leaf.shape) for name, leaf in params.items()}
            {'weight': (2, 3), 'bias': (2,)}
        """
        refuse_transforms("step_fn.init")
        plan, params, opt_state = start(self.cfg, self.opt, params, model_state)
        self._use(plan)
        return params, opt_state

    @never_compiled
    @makes_normal
    @partial(arguments_by_name, name="step_fn")
    def __call__(
        self, params: PyTree, opt_state: OptState, batch: PyTree
    ) -> tuple[PyTree, OptState]:
        """One step.

        Args:
            params, opt_state: from `init` or the last call. With `cfg.donate` their memory is
                reused: do not read them again. A model function of two arguments gets no model
                state; one that is there (an engine's, of its module's buffers) is carried along.
            batch: pytree of tensors, this rank's part of the global batch. With `accum_steps=k`
                each leaf's leading dim, the same of all, is cut into k micro-batches; 0-d leaves
                go to all.
                Dataclasses and mappings may be among its containers, numbers and strings among
                its leaves: the step is staged out anew for other ones.

        Returns:
            `(params, opt_state)`; `opt_state.metrics` tells loss and gradient norm.

        Raises:
            ConfigError: the call is under the caller's own `torch.autocast`, or has other
                arguments.
            TraceError: the model function can't be staged out.
            ShardError: `params`, `opt_state` or `batch` does not fit; an earlier call has written
                over `opt_state`; or a leaf that is donated can't be written over (it was made under
                `torch.inference_mode()`, or by `expand`), or lies in the memory of another.
            RankMismatchError: ranks would run different collectives, or a rank is gone: it is
                named.
            FzeroError: the loss is no 0-d floating tensor; with `on_nonfinite="raise"`, a gradient
                is not finite (nothing was changed then); a dynamic loss scale was at its minimum
                and gradients overflowed (nothing was changed; from a GPU it is told two calls
                later).
        """
        # before any collective of this call: here all ranks raise alike, or none
        self._watch.look()
        refuse_fakes("step_fn")
        plan, leaves, local = self._unpack(params, opt_state)
        refuse_spent(opt_state)
        if self.cfg.donate:
            self._refuse_unwritable(plan, leaves, local)
        micro = micro_batches(batch, self.cfg.accum_steps)
        executor = self._executors.agreed(plan, leaves, local, micro[0])

        trained, frozen = plan.sharding.layout.divide(leaves)
        given = trained
        if self.cfg.donate and plan.homes is not None:
            trained = plan.homes.settled(trained)
        stay = self.cfg.donate and trained is given  # the very tensors that came in go back
        # all of them inside, whatever one raises: the others wait for the collectives that are left
        with self._executors.running(plan):
            grads, loss, state, aux = executor.gradients(
                trained, frozen, local, micro, opt_state.step
            )
            if self.cfg.nonfinite_policy == "raise":
                refuse_nonfinite(loss, grads, plan, int(opt_state.step))
            lr = rate_of(self.opt, opt_state.inner)  # before the update writes over the state
            with torch.no_grad():  # what came in may have a graph, and an update is no part of one
                # not before: gradients only read it, and copies would take memory meanwhile
                if not self.cfg.donate:
                    homes = plan.homes
                    copies = homes.copies if homes is not None else partial(map, copied)
                    trained, local = [*copies(trained)], local.copied()
                updated = executor.update(trained, local, grads, loss, state)
        if self.cfg.scaling is not None:
            before = LossScaleState(*local.scale)
            try:
                self._watch.add(exhausted(before, ~updated.nonfinite, self.cfg.scaling), at_minimum)
            except FzeroError:
                not_written(local)  # an overflow is skipped
                raise
        if updated.differs is not None:
            self._watch.add(updated.differs, late)

        if not stay:
            old, spec = tree.flatten(params)
            new = plan.sharding.layout.merge(trained, frozen)
            params = tree.unflatten(spec, map(like, new, old))
        return params, self._pack(opt_state, local, updated, aux, lr)

    @partial(arguments_by_name, name="step_fn.lower")
    def lower(
        self,
        params: PyTree,
        opt_state: OptState,
        batch: PyTree,
        *,
        like: Program | None = None,
    ) -> Program:
        """The step's Program for these arguments, without running it; changes nothing.

        Printed it is a listing; `.collectives()` has a row per collective, `.peak_bytes()` the most
        bytes that this rank holds at once.

        Args:
            params, opt_state, batch: as a call takes them.
            like: a Program whose size of buckets to take, and how early they go; None: those that a
                call would find.
        """
        plan, leaves, local = self._unpack(params, opt_state)
        micro = micro_batches(batch, self.cfg.accum_steps)
        if like is not None:
            others = Executors(self.model_fn, self.cfg)
            others.settle(Choice.of(like))
            return others.find(plan, leaves, local, micro[0]).program
        return self._executors.find(plan, leaves, local, micro[0]).program

    def with_pass(self, fn: Pass) -> "TrainStep":
        """Another step function, whose Programs go through one more pass, after `cfg.passes`.

        This one stays as it is. States of either are states of the other.

        Args:
            fn: see `fzero.passes`.

        Raises:
            ConfigError: `fn` can't be called, or the executor has no Program.
        """
        passes: Any = self.cfg.passes
        return self._again(self.cfg.replace(passes=(*passes, fn)))

    def _again(self, cfg: Config) -> "TrainStep":
        """Another of the same functions, which looks for saved Programs where this one does."""
        step_fn = TrainStep(self.model_fn, self.opt, cfg)
        if self._executors.saved is not None:
            step_fn.load_programs(self._executors.saved.path)
        return step_fn

    def save_programs(self, path: str | PathLike[str]) -> None:
        """Write down what is staged out, so that a restart stages nothing: see `load_programs`.

        Args:
            path: of a folder; each rank writes a file of its own there, whole or not at all. No
                rank waits for another.

        Raises:
            FzeroError: nothing is staged out yet, or a Program holds what can't be written as data:
                an opaque part, a tensor from outside that no walk of what the function reads comes
                to. Or the file can't be written; what was there is as it was then.

        Examples:
            >>> import fzero, tempfile, torch
            >>> def model_fn(params, batch):
            ...     return ((params["w"] * batch).sum(-1) ** 2).mean()
            >>> folder = tempfile.TemporaryDirectory()
            >>> step_fn = make_train_step(model_fn, fzero.optim.sgd(0.1))
            >>> program = step_fn.lower(*step_fn.init({"w": torch.ones(3)}), torch.ones(2, 3))
            >>> step_fn.save_programs(folder.name)

            In the next process:

            >>> step_fn = make_train_step(model_fn, fzero.optim.sgd(0.1))
            >>> step_fn.load_programs(folder.name)
            >>> again = step_fn.lower(*step_fn.init({"w": torch.ones(3)}), torch.ones(2, 3))
            >>> str(again) == str(program)
            True
        """
        self._executors.save(Path(path).absolute(), self._plan)

    def load_programs(self, path: str | PathLike[str]) -> None:
        """Use what `save_programs` wrote, where it still holds; otherwise stage out as ever.

        A saved Program is used if everything that it was made from is as it was: torch, fzero,
        Python, the processor, the mesh and this rank's place in it, every field of the config, the
        shapes, dtypes and split of every leaf, the kind of batch, and what the functions read from
        outside, their code included. If something is otherwise, a warning names it, and the step
        is recorded. It is looked at when a step of its kind is called first, or lowered. Ranks
        compare their collectives then as always, so some may have a file and others none.

        Nothing is unpickled or run of what a file says, but operators by their names: what it
        computes is up to who wrote it. Load what you or people that you trust have saved.

        Args:
            path: of the folder. If nothing is there, as at the first start, nothing happens.

        Raises:
            FzeroError: it is a file.
        """
        if Path(path).is_file():
            raise FzeroError(
                f"{path} is a file, and step_fn.save_programs writes a folder, with one for each "
                "rank: pass the folder. What program.save wrote is read by fzero.Program.load."
            )
        # absolute at once: it is read at the first step, which may run in another folder
        self._executors.saved = SavedPrograms(Path(path).absolute())

    def _use(self, plan: Plan) -> Plan:
        """Go on with `plan`; Programs for other parameters are of no use then."""
        old = self._plan
        if old is plan:
            return plan
        if old is None or (old.sharding, old.mesh) != (plan.sharding, plan.mesh):
            self._executors.clear()
        self._plan = plan
        return plan

    def _unpack(self, params: PyTree, opt_state: OptState) -> tuple[Plan, list[Tensor], LocalState]:
        """The plan for this tree, its local leaves, and the local leaves of the state."""
        refuse_outer_autocast()
        refuse_transforms("step_fn")
        plan = self._plan
        leaves, spec = tree.flatten(params, plan.known_params if plan else None)
        if not isinstance(opt_state, OptState):
            raise ShardError(
                f"opt_state is a {type(opt_state).__name__}; pass the second value that "
                "step_fn.init or the last call of step_fn returned."
            )
        if plan is None:  # a state from elsewhere: a checkpoint, another step function
            check_tensors("params", leaves, tree.paths(params))
            device_type = leaves[0].device.type if leaves else "cpu"
            mesh = resolve_mesh(self.cfg.mesh, device_type)
            agree_on_start(self.cfg, params, opt_state.model_state, mesh, values=False)
            sharding = plan_sharding(
                params, self.cfg, mesh, sharded=self.cfg.stage == 3, opt=self.opt
            )
            plan = Plan(self.cfg, self.opt, mesh, sharding)
            plan.check_placements(params, opt_state.inner)
        plan.check(leaves, spec)
        # as the caller has it: a function may go by the order of `params.values()`
        if (orders := tree.orders(params)) != plan.sharding.orders:
            spec = tree.flatten(params)[1]
            plan = replace(plan, sharding=replace(plan.sharding, spec=spec, orders=orders))
        _check_scale(opt_state, self.cfg)
        plan.check_master(opt_state.master)
        carried = opt_state if self._takes_state else opt_state._replace(model_state=None)
        local = LocalState.of(carried, dtensors=self.opt.foreign, known=plan.known_inner)
        plan.check_state(local.inner_spec, local.inner, local.masters)
        if self._plan is None:
            agree_on_optimizer(self.opt, opt_state.inner, plan.mesh, self.cfg.timeout)
        return self._use(plan), locals_of(leaves), local

    def _refuse_unwritable(self, plan: Plan, leaves: Sequence[Tensor], local: LocalState) -> None:
        """Raise if a leaf that the update writes over can't be, or shares memory with another."""
        inner = local.inner
        if not {*map(type, inner)} <= {Tensor}:  # of an optimizer of others, or refused later
            tensors = [x for x in inner if isinstance(x, Tensor)]
            inner = [x if x.is_inference() else local_tensor(x) for x in tensors]
        groups = leaves, local.masters, inner, local.state

        def written() -> list[bool]:
            trained = [leaf.trainable for leaf in plan.sharding.layout]
            return trained + [True] * (len(local.masters) + len(inner)) + [False] * len(local.state)

        flat = list(chain.from_iterable(groups))
        fault = self._apart.fault(flat, lambda i: _labels(plan, local)[i], written)
        if fault is not None:
            raise ShardError(
                f"{fault}, and an update writes over the leaves of params, opt_state.master and "
                "opt_state.inner one by one (Config.donate). Give each normal memory of its own, "
                "outside of torch.inference_mode(): fzero.tree_map(torch.clone, tree). Nothing "
                "has changed."
            )

    def _pack(
        self,
        opt_state: OptState,
        local: LocalState,
        updated: Updated,
        aux: PyTree,
        lr: Tensor | None,
    ) -> OptState:
        """The state to return; with donation its leaves are the very tensors that came in."""
        master, inner = opt_state.master, opt_state.inner
        if not self.cfg.donate:
            old, spec = tree.flatten(master)
            master = tree.unflatten(spec, map(like, local.masters, old))
            old, spec = tree.flatten(inner)
            inner = tree.unflatten(spec, map(like, local.inner, old))
        if updated.inner is not None:
            inner = tree.unflatten(local.inner_spec, map(like, updated.inner, tree.leaves(inner)))
        scale = opt_state.loss_scale.scale if opt_state.loss_scale is not None else None
        metrics = metrics_of(updated, updated.loss, scale, self.cfg, lr)
        if self.cfg.has_aux:
            metrics["aux"] = aux
        state = opt_state.model_state
        if local.state_spec is not None:
            state = tree.unflatten(local.state_spec, updated.model_state)
        # not read: no host waits to learn whether the step was skipped
        advance = 1 if self.cfg.scaling is None else ~updated.nonfinite
        new = OptState(opt_state.step + advance, inner, master, updated.loss_scale, state, metrics)
        if self.cfg.donate:
            spend(opt_state)
        return new


def _labels(plan: Plan, local: LocalState) -> list[str]:
    """What messages call the leaves that `TrainStep._refuse_unwritable` looks at."""
    trained = plan.names[0]
    labels = [f"params{path}" for path in plan.sharding.paths]
    labels += [f"opt_state.master, {name}," for name in trained[: len(local.masters)]]
    rows = zip(names_of_state(local), local.inner, strict=True)
    labels += [f"opt_state.inner, {name}," for name, x in rows if isinstance(x, Tensor)]
    return labels + [f"leaf {n} of opt_state.model_state" for n in range(len(local.state))]


def _check_scale(opt_state: OptState, cfg: Config) -> None:
    found, wanted = opt_state.loss_scale is not None, cfg.scaling is not None
    if found != wanted:
        raise ShardError(
            f"opt_state.loss_scale is {'there' if found else 'None'}, and this step function's "
            f"Config.loss_scale={cfg.loss_scale!r} with precision={cfg.precision!r} keeps "
            f"{'one' if wanted else 'none'}. Start a state with step_fn.init, or say "
            "opt_state._replace(loss_scale=...) with that of a fresh one."
        )


def _check_available(cfg: Config, opt: Optimizer) -> None:
    if cfg.memory_limit is not None and opt.foreign:
        raise ConfigError(
            f"Config.memory_limit={cfg.memory_limit!r}: the optimizer knows nothing of shards and "
            "is not recorded, so what its update holds can't be told before it runs. Use one of "
            "fzero.optim, or memory_limit=None."
        )


def _takes_state(model_fn: ModelFn) -> bool:
    """Whether a model function takes more than `(params, batch)`; if nobody can tell, it does."""
    try:
        given = inspect.signature(model_fn).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [x for x in given if x.kind in kinds and x.default is inspect.Parameter.empty]
    return len(required) != 2 or any(x.kind is inspect.Parameter.VAR_POSITIONAL for x in given)
