"""`Engine`: ZeRO for people who call `loss.backward()`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from fzero.config import Config, as_config
from fzero.engine import blocks, events, in_hand, module_state, outputs, phases
from fzero.engine.attach import (
    WITHOUT,
    frozen_too,
    parameters_of,
    take_the_first_ranks,
)
from fzero.engine.building import build
from fzero.engine.driver import Driver
from fzero.engine.face import EngineOptimizer
from fzero.engine.forward import no_loss
from fzero.engine.join import join
from fzero.engine.module_state import LoadedKeys
from fzero.engine.names import Names
from fzero.engine.parts import build_parts
from fzero.engine.release import Former, Released, release
from fzero.errors import (
    BackwardError,
    ConfigError,
    FzeroError,
    ShardError,
    arguments_by_name,
    check_flag,
)
from fzero.functional.surroundings import refuse_fakes, refuse_transforms
from fzero.functional.uncompiled import never_compiled
from fzero.inference import makes_normal
from fzero.numerics.casts import in_force, refuse_outer_autocast
from fzero.optim import as_optimizer
from fzero.state.builder import Recording
from fzero.state.opt_state import OptState
from fzero.tree import PyTree

Batch = TypeVar("Batch")


class Engine:
    """A module whose training state is sharded, trained with plain `loss.backward()`.

    The module is taken over: its parameters become this engine's, in place. At stage 3 they are
    there only while something reads them. Whatever Python the module runs is fine; nothing is
    traced.

    A micro-batch is a forward that a backward has reached since the last update. `step()` updates
    once `cfg.accum_steps` of them are there, and does nothing before; with `accum_steps=1` any
    number of backwards may come before it. Every gradient is divided by `accum_steps` once, however
    backward was called. An exception in forward or backward leaves gradients and counters as they
    were before that call.

    Args:
        model: any module, on the device it trains on, the same on every rank. What has
            `requires_grad=False` is frozen for good, as what `cfg.frozen` names; the rest can be
            frozen and unfrozen between steps. Or a function without
            arguments that builds it, from the same seed on every rank: then no rank ever holds the
            whole model at stage 3. Its values are those of a call, bit for bit.
        opt: one of `fzero.optim`, or any object with optax's `init` and `update`. Without it
            gradients can be computed, and `step()` says what is missing.
        cfg: see `Config`; what only a staged-out step needs (`executor`, `donate`, `has_aux`,
            `opaque`, `seed`) has no effect.
        gradient_reduction: "mean" of the ranks' gradients, or their "sum".
        broadcast: whether ranks whose values differ take the first one's, parameters and buffers;
            otherwise they are refused.
        gradient_predivide: factor by which gradients are divided before they are added up, so that
            16-bit sums don't overflow; the rest of the division comes after. None: for 16-bit
            reductions the largest doubling that keeps both divisions near the root of the world
            (FairScale's rule), else 1.
        cast_inputs: whether floating inputs of a call are cast to the compute dtype of `cfg`.

    Raises:
        ConfigError: a combination that there isn't.
        ShardError: the module has no values yet (`meta`, lazy modules), has an engine already, or
            was built under `torch.inference_mode()`.
        RankMismatchError: ranks differ in config, names, shapes, dtypes or values.

    Examples:
        >>> import fzero, torch
        >>> torch.manual_seed(0) and None
        >>> engine = Engine(nn.Linear(3, 1), fzero.optim.sgd(0.1))
        >>> loss = engine(torch.ones(2, 3)).square().mean()
        >>> loss.backward()
        >>> engine.full_grad("bias").shape
        torch.Size([1])
        >>> engine.step()
        >>> int(engine.state[1].step)
        1
    """

    @makes_normal
    @arguments_by_name
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        opt: Any = None,
        cfg: Config | None = None,
        *,
        gradient_reduction: Literal["mean", "sum"] = "mean",
        gradient_predivide: float | None = None,
        broadcast: bool = False,
        cast_inputs: bool = True,
    ) -> None:
        cfg = as_config("Engine", cfg)
        refuse_transforms("Engine")
        refuse_fakes("Engine")
        if cfg.memory_limit is not None:
            raise ConfigError(
                f"Config.memory_limit={cfg.memory_limit!r}: an Engine runs operator by operator, "
                "and has no Program that could be planned. Use make_train_step, or fzero.remat in "
                "the module and memory_limit=None."
            )
        if cfg.remat:
            raise ConfigError(
                f"Config.remat={cfg.remat!r}: an Engine records nothing that could be computed "
                "again by name. Use make_train_step, or fzero.remat in the module and remat=()."
            )
        if cfg.cuda_graph:
            raise ConfigError(
                "Config.cuda_graph=True: an Engine runs operator by operator, with hooks of Python "
                "in between, and a graph holds kernels alone. Use make_train_step, or "
                "cuda_graph=False."
            )
        if cfg.passes:
            raise ConfigError(
                f"Config.passes={cfg.passes!r}: an Engine runs operator by operator, and has no "
                "Program that a pass could change. Use make_train_step, or passes=()."
            )
        if isinstance(model, Engine):
            raise ConfigError(
                "Engine(model): model is an Engine already, and is called as its module is. Train "
                "that one; for another of the same module call engine.release() before, which "
                "gives it back."
            )
        built: Recording | None = None
        if callable(model) and not isinstance(model, nn.Module):
            if broadcast:
                raise ConfigError(
                    "Engine(build, broadcast=True): a function is recorded on every rank, and no "
                    "rank has values to send. Seed all ranks alike before, or in the function."
                )
            model, built = build(model)
        slots, params = parameters_of(model)
        self.module = model
        self._slots = slots
        self._face: EngineOptimizer | None = None
        self._former = {name: Former(p, p.requires_grad, p.dtype) for name, p in params.items()}
        self.cfg = frozen_too(cfg, params)
        if broadcast:
            take_the_first_ranks(model, self.cfg)
        self._casts_inputs = cast_inputs
        self._has_opt, self._averages = opt is not None, gradient_reduction == "mean"
        self._parts = build_parts(
            model,
            params,
            WITHOUT if opt is None else as_optimizer(opt),
            self.cfg,
            gradient_reduction,
            gradient_predivide,
            built,
        )
        self._names = Names(self._parts.reducer.leaves, slots.other_names())
        self._driver = Driver(model, slots, params, self._parts, self.cfg)

    def __repr__(self) -> str:
        if isinstance(self._driver, Released):
            return f"Engine({type(self.module).__name__}, released)"
        leaves = self._parts.reducer.leaves
        count, plan = sum(leaf.numel for leaf in leaves), self._parts.stepper.plan
        return (
            f"Engine({type(self.module).__name__}, stage {self.cfg.stage}, "
            f"world {plan.mesh.world_size}, {count:,} parameters, step {self.global_steps})"
        )

    # --- forward and backward ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for these arguments, floating ones cast: see `cast_inputs`.

        Raises:
            ConfigError: `Precision(autocast=...)`, under the caller's own `torch.autocast`.
            FzeroError: the module's parameters are no longer those that the engine was made with;
                or its forward changed a trained one in place, and there are several ranks.
        """
        driver, dtypes = self._driver, self.cfg.dtypes
        driver.recover("engine(...) was called")
        driver.writes.same_module()
        if dtypes.autocast is not None:  # else the caller's own reaches the module
            refuse_outer_autocast()
        with driver.forward() as forward:
            if self._casts_inputs:
                args, kwargs = outputs.cast((args, kwargs), dtypes.param)
            with in_force(dtypes, self._parts.reducer.device.type):
                versions = driver.writes.versions()
                out = outputs.cast(self.module(*args, **kwargs), dtypes.output)
                driver.writes.unwritten_since(versions)
            driver.returned(forward, out)
        return out

    @arguments_by_name
    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """`loss.backward()` with the loss scale applied, if there is one.

        Args:
            loss: a scalar that depends on the engine's parameters.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: divide by `cfg.accum_steps`, as every backward does. False leaves that
                out, for a loss that was divided already.

        Returns:
            The loss, divided by `accum_steps` if `scale_wrt_gas`; without a graph.

        Raises:
            BackwardError: `loss` is no scalar tensor with a graph, or depends on nothing of this
                engine's.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise BackwardError(no_loss(loss))
        if not self._driver.backward(
            self.scale(loss), retain_graph=retain_graph, divided=scale_wrt_gas
        ):
            raise BackwardError(
                "engine.backward(loss) ran, and came to no parameter and no output of this engine: "
                "the loss depends on none. Compute it from what engine(...) returned, without "
                ".detach() and outside of torch.no_grad(). The engine's gradients are as before."
            )
        shown = loss.detach().clone()
        # another copy: the caller may write to the one that is returned
        self._driver.losses.give(shown.clone().reshape(()))
        return shown / self.cfg.accum_steps if scale_wrt_gas else shown

    def scale(self, loss: Tensor) -> Tensor:
        """`loss`, or any tensor that backward will start from, times the loss scale.

        Several engines under one loss: `a.scale(b.scale(loss)).backward()`. Without a loss scale
        it is the tensor itself.

        Args:
            loss: of any shape, with a graph.

        Raises:
            BackwardError: it has no graph.
        """
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise BackwardError(no_loss(loss).replace("backward(loss)", "scale(loss)"))
        return self._driver.scale(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block keep their gradients on this rank, in full.

        What comes after the block reduces them: the next backward, or `step()`. At every stage.
        """
        self._driver.recover("engine.no_sync() was called")
        self._driver.on(events.SyncPaused())
        try:
            yield
        finally:
            self._driver.on(events.SyncResumed())

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's batches, and after them its last one again until every rank's are through.

        For loaders of different lengths: all ranks run the same number of rounds. What a rank
        brings once its data is over counts for nothing, neither in gradients nor in
        `metrics["loss"]`: these are means over the ranks that have data (as of
        `torch.distributed.algorithms.join` with `divide_by_initial_world_size=False`). The body of
        the loop runs all the same, with `has_data` False. Each round costs one exchange of eight
        bytes, which the host waits for.

        Args:
            loader: of any length, but one batch at the least if any rank has one.

        Yields:
            Batches, the same number on every rank.

        Raises:
            RankMismatchError: a rank has no batch at all, or does not come.
            BackwardError: inside a forward or a backward.

        Examples:
            >>> import fzero
            >>> engine = Engine(nn.Linear(3, 1), fzero.optim.sgd(0.1))
            >>> for x in engine.join([torch.ones(2, 3)] * 4):
            ...     engine(x).sum().backward()
            ...     engine.step()
            >>> engine.global_steps
            4
        """
        return join(self._driver, self._parts, loader, averages=self._averages)

    @property
    def has_data(self) -> bool:
        """False in a round of `join` that runs this rank's last batch again."""
        return self._driver.weight != 0

    # --- evaluation ---

    def train(self, mode: bool = True) -> "Engine":
        """`module.train(mode)`: what dropout and batch norm go by. Returns the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """`module.eval()`; see `train`. Gradients are left out by `torch.no_grad()` alone."""
        return self.train(False)

    def local_forward(self) -> contextlib.AbstractContextManager[None]:
        """Inside, each rank may run as many forwards as it likes, of what it likes, or none.

        All parameters are gathered at the start, which every rank must come to, and freed at the
        end; in between no collective runs. So a rank holds the whole model, in its compute dtype,
        at stage 3. Without this block forwards gather unit by unit, and all ranks run the same.

        A backward that reaches a parameter is refused inside, as is `step()`. What is written to
        the tensors of `engine.state` inside is seen after the block.

        Raises:
            BackwardError: inside a forward or a backward.
            RankMismatchError: at stage 3, a rank does not come.

        Examples:
            >>> import fzero
            >>> engine = Engine(nn.Linear(3, 1), fzero.optim.sgd(0.1)).eval()
            >>> rank = 0
            >>> with engine.local_forward(), torch.no_grad():
            ...     out = [engine(torch.ones(2, 3)) for _ in range(3 + rank)]
        """
        return blocks.local_forward(self._driver)

    def gathered(
        self, names: str | Iterable[str], modifier_rank: int | None = None
    ) -> contextlib.AbstractContextManager[dict[str, Tensor]]:
        """Some of the module's parameters are there in full until the block ends.

        Args:
            names: as in `model.named_parameters()`; the same on every rank.
            modifier_rank: the global rank whose writes count: they are what every rank has after
                the block, in the next forward, update and checkpoint. After an exception all is as
                before. None: to read; at stage 3 writing is refused.

        Returns:
            A context, whose value is the module's own parameters by name.

        Raises:
            ShardError: there is no parameter, or no rank, of that name.
            BackwardError: with `modifier_rank`, inside a forward, a backward or `local_forward`.
            RankMismatchError: ranks name different parameters, or one does not come.

        Examples:
            >>> import fzero
            >>> engine = Engine(nn.Linear(2, 1), fzero.optim.sgd(0.1))
            >>> with engine.gathered("bias", modifier_rank=0) as params:
            ...     nn.init.ones_(params["bias"]) is engine.module.bias
            True
            >>> engine.full_params()["bias"]
            tensor([1.])
        """
        names = [names] if isinstance(names, str) else names
        indices = list(dict.fromkeys(self._names.index("gathered", name) for name in names))
        if modifier_rank is None:
            return blocks.gathered(self._driver, indices)
        return blocks.gathered_for(self._driver, indices, modifier_rank)

    # --- the step ---

    @never_compiled
    def step(self, boundary: bool | None = None) -> None:
        """Update the parameters, if enough micro-batches are there; see `Engine`.

        Args:
            boundary: whether to update now, however many micro-batches there are; the same on every
                rank. Gradients are still divided by `cfg.accum_steps`. None: go by their number.

        Raises:
            ConfigError: `boundary` is another object, as a closure or a loss.
            BackwardError: without an optimizer, inside `no_sync()`, or with no backward since the
                last call.
            FzeroError: with `on_nonfinite="raise"`, a gradient is not finite; nothing has changed.
        """
        check_flag("engine.step", "boundary", boundary, optional=True, hint=_NO_BOUNDARY)
        driver = self._driver
        with driver.alone("step()"):
            if not self._has_opt:
                raise BackwardError(
                    "engine.step() needs an optimizer, and this engine was made without one. Pass "
                    "it: fzero.Engine(model, fzero.optim.adamw(3e-4), cfg)."
                )
            driver.reducer.refuse_half_done("engine.step() was called")
            if boundary is None:
                driver.tell_of_several()
            driver.on(events.StepCalled(boundary))
        if self._face is not None:
            self._face.stepped()

    @arguments_by_name
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last update; accumulation starts again.

        Args:
            set_to_none: accepted for the sake of habit; gradients are always dropped.
        """
        driver = self._driver
        with driver.alone("zero_grad()"):
            driver.zero()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch of now is the last before an update.

        That is `(micro_step + 1) % accum_steps == 0`, where the micro-step counts from 0 and goes
        on with the first forward or `step()` after a backward.
        """
        return phases.is_boundary(self._driver.rules, self._driver.state)

    if not TYPE_CHECKING:  # for a type checker there is nothing else

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"an Engine has no attribute {name!r}{_elsewhere(vars(self).get('module'), name)}."
            )

    def __deepcopy__(self, memo: Any) -> Any:
        raise FzeroError(_NO_COPY.format("copied"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FzeroError(_NO_COPY.format("copied or pickled"))

    # --- looking at it ---

    @property
    def state(self) -> tuple[PyTree, OptState]:
        """`(params, opt_state)` as `step_fn` takes and gives them.

        The tensors are the engine's own: what changes them in place changes the engine, and each
        step does. To come back to a state keep a copy of it, `copy.deepcopy(engine.state)`. A step
        function with `donate=True` changes them as well; assign what it returns. Assigned values
        are copied. Gradients that wait for `step()` stay, as under `load_state_dict`: whoever goes
        back to a state in the middle of an accumulation drops them, `zero_grad()`.

        Raises:
            ShardError: what is assigned doesn't fit, or is what a step has written over.
        """
        self._driver.settle("engine.state was read")
        return self._parts.stepper.read()

    @state.setter
    def state(self, new: tuple[PyTree, OptState]) -> None:
        try:
            params, opt_state = new
        except (TypeError, ValueError):
            raise ShardError(
                f"engine.state must be (params, opt_state), and was given a {type(new).__name__}. "
                "Assign what step_fn, or another engine's state, returned."
            ) from None
        driver = self._driver
        with driver.alone("state = ...", "engine.state was assigned"):
            driver.writes.take()
            phases.refuse_in_block(driver.state, "state = ...")
            if not driver.is_at_rest:
                raise BackwardError(
                    "engine.state was assigned inside a forward or backward. Assign it between "
                    "passes."
                )
            driver.stepper.write(params, opt_state)
            driver.writes.ours()
            if driver.units is not None:
                driver.units.reshard()  # what they gathered is of the values before

    def parameters(self) -> Iterator[nn.Parameter]:
        """`module.parameters()`. For `torch.optim` they are of no use: give the engine `opt`."""
        return self.module.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the module's parameters and buffers, full, under all of its own names.

        `load_state_dict` takes it, of this engine and of a plain module. Where there are master
        weights, they are what is given. Every rank must call it at stage 3, and from stage 1 on
        where there are masters. The optimizer's state is in `engine.optimizer.state_dict()`, or
        `engine.state`.

        Examples:
            >>> import fzero
            >>> engine = Engine(nn.Linear(3, 1), fzero.optim.sgd(0.1))
            >>> nn.Linear(3, 1).load_state_dict(engine.state_dict())
            <All keys matched successfully>
        """
        driver = self._driver
        with driver.alone("state_dict()"):  # it puts others into the module's slots
            return module_state.state_dict(driver, self._parts, self._slots)

    @arguments_by_name
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadedKeys:
        """Copy values into parameters, masters and buffers. The optimizer's state stays.

        Args:
            state_dict: full tensors, the same on every rank, of any dtype of the right kind. Of a
                tied parameter's names one is enough.
            strict: whether names that are missing or unknown are an error.

        Returns:
            The names that were missing, and those that are unknown.

        Raises:
            ShardError: names or shapes don't fit; nothing has changed.
            RankMismatchError: ranks load different values.
            BackwardError: inside a forward, a backward, `gathered` or `local_forward`.

        Examples:
            >>> import fzero
            >>> engine = Engine(nn.Linear(3, 1), fzero.optim.sgd(0.1))
            >>> engine.load_state_dict(nn.Linear(3, 1).state_dict())
            LoadedKeys(missing_keys=[], unexpected_keys=[])
        """
        driver = self._driver
        with driver.alone("load_state_dict()"):
            return module_state.load(driver, self._parts, self._slots, state_dict, strict=strict)

    @makes_normal
    def release(self) -> nn.Module:
        """Give the module back as plain PyTorch; the engine is over.

        The module's parameters are those objects that it had before, in the dtypes that they had,
        with the values of `state_dict()`. Each rank then holds all of it. Every
        rank must call it at stage 3, and from stage 1 on where there are masters. Gradients that no
        update has used are dropped; the optimizer's state is lost with the engine (take
        `engine.state` before).

        Returns:
            The module.

        Raises:
            BackwardError: inside a forward, a backward, `gathered` or `local_forward`; of all else
                that is asked of this engine afterwards.

        Examples:
            >>> import fzero
            >>> module = nn.Linear(2, 1)
            >>> weight = module.weight
            >>> engine = Engine(module, fzero.optim.sgd(0.1))
            >>> engine.release() is module, module.weight is weight, type(weight).__name__
            (True, True, 'Parameter')
        """
        driver = self._driver
        with driver.alone("release()"):
            release(driver, self._parts, self._slots, self._former)
        over: Any = Released()
        self._driver = self._parts = self._names = over
        return self.module

    @property
    def metrics(self) -> dict[str, Any]:
        """Of the last step: 0-d tensors; see `OptState.metrics`. Empty before the first one."""
        return dict(self._parts.stepper.opt_state.metrics)

    @property
    def global_steps(self) -> int:
        """How many updates there were; with a loss scale those that did not overflow."""
        return int(self._parts.stepper.opt_state.step)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self._parts.reducer.device

    @property
    def lr(self) -> Any:
        """The learning rate of the next update; on every rank the same is to be set.

        Setting wants an optimizer whose rate is in its state:
        `fzero.optim.inject_hyperparams(fzero.optim.adamw)(lr=3e-4)`. Of several such in a
        `multi_transform` set those that change by label: `engine.lr = {"matrix": 1e-3}`. Where
        they differ a dict of all by label is read, and one number for all is refused.

        Raises:
            FzeroError: the optimizer tells none, as those from elsewhere do, or several without
                labels; it is set, and not in the optimizer's state, or given by a schedule.
        """
        return self._parts.stepper.rate()

    @lr.setter
    def lr(self, lr: float | Mapping[str, float]) -> None:
        self._parts.stepper.set_rate(lr)

    @property
    def momentum(self) -> float | None:
        """The momentum of the next update, SGD's or the first beta of Adam and Lion.

        None unless the optimizer keeps it in its state, and one alone:
        `fzero.optim.inject_hyperparams(fzero.optim.sgd, momentum=True)(lr=0.1, momentum=0.9)`.

        Raises:
            FzeroError: it is set, and not in the optimizer's state.
        """
        return self._parts.stepper.momentum()

    @momentum.setter
    def momentum(self, momentum: float) -> None:
        self._parts.stepper.set_momentum(momentum)

    @property
    def optimizer(self) -> EngineOptimizer:
        """The engine as a `torch.optim.Optimizer`: for `torch.optim.lr_scheduler` and loggers.

        One param group with all parameters, whose `lr` reads and sets `engine.lr`, its `momentum`
        `engine.momentum` if there is one; `step` and `zero_grad` are the engine's. Setting wants an
        optimizer made by `fzero.optim.inject_hyperparams`. A `torch.amp.GradScaler` takes it, too:
        where gradients of any rank are not finite it passes over the step on every rank, and the
        next forward drops them. The same object each time.

        Raises:
            FzeroError: the optimizer tells no learning rate.

        Examples:
            >>> import fzero
            >>> adamw = fzero.optim.inject_hyperparams(fzero.optim.adamw)
            >>> engine = Engine(nn.Linear(3, 1), adamw(lr=0.1))
            >>> schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
            >>> engine(torch.ones(2, 3)).sum().backward()
            >>> engine.optimizer.step()
            >>> schedule.step()
            >>> engine.lr
            0.05
        """
        if self._face is None:
            self._face = EngineOptimizer(self, self._driver)
        return self._face

    def full_params(self) -> dict[str, Tensor]:
        """Copies of the full parameters by name, with all digits of their masters if there are any.

        At stage 3 every rank must call it, and from stage 1 on where there are masters.
        """
        self._driver.settle("engine.full_params() was called")
        return self._parts.full_params()

    def full_param(self, name: str) -> Tensor:
        """A copy of one full parameter, with all digits of its master if there is one.

        At stage 3 every rank must call it, and from stage 1 on where there are masters.

        Raises:
            ShardError: there is no parameter of that name.

        Examples:
            >>> import fzero
            >>> engine = Engine(nn.Linear(3, 1), fzero.optim.sgd(0.1))
            >>> engine.full_param("weight").shape
            torch.Size([1, 3])
        """
        self._driver.settle("engine.full_param() was called")
        return self._parts.full_value(self._names.index("full_param", name))

    def full_grad(self, name: str) -> Tensor | None:
        """The gradient of one parameter so far: the mean over ranks, unscaled.

        Reading it changes nothing. At world > 1 every rank must call it.

        Args:
            name: as in `model.named_parameters()`.

        Returns:
            A full tensor; None if no rank has a gradient for it.

        Raises:
            ShardError: there is no parameter of that name.
        """
        self._driver.recover("engine.full_grad() was called")
        return self._parts.full_grad(self._names.index("full_grad", name))

    def local_grad(self, name: str) -> Tensor | None:
        """This rank's part of `full_grad(name)`: rows of it from stage 1 on, else all of it.

        At world > 1 every rank must call it.

        Raises:
            ShardError: there is no parameter of that name.
        """
        self._driver.recover("engine.local_grad() was called")
        return self._parts.local_grad(self._names.index("local_grad", name))

    def set_full_grad(self, name: str, value: Tensor) -> None:
        """Let `value` be what `full_grad(name)` gives, and what the next `step()` takes.

        Clipping and what else the step does to gradients comes after. Backwards that come before
        the step add to it. Every rank must call it, with the same value.

        Args:
            name: of a trained parameter.
            value: a full tensor; unscaled.

        Raises:
            ShardError: there is no such parameter, it is frozen, or has another shape.
            RankMismatchError: ranks give different values.
            BackwardError: inside a forward or a backward, or before any backward.

        Examples:
            >>> import fzero
            >>> engine = Engine(nn.Linear(3, 1), fzero.optim.sgd(0.5))
            >>> engine(torch.ones(2, 3)).mean().backward()
            >>> before = engine.full_param("bias")
            >>> engine.set_full_grad("bias", torch.tensor([4.0]))
            >>> engine.step()
            >>> engine.full_param("bias") - before
            tensor([-2.])
        """
        driver, index = self._driver, self._names.index("set_full_grad", name)
        with driver.alone("set_full_grad()"):
            in_hand.set_full_grad(driver, self._parts, index, value)

    def set_local_grad(self, name: str, value: Tensor) -> None:
        """The same for this rank's part alone, `local_grad(name)`; every rank must call it.

        Raises:
            ShardError: as `set_full_grad`.
            BackwardError: as `set_full_grad`.
        """
        driver, index = self._driver, self._names.index("set_local_grad", name)
        with driver.alone("set_local_grad()"):
            in_hand.set_local_grad(driver, self._parts, index, value)


_NO_BOUNDARY = (
    "A closure goes to engine.optimizer.step(closure), which calls it first; a loss to "
    "loss.backward(), before engine.step(). A condition is bool(...) of what it was. Nothing was "
    "updated."
)
_NO_COPY = (
    "the engine was to be {}, and a copy would share its parameters, process groups and hooks. "
    "Make a second engine of a second module and assign engine.state, save it by "
    "fzero.checkpoint.save(path, *engine.state), or take copies of the values: "
    "engine.state_dict(), which a plain module loads."
)

# What people look for on an engine, by what they should write instead.
_BEFORE = "; move and cast the module before its engine is made: Engine(module.{}(...), opt, cfg)"
_ELSEWHERE = {
    **dict.fromkeys(("to", "cuda", "cpu", "half", "bfloat16", "float", "double"), _BEFORE),
    "param_groups": "; engine.optimizer is what schedulers and a GradScaler take",
    "save_checkpoint": "; fzero.checkpoint.save(path, *engine.state) writes a checkpoint",
    "load_checkpoint": "; engine.state = fzero.checkpoint.load(path, *engine.state) reads one",
    "save": "; fzero.checkpoint.save(path, *engine.state) writes a checkpoint",
    "load": "; engine.state = fzero.checkpoint.load(path, *engine.state) reads one",
    "clip_grad_norm_": "; Config(clip_norm=...) has each step clip",
}


def _elsewhere(module: Any, name: str) -> str:
    """Where an attribute is that an engine has not."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name].format(name)
    if name[:1] != "_" and hasattr(module, name):
        return f"; its module has one, engine.module.{name}"
    return ""
