"""`DeepSpeedEngine`: DeepSpeed's methods over `fzero.Engine`."""

import contextlib
import glob
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero import checkpoint
from fzero.compat.deepspeed import comm, saving
from fzero.compat.deepspeed.answers import Answers
from fzero.compat.deepspeed.casting import cast
from fzero.compat.deepspeed.leaf_modules import leaf_names, mark_configured
from fzero.compat.deepspeed.loaders import loader_of
from fzero.compat.deepspeed.lr_schedules import scheduler_of, write_rates
from fzero.compat.deepspeed.optimizers import (
    ClientGroups,
    DeepSpeedOptimizer,
    as_groups,
    client_of,
)
from fzero.compat.deepspeed.owners import Owner, forget, note
from fzero.compat.deepspeed.refused import ENGINE, refuse
from fzero.compat.deepspeed.settings import Settings
from fzero.engine import Engine
from fzero.errors import BackwardError, ConfigError, users_line


class Given(NamedTuple):
    """What `initialize` was given beside the model and the configuration."""

    optimizer: Any = None
    model_parameters: Any = None
    training_data: Any = None
    lr_scheduler: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None


class DeepSpeedEngine(Answers):
    """A model that `initialize` has taken.

    Args:
        model: any module; it is moved to the device, its parameters are cast, and it takes the
            first rank's values, as DeepSpeed does it.
        settings: the configuration.
        given: to `initialize`.

    Attributes:
        inner: the `fzero.Engine`.
        module: the model.
        optimizer: the client's groups with the engine's step, or None.
        lr_scheduler: what is stepped after each update, or None.
        training_dataloader: of this rank's micro-batches, or None.
        micro_steps: calls of `step()`.
        global_steps: updates, skipped ones included.
        skipped_steps: updates that overflowed.
        global_samples: rows that they were made of.
    """

    def __init__(self, model: nn.Module, settings: Settings, given: Given) -> None:
        super().__init__()
        self.settings, self.config = settings, settings.raw
        self.device = torch.device(comm.device_type())
        if self.device.type == "cuda":
            self.device = torch.device("cuda", comm.get_local_rank())
        self.global_rank, self.world_size = comm.get_rank(), comm.get_world_size()
        self.local_rank, self.dp_world_size = comm.get_local_rank(), self.world_size
        self.collate_fn = given.collate_fn
        self.micro_steps = self.global_steps = self.skipped_steps = self.global_samples = 0
        self.loaded_checkpoint_tag: str | None = None
        self.sparse_tensor_module_names: set[str] = set()  # gradients are dense
        self._boundary: bool | None = None
        self._applied, self._backwards = False, 0
        self._norm: Tensor | None = None
        kept = settings.keep_in_fp32
        cast(model.to(self.device), settings.config.dtypes.param, settings.buffer_dtype, kept)
        params = dict(model.named_parameters())
        groups, opt = self._groups(model, given, params)
        self.inner = Engine(
            model,
            opt,
            self._config(model, groups),
            gradient_reduction=settings.reduction,
            gradient_predivide=settings.predivide,
            broadcast=True,
            cast_inputs=settings.auto_cast,
        )
        self.module = model
        me: weakref.ref[Any] = weakref.ref(self)
        for name, param in [*params.items(), *model.named_parameters()]:
            note(param, Owner(me, name))
        self.groups = groups
        self.optimizer: Any = None
        if groups is not None:
            self.optimizer = DeepSpeedOptimizer(groups, weakref.proxy(self))
        elif opt is not None:
            self.optimizer = self.inner.optimizer
        if groups is None:
            self.lr_scheduler = self._scheduler(given, self.optimizer)
        self.training_dataloader: Any = None
        if given.training_data is not None:
            self.training_dataloader = self.deepspeed_io(given.training_data)

    # --- what it is made of ---

    def _groups(
        self, model: nn.Module, given: Given, params: dict[str, nn.Parameter]
    ) -> tuple[ClientGroups | None, Any]:
        """The param groups, and the optimizer for the Engine; None and None without any."""
        opt: Any = given.optimizer
        section = self.settings.optimizer
        if opt is not None and hasattr(opt, "init") and hasattr(opt, "update"):
            return None, opt  # of fzero.optim, or another of its protocol
        trained = as_groups(model, given.model_parameters)
        if opt is not None and not isinstance(opt, torch.optim.Optimizer):
            if not callable(opt):
                raise ConfigError(
                    f"initialize(optimizer={type(opt).__name__}): must be an optimizer of "
                    "torch.optim, one of fzero.optim, or a function from parameters to one."
                )
            opt = opt(trained)
        if opt is None and section is not None:
            opt = client_of(section, trained)
        if opt is None:
            return None, None
        # before the groups are read: it may write into them
        self.lr_scheduler = self._scheduler(given, opt)
        cycles = getattr(self.lr_scheduler, "cycle_momentum", False)
        names = {id(param): name for name, param in params.items()}
        groups = ClientGroups(opt, names, cycles=cycles)
        return groups, groups.transform

    def _config(self, model: nn.Module, groups: ClientGroups | None) -> Any:
        """The Engine's: with what is in no group frozen, and leaf modules gathered as one."""
        mark_configured(model, self.settings.leaf_modules)
        together = leaf_names(model)
        own = model.named_parameters() if groups is not None else ()
        apart = {name: p for name, p in own if groups is not None and name not in groups.owners}
        # the Engine freezes these, too; the client has not
        self._ungrouped = {name for name, param in apart.items() if param.requires_grad}
        return self.settings.config.replace(
            gather_together=together, frozen=tuple(glob.escape(name) for name in apart)
        )

    def _cycles(self) -> bool:
        """Whether a scheduler changes the momentum, too."""
        return self.groups is not None and self.groups.cycled is not None

    def _scheduler(self, given: Given, groups: Any) -> Any:
        scheduler, section = given.lr_scheduler, self.settings.scheduler
        if scheduler is None and section is not None and groups is not None:
            scheduler = scheduler_of(section, groups)
        elif callable(scheduler) and not hasattr(scheduler, "step"):
            scheduler = scheduler(groups)
        theirs = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
        if theirs is not None and theirs is not getattr(groups, "param_groups", None):
            raise ConfigError(
                f"initialize(lr_scheduler={type(scheduler).__name__}): it writes its rates to "
                "another optimizer than the one that is trained with, so they would be lost. Make "
                "it of the optimizer that is given, too, or give a function that makes it: "
                "lr_scheduler=lambda optimizer: ..."
            )
        return scheduler

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader of this rank's share of a data set."""
        return loader_of(
            dataset,
            batch_size or self.settings.micro_batch,
            rank=self.global_rank,
            world_size=self.world_size,
            collate_fn=collate_fn or self.collate_fn,
            sampler=data_sampler,
            shuffle=route == "train",
            drop_last=self.settings.drop_last,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
        )

    # --- forward, backward, step ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; see `fzero.Engine`."""
        with self._autocast():
            return self.inner(*args, **kwargs)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, `torch.autocast` around the call is off, where DeepSpeed puts its own first.

        It does so with `torch_autocast` in the configuration, and on a GPU without, too.
        """
        kind = self.device.type
        own = self.settings.config.dtypes.autocast is not None
        if not torch.is_autocast_enabled(kind) or not (own or kind == "cuda"):
            return contextlib.nullcontext()
        if not own:
            warnings.warn(
                "torch.autocast around engine(...) is switched off inside, as DeepSpeed does it: "
                'the configuration decides. Set "torch_autocast": {"enabled": true} in it.',
                stacklevel=users_line(),
            )
        return torch.autocast(kind, enabled=False)

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for a backward of your own."""
        return self.inner.scale(loss)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """`loss.backward()`, with the loss scale, divided by the accumulation steps."""
        self._backwards += 1
        return self.inner.backward(loss, retain_graph, scale_wrt_gas)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside keep their gradients on this rank; at every stage."""
        return self.inner.no_sync()

    coalesce_grad_reduction = no_sync

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last one before an update; nobody knows before `step()`
        where the configuration has `"managed_gradient_accumulation": false`: then False.
        """
        if self._boundary is not None:
            return self._boundary
        if not self.settings.managed:
            return False
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """From now on it is, or is not, whatever the number of micro-batches; None: by it again."""
        if not self.settings.managed:
            raise ConfigError(
                "set_gradient_accumulation_boundary: with managed_gradient_accumulation = false "
                "each step() is the boundary. Call step() when there is to be an update."
            )
        self._boundary = None if is_boundary is None else bool(is_boundary)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary, update, and step the scheduler unless gradients overflowed."""
        if self.optimizer is None:
            raise BackwardError(
                "engine.step() needs an optimizer, and deepspeed.initialize got none. Give the "
                'configuration an "optimizer" section, or pass initialize(optimizer=...).'
            )
        boundary = self.is_gradient_accumulation_boundary() or not self.settings.managed
        if boundary and self.groups is not None:
            if rates := self.groups.rates():
                self.inner.lr = rates
            if self.groups.cycled is not None:
                self.groups.write_momenta(self.inner.state[1].inner)
        self.inner.step(boundary)
        self.micro_steps += 1
        self._applied = False
        if not boundary:
            return
        self._norm = self.inner.metrics["grad_norm"]
        self.global_steps += 1
        micros = self.gradient_accumulation_steps() if self.settings.managed else self._backwards
        self.global_samples += (self.settings.micro_batch or 0) * self.world_size * micros
        self._backwards = 0
        self._applied = not self._skipped()
        if not self._applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            if self.groups is not None:  # what torch's schedulers ask an optimizer for
                self.groups.client._opt_called = True  # pyright: ignore
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def _skipped(self) -> bool:
        config = self.settings.config
        if config.scaling is None and config.nonfinite_policy != "skip":
            return False  # without asking the device
        return bool(self.inner.metrics["skipped"])

    def was_step_applied(self) -> bool:
        """Whether the last `step()` has updated."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients."""
        self.inner.zero_grad(set_to_none)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing: backward has reduced them."""

    def empty_partition_cache(self) -> None:
        """Nothing: what was gathered is freed when a pass ends."""

    def destroy(self) -> None:
        """Give the module back as plain PyTorch; the engine is over."""
        self.inner.release()
        for param in self.module.parameters():
            forget(param)

    # --- checkpoints ---

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint, in fzero's format; every rank must call it.

        Args:
            save_dir: of all tags.
            tag: names this one; None: "global_step" and their number.
            client_state: of this rank: tensors and plain values.
            save_latest: whether `load_checkpoint` without a tag takes this one.
            exclude_frozen_parameters: leave out what has no `requires_grad`: such as all but an
                adapter. `load_checkpoint(load_module_strict=False)` takes the rest, and leaves
                those as they are.
        """
        if not save_dir:
            raise ConfigError(f"save_checkpoint(save_dir={save_dir!r}): must name a folder.")
        frozen = self._frozen()
        kept = {
            "client_state": client_state or {},
            "lr_scheduler": _state_of(self.lr_scheduler),
            "rates": self.get_lr() if self.groups is not None else [],
            "momenta": self.get_mom() if self._cycles() else [],
            "keys": saving.keys_of(self.module),
            "frozen": sorted(frozen),
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "global_samples": self.global_samples,
        }
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        saving.save(
            Path(save_dir),
            tag,
            self.inner,
            self.global_steps,
            kept,
            latest=save_latest,
            without=frozen if exclude_frozen_parameters else (),
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint, of any world size and stage; every rank must call it.

        Returns:
            Its folder, and what the client kept; None and None if no tag is given and none saved.
        """
        if custom_load_fn is not None:
            refuse(
                "load_checkpoint(custom_load_fn=...)", "call engine.inner.load_state_dict yourself"
            )
        tag = saving.latest_tag(Path(load_dir)) if tag is None else str(tag)
        if tag is None:
            warnings.warn(
                f"{load_dir} has no file 'latest': nothing was loaded.", stacklevel=users_line()
            )
            return None, None
        found = saving.find(Path(load_dir), tag)
        kept = saving.kept_of(found)
        trains = self.optimizer is not None
        whole = load_optimizer_states and not load_module_only and trains
        with saving.in_its_words():
            if whole:
                strict = load_module_strict
                self.inner.state = checkpoint.load(found, *self.inner.state, strict=strict)
            else:
                self.inner.load_state_dict(saving.module_of(found), strict=load_module_strict)
        self.inner.zero_grad()
        self._backwards = 0
        # the micro-batches since the last update went with their gradients
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        if whole and self.groups is not None:
            write_rates(self.optimizer.param_groups, kept["rates"])
            # of what is saved before momentum cycled there is none
            for group, momentum in zip(
                self.optimizer.param_groups, kept.get("momenta", ()), strict=False
            ):
                name = "betas" if "betas" in group else "momentum"
                group[name] = tuple(momentum) if name == "betas" else momentum
            self.groups.forget()
        if not load_module_only:
            self.global_steps, self.skipped_steps = kept["global_steps"], kept["skipped_steps"]
            self.global_samples = kept["global_samples"]
            if load_lr_scheduler_states and self.lr_scheduler is not None and kept["lr_scheduler"]:
                self.lr_scheduler.load_state_dict(kept["lr_scheduler"])
        self.loaded_checkpoint_tag = tag
        return str(found), kept["client_state"]

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the module's full state dict in its own dtypes; every rank must call it."""
        low = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        first = self.global_rank == 0
        saving.write_tensors(Path(save_dir) / save_filename, low if first else None)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's full state dict in its own dtypes; every rank must call it."""
        skip = self._frozen() if exclude_frozen_parameters else ()
        own = self.module.state_dict(keep_vars=True)
        dtypes = {name: x.dtype for name, x in own.items() if isinstance(x, Tensor)}
        full = saving.cast(self.inner.state_dict(), dtypes)
        return {prefix + name: x for name, x in full.items() if name not in skip}

    def _frozen(self) -> set[str]:
        """Parameters that the client has frozen."""
        named = self.module.named_parameters()
        return {name for name, param in named if not param.requires_grad} - self._ungrouped

    def load_module_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, **_: Any
    ) -> None:
        """Load full tensors under the module's names, the same on every rank."""
        self.inner.load_state_dict(state_dict.get("module", state_dict), strict)

    def __getattr__(self, name: str) -> Any:
        if name in ENGINE:
            refuse(f"DeepSpeedEngine.{name}", ENGINE[name])
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(
                    f"DeepSpeedEngine has no {name!r}, and neither has its module."
                ) from None
            return getattr(module, name)  # as DeepSpeed's does


def _state_of(scheduler: Any) -> Any:
    return scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
