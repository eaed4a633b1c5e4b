"""A DeepSpeed configuration, whole: what becomes a `Config`, and what the shim itself takes."""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from fzero.config import Config
from fzero.config.deepspeed import dtype_of, load
from fzero.config.keys import Keys
from fzero.errors import ConfigError, users_line

# DeepSpeed clips since 0.19 where nothing is said; before, it did not.
CLIPPING = 1.0


class Section(NamedTuple):
    """The optimizer's or the scheduler's.

    Args:
        type: its name.
        params: its arguments, those that are not "auto".
    """

    type: str
    params: dict[str, Any]


class Settings(NamedTuple):
    """What a configuration asks for.

    Args:
        config: of the Engine.
        raw: the configuration as it was given.
        micro_batch: rows of a rank's micro-batch; None if the configuration does not say.
        optimizer, scheduler: sections, or None.
        drop_last: whether the loader leaves a last short batch out.
        managed: whether gradients are added up over a number of micro-batches that is counted, or
            until the script steps.
        auto_cast: whether floating inputs are cast to float16: else they stay, as the model is.
        reduction: what gradients are over ranks: "mean" or "sum".
        predivide: what they are divided by before they are added up, of the whole division; None:
            as `fzero.Engine` does.
        buffer_dtype: what floating buffers are cast to; None: they stay.
        keep_in_fp32: parts of names of buffers that are float32; None: the model's own.
        leaf_modules: of modules that are gathered as one: `classes`, `names`, `name_suffixes`.
    """

    config: Config
    raw: dict[str, Any]
    micro_batch: int | None
    optimizer: Section | None
    scheduler: Section | None
    drop_last: bool
    managed: bool = True
    auto_cast: bool = False
    reduction: Literal["mean", "sum"] = "mean"
    predivide: float | None = None
    buffer_dtype: torch.dtype | None = None
    keep_in_fp32: tuple[str, ...] | None = None
    leaf_modules: Mapping[str, Sequence[str]] = {}


def settings(source: Mapping[str, Any] | str | os.PathLike[str], world_size: int) -> Settings:
    """Read a configuration.

    Args:
        source: the configuration, or the path of its JSON file.
        world_size: ranks.

    Raises:
        ConfigError: what can't be honoured, by key; see `Config.from_deepspeed`.

    Examples:
        >>> found = settings({"train_batch_size": 16, "gradient_accumulation_steps": 2}, 4)
        >>> found.micro_batch, found.config.accum_steps, found.config.clip_norm
        (2, 2, 1.0)
    """
    raw = dict(source) if isinstance(source, Mapping) else load(source)
    _refuse(raw)
    rest = {k: v for k, v in raw.items() if k not in _OURS}
    rest = _without(rest, "data_types", ("buffer_dtype", "keep_in_fp32_modules"))
    rest = _without(rest, "zero_optimization", ("leaf_module",))
    if rest.get("gradient_clipping", "auto") == "auto":
        rest["gradient_clipping"] = CLIPPING
    fp16 = raw.get("fp16")
    auto_cast = False
    if isinstance(fp16, Mapping) and fp16.get("auto_cast") is True:
        auto_cast = True
        rest["fp16"] = {k: v for k, v in fp16.items() if k != "auto_cast"}
    config = Config.from_deepspeed(rest, world_size=world_size)
    config = config.replace(on_nonfinite="skip" if _skips(raw, config) else "report")
    return Settings(
        config,
        raw,
        _micro_batch(raw, config.accum_steps, world_size),
        _section(raw, "optimizer"),
        _section(raw, "scheduler"),
        bool(raw.get("dataloader_drop_last", False)),
        _managed(raw),
        auto_cast,
        *_reduction(raw, world_size),
        *_buffers(raw),
        _leaf_modules(raw),
    )


_OURS = (
    "optimizer",
    "scheduler",
    "dataloader_drop_last",
    "activation_checkpointing",
    "checkpoint",
    "gradient_allreduce_op",
    "prescale_gradients",
    "gradient_predivide_factor",
    "managed_gradient_accumulation",
)


# Keys of sections that are read here: values that ask for nothing, and what to do about others;
# without advice any value is of no effect.
_STAY = "what a checkpoint keeps stays on its rank and device"
_INERT: dict[str, tuple[tuple[Any, ...], str]] = {
    "activation_checkpointing.partition_activations": ((False,), _STAY),
    "activation_checkpointing.cpu_checkpointing": ((False,), _STAY),
    "activation_checkpointing.contiguous_memory_optimization": ((), ""),
    "activation_checkpointing.number_checkpoints": ((), ""),
    "activation_checkpointing.profile": ((), ""),
    "activation_checkpointing.synchronize_checkpoint_boundary": ((), ""),
    "checkpoint.load_universal": (
        (False,),
        "read it with fzero.checkpoint.import_deepspeed_universal",
    ),
    "checkpoint.parallel_write": ((), ""),
    "checkpoint.tag_validation": (
        ("IGNORE", "WARN", "FAIL", "Ignore", "Warn", "Fail"),
        "must be Ignore, Warn or Fail; tags are compared in any case",
    ),
    "checkpoint.use_node_local_storage": ((False,), "all ranks write to one folder"),
}


def _refuse(raw: Mapping[str, Any]) -> None:
    for section in ("activation_checkpointing", "checkpoint"):
        for name, value in (raw.get(section) or {}).items():
            key = f"{section}.{name}"
            allowed, advice = _INERT.get(key, ((), "unknown"))
            if advice and value not in allowed:
                raise ConfigError(f"{key} = {value!r}: {advice}. Change or remove it.")


def _skips(raw: Mapping[str, Any], config: Config) -> bool:
    """Whether DeepSpeed skips a step whose gradients are not finite, also without a loss scale.

    As its release 0.19.8 does, where `bf16.check_grad_overflow` is true unless it is said, and is
    read at stages 1 and 2 alone; float32 without ZeRO is a plain optimizer's.
    """
    low = config.dtypes.param == torch.bfloat16
    if config.stage == 0:
        return low
    section = raw.get("bf16") or raw.get("bfloat16") or {}
    unchecked = low and section.get("check_grad_overflow", True) is False
    return config.stage == 3 or not unchecked


def _micro_batch(raw: Mapping[str, Any], accum_steps: int, world_size: int) -> int | None:
    micro, total = raw.get("train_micro_batch_size_per_gpu"), raw.get("train_batch_size")
    if isinstance(micro, int):
        return micro
    return total // (accum_steps * world_size) if isinstance(total, int) else None


def _reduction(
    raw: Mapping[str, Any], world_size: int
) -> tuple[Literal["mean", "sum"], float | None]:
    """What gradients are over ranks, and what they are divided by before they are added up.

    DeepSpeed's `prescale_gradients` divides by all ranks before, its `gradient_predivide_factor` by
    that factor before and by the rest after.
    """
    op = raw.get("gradient_allreduce_op", "mean")
    if op not in ("mean", "sum"):
        raise ConfigError(f"gradient_allreduce_op = {op!r}: must be 'mean' or 'sum'.")
    factor = raw.get("gradient_predivide_factor")
    if factor is not None and not (isinstance(factor, int | float) and factor > 0):
        raise ConfigError(f"gradient_predivide_factor = {factor!r}: must be a number > 0.")
    if raw.get("prescale_gradients"):
        factor = world_size if op == "mean" else 1.0
    return op, None if factor is None else float(factor)


def number_of(what: str, value: Any) -> float:
    """A number of a configuration or a param group.

    Raises:
        ConfigError: it is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} = {value!r}: must be a number.") from error


def _without(raw: dict[str, Any], section: str, keys: Sequence[str]) -> dict[str, Any]:
    """The configuration, where some keys of a section are read here."""
    there = raw.get(section)
    if not isinstance(there, Mapping):
        return raw
    return {**raw, section: {k: v for k, v in there.items() if k not in keys}}


def _buffers(raw: dict[str, Any]) -> tuple[torch.dtype | None, tuple[str, ...] | None]:
    """What buffers are cast to, and which stay in float32."""
    keys = Keys(raw)
    dtype = dtype_of(keys, "data_types.buffer_dtype")
    keep = keys.get("data_types.keep_in_fp32_modules")
    if keep is not None and not _are_texts(keep):
        keys.problem("data_types.keep_in_fp32_modules", keep, "must be 'auto' or a list of names")
    if keys.problems:
        raise ConfigError(". ".join(keys.problems) + ". Change or remove it.")
    return dtype, None if keep is None else tuple(keep)


def _leaf_modules(raw: dict[str, Any]) -> Mapping[str, Sequence[str]]:
    """The lists of `zero_optimization.leaf_module`; DeepSpeed takes one name for a list, too."""
    keys = Keys(raw)
    section = keys.get("zero_optimization.leaf_module") or {}
    known = ("classes", "names", "name_suffixes")
    if not isinstance(section, Mapping) or section.keys() - set(known):
        raise ConfigError(
            f"zero_optimization.leaf_module = {section!r}: must be lists under {', '.join(known)}."
        )
    lists = {k: [v] if isinstance(v, str) else v for k, v in section.items() if v is not None}
    for key, value in lists.items():
        if not _are_texts(value):
            raise ConfigError(
                f"zero_optimization.leaf_module.{key} = {value!r}: must be a list of names."
            )
    return lists


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(x, str) and x for x in values)


def _managed(raw: Mapping[str, Any]) -> bool:
    managed = raw.get("managed_gradient_accumulation", True)
    if not isinstance(managed, bool):
        raise ConfigError(f"managed_gradient_accumulation = {managed!r}: must be true or false.")
    return managed


def _section(raw: Mapping[str, Any], name: str) -> Section | None:
    section = raw.get(name)
    if not section:
        return None
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        raise ConfigError(
            f'{name} = {section!r}: must be {{"type": NAME, "params": {{...}}}}, as DeepSpeed has '
            "it."
        )
    params = section.get("params") or {}
    if auto := [f"{name}.params.{k}" for k, v in params.items() if v == "auto"]:
        warnings.warn(
            f"DeepSpeed's {', '.join(auto)}: 'auto', which transformers' Trainer would fill in and "
            f"nobody does here: the default of {section['type']} counts. Write the numbers.",
            stacklevel=users_line(),
        )
    return Section(section["type"], {k: v for k, v in params.items() if v != "auto"})
