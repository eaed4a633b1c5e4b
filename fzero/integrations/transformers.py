"""`transformers.Trainer` with the Engine's step: sharded by ZeRO, everything else as it was.

Three things of the Trainer are replaced: what a model is wrapped in (the engine, where there would
be DDP), the optimizer (the engine's), and what a checkpoint holds of both. Loops, data, schedules,
callbacks, metrics and the Hub are transformers' own.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero import checkpoint as checkpoints
from fzero import optim
from fzero.config import Config
from fzero.engine import Engine
from fzero.engine.face import EngineOptimizer
from fzero.errors import ConfigError

try:
    import transformers
    from accelerate import Accelerator
    from safetensors.torch import load_file
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"fzero.integrations.transformers needs {error.name}; pip install 'fzero[integrations]'."
    ) from error

__all__ = ["Seq2SeqTrainer", "Trainer"]

FOLDER = "fzero"
"""Of a Trainer's checkpoint folder: what is resumed from."""

_SCHEDULER = "scheduler.pt"  # as transformers has it

_SAVE_PRETRAINED = transformers.PreTrainedModel.save_pretrained


class EngineAccelerator(Accelerator):
    """The Trainer's accelerator, once an engine does what it would do to model and gradients."""

    engine: Engine | None = None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """The engine's, which knows the loss scale."""
        if self.engine is None:
            super().backward(loss, **kwargs)
        else:
            self.engine.backward(loss)

    def no_sync(self, model: Any) -> Any:
        """Where gradients are sharded each micro-batch is reduced: whole ones have no room."""
        if not isinstance(model, Engine):
            return super().no_sync(model)
        return contextlib.nullcontext() if model.cfg.stage > 1 else model.no_sync()

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The user's module."""
        return (
            model.module
            if isinstance(model, Engine)
            else super().unwrap_model(model, *args, **kwargs)
        )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether gradients overflowed: the schedule waits then."""
        if self.engine is None or self.engine.cfg.scaling is None:
            return super().optimizer_step_was_skipped
        return bool(self.engine.metrics.get("skipped", False))


class _OnEngine:
    """What `Trainer` and `Seq2SeqTrainer` have in common, before a Trainer of transformers."""

    args: Any
    model: Any
    accelerator: Any
    lr_scheduler: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    state: Any

    def __init__(
        self, *args: Any, cfg: Config | None = None, opt: Any = None, **kwargs: Any
    ) -> None:
        self.engine: Engine | None = None
        self._cfg, self._opt = cfg or Config(stage=3), opt
        super().__init__(*args, **kwargs)
        self._refuse_other_optimizers("Trainer(optimizers=(optimizer, ...))")
        self._cfg = _config(self._cfg, self.args)

    def create_accelerator_and_postprocess(self) -> None:
        """transformers' own; what it makes defers to the engine from then on."""
        _refuse(self.args)
        super().create_accelerator_and_postprocess()  # pyright: ignore[reportAttributeAccessIssue]
        # the Trainer makes it by name: there is no argument for another class
        self.accelerator.__class__ = EngineAccelerator

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Shard the model, unless it is; the engine's face as an optimizer of torch."""
        self._refuse_other_optimizers("trainer.optimizer = ...")
        if self.engine is None or self.engine.module is not self.model:
            decayed = self.get_decay_parameter_names(self.model)  # pyright: ignore
            opt = self._opt if self._opt is not None else optimizer_of(self.args, decayed)
            engine = Engine(self.model, opt, self._cfg, broadcast=True)  # as DDP does
            self.engine = self.accelerator.engine = engine
        self.optimizer = self.engine.optimizer
        return self.optimizer

    def _refuse_other_optimizers(self, where: str) -> None:
        """Raise a ConfigError if one was asked for in a way that the engine does not hear of.

        Args:
            where: the one that is there may have come from.
        """
        asked: dict[str, Any] = {
            "Trainer(optimizer_cls_and_kwargs=...)": self.optimizer_cls_and_kwargs,
            "get_optimizer_cls_and_kwargs() of this class": self._opt is None
            and type(self).get_optimizer_cls_and_kwargs  # pyright: ignore
            is not transformers.Trainer.get_optimizer_cls_and_kwargs,
            # accelerate wraps it
            where: not isinstance(
                getattr(self.optimizer, "optimizer", self.optimizer), EngineOptimizer | None
            ),
        }
        for name, there in asked.items():
            if there:
                raise ConfigError(
                    f"{name}: an optimizer of torch updates whole parameters, which no rank has. "
                    "Pass one of fzero.optim as opt=, or name it in TrainingArguments(optim=...)."
                )

    def _wrap_model(self, model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        if training:  # whoever overrides what makes the optimizer makes no engine either
            self._refuse_other_optimizers("create_optimizer() of this class")
        if self.engine is not None and model in (self.engine, self.engine.module):
            return self.engine
        return super()._wrap_model(model, training, *args, **kwargs)  # pyright: ignore

    # the step clips, as it knows the norm of whole gradients; it is told once it is there
    def _clip_grad_norm(self, model: Any) -> None:
        del model

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        del model
        return grad_norm

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kw: Any
    ) -> None:
        if self.engine is not None:
            grad_norm = self.engine.metrics.get("grad_norm", grad_norm)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kw)  # pyright: ignore

    # --- checkpoints ---

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """What `from_pretrained` reads. Every rank must call it; one writes."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)  # pyright: ignore
            return
        state = self.engine.state_dict()
        with self._read_by_one():
            self._save(output_dir, state if self.args.should_save else {})  # pyright: ignore
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # pyright: ignore

    def _read_by_one(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the rank that writes may read the module alone.

        transformers' own writing goes by the state that it is given. Others read the module besides
        (peft does for `modules_to_save`), and a gather would wait for the ranks that do not write.
        """
        assert self.engine is not None
        if getattr(type(self.model), "save_pretrained", None) is _SAVE_PRETRAINED:
            return contextlib.nullcontext()
        return self.engine.local_forward()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        checkpoints.save(os.path.join(output_dir, FOLDER), *self.engine.state, overwrite=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if os.path.isdir(os.path.join(resume_from_checkpoint, FOLDER)):
            return  # weights and buffers come with the engine's state, once there is an engine
        own = self.engine is not None and self.engine.module is self.model
        if own or any(Path(resume_from_checkpoint).glob("**/*.safetensors")):
            # not as transformers does: it goes on where files have other names than the model
            self._load_weights(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # pyright: ignore

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.engine is not None
        folder = os.path.join(checkpoint, FOLDER)
        if not os.path.isdir(folder):
            warnings.warn(
                f"{checkpoint} has no folder {FOLDER!r}: it was saved with save_only_model, or "
                "by another Trainer. Its weights are loaded; optimizer and schedule start anew.",
                stacklevel=2,
            )
            return
        self.engine.state = checkpoints.load(folder, *self.engine.state)
        found = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(found)

    def _load_best_model(self) -> None:
        assert self.engine is not None
        best = self.state.best_model_checkpoint
        folder = os.path.join(best, FOLDER)
        if os.path.isdir(folder):
            # masters and buffers with the parameters; the optimizer goes on as it is
            params, opt_state, _ = checkpoints.load_partial(folder, *self.engine.state)
            self.engine.state = (params, opt_state)
        else:
            self._load_weights(best)

    def _load_weights(self, folder: str) -> None:
        """What `save_model` wrote, back into the engine; into the model, if there is none yet.

        Raises:
            ConfigError: a trained parameter is not there.
        """
        found, own = _weights(self.model, folder), self.model.state_dict(keep_vars=True)
        there = {id(own[name]) for name in found if name in own}
        missing = [
            name
            for name, x in own.items()
            if getattr(x, "requires_grad", False) and id(x) not in there  # tied: one name will do
        ]
        if missing:
            raise ConfigError(
                f"{folder} has no {missing[0]!r} in a .safetensors file, and {missing[0]!r} is "
                f"trained ({len(missing)} such). Nothing was loaded. Save with "
                "save_only_model=False, which keeps the engine's own state too, or load the "
                "folder by from_pretrained before the Trainer is made."
            )
        into: Any = self.model
        if self.engine is not None and self.engine.module is self.model:
            into = self.engine
        into.load_state_dict(found, strict=False)


def _weights(model: Any, folder: str) -> dict[str, Tensor]:
    """What `save_pretrained` has written, under the model's names."""
    found: dict[str, Tensor] = {}
    for where, named in _saved(model, folder):
        for file in sorted(where.glob("*.safetensors")):
            found |= {named.get(key, key): x for key, x in load_file(file).items()}
    of_transformers = isinstance(model, transformers.PreTrainedModel)
    described = of_transformers and Path(folder, "config.json").is_file()
    if found.keys() <= model.state_dict(keep_vars=True).keys() or not described:
        return found
    # files may have other tensors than the model, as experts one by one: transformers knows which
    floats = [x.dtype for x in found.values() if x.is_floating_point()]
    # all digits of masters, whatever dtype the model computes in
    widest = functools.reduce(torch.promote_types, floats)
    kind: Any = type(model)
    read, info = kind.from_pretrained(folder, dtype=widest, output_loading_info=True)
    return {key: x for key, x in read.state_dict().items() if key not in info["missing_keys"]}


def _saved(model: Any, folder: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """Folders of files that `save_pretrained` writes, each with the model's names for its keys."""
    if not hasattr(model, "peft_config"):
        yield Path(folder), {}
        return
    from peft import get_peft_model_state_dict  # without it there are no such models

    own = model.state_dict(keep_vars=True)
    names = {id(x): name for name, x in own.items()}
    for adapter in model.peft_config:
        written = get_peft_model_state_dict(model, state_dict=dict(own), adapter_name=adapter)
        where = Path(folder) if adapter == "default" else Path(folder, adapter)
        yield where, {key: names[id(x)] for key, x in written.items() if id(x) in names}


class Trainer(_OnEngine, transformers.Trainer):
    """`transformers.Trainer`, sharded over the ranks that torchrun has started.

    `TrainingArguments` mean what they mean there: batch sizes, accumulation, `max_grad_norm`,
    `optim`, schedules, `bf16`/`fp16`, evaluation, saving, resuming. A checkpoint has the weights as
    `from_pretrained` reads them, and a folder `fzero` that any world size resumes from. On one
    process it trains there.

    Args:
        args, kwargs: as of `transformers.Trainer`.
        cfg: see `Config`; stage 3 if not given. `clip_norm` is `max_grad_norm` unless it is set,
            `precision` what `bf16` or `fp16` ask for.
        opt: one of `fzero.optim`; else `args.optim` names it: AdamW, SGD, Lion. For a
            schedule of transformers its rate must be in its state
            (`fzero.optim.inject_hyperparams`).

    Attributes:
        engine: the `fzero.Engine` of the model, from `train()` on.

    Raises:
        ConfigError: an argument asks for another way to shard or to compile, for an optimizer that
            there isn't, or for what the engine can't do.

    Examples:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> config = GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1)
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), use_cpu=True, max_steps=2, disable_tqdm=True, report_to=[]
        ... )
        >>> text = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
        >>> trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=[text] * 16)
        >>> trainer.train().global_step
        {'train_runtime': ..., 'train_loss': ..., 'epoch': '1'}
        2
        >>> trainer.engine
        Engine(GPT2LMHeadModel, stage 3, world 1, ... parameters, step 2)
    """


class Seq2SeqTrainer(_OnEngine, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` in the same way; see `Trainer`.

    With `predict_with_generate` ranks whose texts end earlier go on with the others at stage 3.
    """

    _gen_kwargs: dict[str, Any]

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: Any = None,
        **kw: Any,
    ) -> Any:
        """transformers' own, with `synced_gpus` where forwards gather."""
        given = {**getattr(self, "_gen_kwargs", {}), **kw}
        if self.engine is not None and self.engine.cfg.stage == 3 and self.args.world_size > 1:
            given.setdefault("synced_gpus", True)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **given)


def optimizer_of(args: Any, decayed: Sequence[str]) -> optim.Optimizer:
    """The optimizer that `TrainingArguments.optim` names, with its rate in its state.

    Args:
        args: `TrainingArguments`.
        decayed: names of the parameters that `weight_decay` is for.

    Raises:
        ConfigError: there is none of that name.
    """
    betas = {"b1": args.adam_beta1, "b2": args.adam_beta2}
    decay = args.weight_decay
    ways: dict[str, Callable[[Any, float], Any]] = {
        "adamw_torch": lambda lr, wd: optim.adamw(
            lr, **betas, eps=args.adam_epsilon, weight_decay=wd
        ),
        "sgd": lambda lr, wd: optim.sgd(lr, weight_decay=wd),
        "lion_32bit": lambda lr, wd: optim.lion(lr, **betas, weight_decay=wd),
    }
    ways["adamw_torch_fused"] = ways["adamw_torch"]
    name = str(getattr(args.optim, "value", args.optim))
    if name not in ways or args.optim_args:
        asked = f"optim={name!r}" + (f", optim_args={args.optim_args!r}" if args.optim_args else "")
        raise ConfigError(
            f"TrainingArguments({asked}): there is no counterpart of it. Use one of "
            f"{', '.join(sorted(ways))} without optim_args, or pass Trainer(..., opt=...) one of "
            "fzero.optim."
        )
    names = frozenset(decayed)

    def labels(params: Any) -> dict[str, str]:
        return {name: "decayed" if name in names else "rest" for name in params}

    def make(lr: Any) -> optim.Optimizer:
        both = {"decayed": ways[name](lr, decay), "rest": ways[name](lr, 0.0)}
        return optim.multi_transform(both, labels)

    return optim.inject_hyperparams(make)(lr=args.learning_rate)


def _config(cfg: Config, args: Any) -> Config:
    if cfg.accum_steps != 1:
        raise ConfigError(
            f"Config.accum_steps={cfg.accum_steps}: a Trainer accumulates by itself. Say "
            "TrainingArguments(gradient_accumulation_steps=...), and leave accum_steps at 1."
        )
    if cfg.clip_norm is None and args.max_grad_norm and args.max_grad_norm > 0:
        cfg = replace(cfg, clip_norm=args.max_grad_norm)
    if cfg.precision == Config().precision and (args.bf16 or args.fp16):
        cfg = replace(cfg, precision="bf16" if args.bf16 else "fp16")
    return cfg


def _refuse(args: Any) -> None:
    """Raise a ConfigError for arguments that would be passed over."""
    asked = {
        "deepspeed": args.deepspeed,
        "fsdp": args.fsdp,
        "torch_compile": args.torch_compile,
        "auto_find_batch_size": args.auto_find_batch_size,
        "parallelism_config": args.parallelism_config,
    }
    there = [name for name, value in asked.items() if value]
    if there:
        raise ConfigError(
            f"TrainingArguments({there[0]}=...) is not for fzero's Trainer: the model is sharded, "
            "and its step run, by an fzero.Engine. Leave it out; cfg=fzero.Config(...) says how."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs, which a Trainer would give one replica each. "
            "Start one process per GPU: torchrun --nproc-per-node=gpu script.py."
        )
