"""Read a DeepSpeed configuration: translate what has a counterpart, refuse the rest by key.

Nothing is skipped in silence that could change results: see `config.keys`, where each key that is
not translated here has its row.
"""

import json
import logging
import os
import warnings
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from fzero.config.keys import Keys
from fzero.errors import ConfigError, shown, users_line
from fzero.numerics.loss_scale import LossScale
from fzero.numerics.precision import Precision

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "torch.float16": torch.float16,
    "torch.bfloat16": torch.bfloat16,
    "torch.float32": torch.float32,
    "float": torch.float32,
    "half": torch.float16,
}

_MIB = 2**20

_LOG = logging.getLogger(__name__)


def read(source: dict[str, Any] | str | PathLike[str], *, world_size: int | None) -> dict[str, Any]:
    """The `Config` fields that a DeepSpeed configuration asks for.

    Args:
        source: the configuration, or the path of its JSON file.
        world_size: ranks; None asks the process group, else 1.

    Returns:
        Field names with values, for those that differ from "not said".

    Raises:
        ConfigError: everything that can't be honoured, one line for each key.

    Examples:
        >>> read({"gradient_clipping": 1.0, "steps_per_print": 10}, world_size=1)
        {'stage': 0, 'clip_norm': 1.0}
    """
    raw = source if isinstance(source, dict) else load(source)
    keys = Keys(raw)
    fields = _translate(keys, _world_size(world_size))
    keys.refuse_the_rest()
    if keys.problems:
        where = "this dict" if isinstance(source, dict) else repr(os.fspath(source))
        raise ConfigError(
            f"The DeepSpeed configuration in {where} asks for what fzero cannot honour:\n  "
            + "\n  ".join(sorted(keys.problems))
            + "\nRule: a key is translated, or ignored because it cannot change results, or "
            "refused. Change or remove these keys."
        )
    if keys.ignored:
        _LOG.info("DeepSpeed's keys that change no result are ignored: %s", ", ".join(keys.ignored))
    if keys.in_vain:
        warnings.warn(
            f"DeepSpeed's {', '.join(keys.in_vain)}: true here, and nothing is written or shown "
            "for it; results are the same. Log metrics yourself; profile with torch.profiler, or "
            "see Program.cost().",
            stacklevel=users_line(),
        )
    return {name: value for name, value in fields.items() if value is not None}


# --- what has a counterpart ----------------------------------------------------------------------


def _translate(keys: Keys, world_size: int) -> dict[str, Any]:
    stage = keys.integer("zero_optimization.stage")
    if stage is None and not keys.is_auto("zero_optimization.stage"):
        stage = 0  # what DeepSpeed does without a word about ZeRO
    precision, loss_scale, on_nonfinite = _numerics(keys, stage)
    low = precision in ("bf16", "fp16")
    bucket = keys.integer("zero_optimization.reduce_bucket_size", 1)
    gather_bucket = keys.integer("zero_optimization.allgather_bucket_size", 1)
    bucket = bucket if bucket is not None else gather_bucket
    prefetch = keys.integer("zero_optimization.stage3_prefetch_bucket_size")
    ahead = None
    if prefetch is not None:
        ahead = -(-prefetch // bucket) if bucket is not None else min(prefetch, 1)
    if stage is not None and stage > 3:
        keys.problem("zero_optimization.stage", stage, "must be 0, 1, 2 or 3")
    return {
        "stage": stage,
        "accum_steps": _accum_steps(keys, world_size),
        "clip_norm": keys.number("gradient_clipping") or None,
        "precision": precision,
        "loss_scale": loss_scale,
        "on_nonfinite": on_nonfinite,
        "bucket_mb": None if bucket is None else bucket * (2 if low else 4) / _MIB,
        "prefetch": ahead,
        "gather_together": _leaf_modules(keys),
        "offload": _offload(keys),
    }


def _accum_steps(keys: Keys, world_size: int) -> int | None:
    """DeepSpeed's rule: train_batch_size = micro-batch per rank * accumulation * ranks."""
    total = keys.integer("train_batch_size", 1)
    micro = keys.integer("train_micro_batch_size_per_gpu", 1)
    accum = keys.integer("gradient_accumulation_steps", 1)
    if total is None:
        return accum
    others = (micro or 1) * (accum or 1) * world_size
    if total % others or (micro and accum and total != others):
        keys.problem(
            "train_batch_size",
            total,
            f"must be train_micro_batch_size_per_gpu ({micro or 'not given'}) * "
            f"gradient_accumulation_steps ({accum or 'not given'}) * ranks ({world_size})",
        )
        return accum
    return accum if accum is not None or micro is None else total // others


def _numerics(keys: Keys, stage: int | None) -> tuple[Any, LossScale | None, str | None]:
    fp16 = keys.flag("fp16.enabled")
    bf16 = any([keys.flag("bf16.enabled"), keys.flag("bfloat16.enabled")])
    autocast = keys.flag("torch_autocast.enabled")
    skips = keys.flag("bf16.check_grad_overflow") and bf16
    loss_scale = _loss_scale(keys, stage)
    dtype = dtype_of(keys, "torch_autocast.dtype")
    safe = keys.get("torch_autocast.lower_precision_safe_modules")
    reduce = dtype_of(keys, "communication_data_type")
    computes = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    if dtype_of(keys, "data_types.param_dtype") not in (None, computes):
        keys.problem(
            "data_types.param_dtype",
            keys.get("data_types.param_dtype"),
            f"parameters are {str(computes).removeprefix('torch.')} by bf16.enabled and "
            "fp16.enabled; remove it",
        )
    if keys.flag("fp32_allreduce"):
        reduce = torch.float32

    low = {name: keys.flag(f"{name}.{name}_master_weights_and_grads") for name in ("bf16", "fp16")}
    states = keys.flag("bf16.bf16_optimizer_states") and bf16

    on = [
        name
        for name, enabled in (
            ("bf16.enabled", bf16), ("fp16.enabled", fp16), ("torch_autocast.enabled", autocast)
        )
        if enabled
    ]  # fmt: skip
    precision: Any = None
    if len(on) > 1:
        keys.problem(on[0], True, f"excludes {' and '.join(on[1:])}: enable one of them")
    elif autocast:
        # without ZeRO DeepSpeed has no modules whose gradients travel in the dtype of autocast
        safe = () if stage == 0 else safe
        precision = _attempt(
            keys,
            "torch_autocast",
            autocast=dtype or torch.bfloat16,
            lower_precision_safe_modules=None if safe is None else tuple(safe),
        )
    elif on:
        precision = _low(keys, "bf16" if bf16 else "fp16", reduce, low, states)
    if reduce is not None and not on:
        precision = _attempt(keys, "communication_data_type", reduce=reduce)
    elif reduce is not None and autocast:
        keys.problem("communication_data_type", str(reduce), "autocast chooses it by module")
    if autocast and dtype == torch.float16:
        loss_scale = _GRAD_SCALER
    elif not fp16:
        loss_scale = None
    return precision, loss_scale, "skip" if skips else None


def _low(
    keys: Keys, kind: str, reduce: torch.dtype | None, low: dict[str, bool], states: bool
) -> Any:
    """The preset of 16 bits, or what differs from it: low masters, low states."""
    dtype = _DTYPES[kind]
    if not low[kind] and not states and reduce in (None, torch.float32):
        return kind
    return _attempt(
        keys,
        kind if low[kind] or states else "communication_data_type",
        param=dtype,
        reduce=reduce or (dtype if low[kind] else torch.float32),
        master=dtype if low[kind] else torch.float32,
        optimizer=torch.bfloat16 if states else None,
    )


def _attempt(keys: Keys, key: str, **fields: Any) -> Precision | None:
    try:
        return Precision(**fields)
    except ConfigError as error:
        keys.problem(key, keys.get(key), str(error))
        return None


def _loss_scale(keys: Keys, stage: int | None) -> LossScale | None:
    """DeepSpeed's rule: where nothing is sharded without hysteresis, and no minimum raises."""
    static = keys.number("fp16.loss_scale")
    power = keys.number("fp16.initial_scale_power")
    window = keys.integer("fp16.loss_scale_window", 1)
    hysteresis = keys.integer("fp16.hysteresis", 1)
    minimum = keys.number("fp16.min_loss_scale")
    try:
        if static:
            return LossScale(init=static, dynamic=False)
        return LossScale(
            init=2.0 ** (16 if power is None else power),
            window=1000 if window is None else window,
            hysteresis=1 if stage == 0 else 2 if hysteresis is None else hysteresis,
            minimum=1.0 if minimum is None else minimum,
            settle=1,
            stops=stage != 0,
        )
    except (ConfigError, OverflowError) as error:
        keys.problem("fp16", keys.get("fp16"), str(error))
        return None


# What DeepSpeed scales with under autocast: torch.amp.GradScaler, whose scale has no least value.
_GRAD_SCALER = LossScale(window=2000, hysteresis=1, minimum=2.0**-126, stops=False)


def dtype_of(keys: Keys, key: str) -> torch.dtype | None:
    """The dtype that a key names, in DeepSpeed's words or torch's."""
    value = keys.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or value not in _DTYPES:
        keys.problem(key, value, f"must be one of {', '.join(_DTYPES)} or 'auto'")
        return None
    return _DTYPES[value]


def _offload(keys: Keys) -> str | None:
    key = "zero_optimization.offload_optimizer.device"
    device = keys.get(key)
    if device not in (None, "none", "cpu"):
        keys.problem(key, device, "masters and optimizer state go to 'cpu' or stay ('none')")
    legacy = keys.flag("zero_optimization.cpu_offload")
    return "cpu" if device == "cpu" or legacy else None


def _leaf_modules(keys: Keys) -> tuple[str, ...] | None:
    globs: list[str] = []
    for key, before in (("names", ""), ("name_suffixes", "*")):
        names = keys.get(f"zero_optimization.leaf_module.{key}") or []
        if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
            keys.problem(f"zero_optimization.leaf_module.{key}", names, "must be a list of names")
            continue
        # DeepSpeed's names are literal: a bracket in one is no glob.
        globs += [before + name.replace("[", "[[]") for name in names]
    return tuple(globs) or None


# --- the source ----------------------------------------------------------------------------------


def load(path: str | PathLike[str]) -> dict[str, Any]:
    """The configuration in a JSON file.

    Raises:
        ConfigError: it can't be read, is no object, or says a key twice.
    """

    if not isinstance(path, (str, PathLike)):  # `open` takes a number, of a file that is open
        raise ConfigError(
            f"Cannot read a DeepSpeed configuration from {shown(path)}. Pass a dict, or the path "
            "of a JSON file."
        )

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        given = [key for key, _ in pairs]
        twice = sorted({key for key in given if given.count(key) > 1})
        if twice:
            raise ConfigError(f"{os.fspath(path)!r} has duplicate keys {twice}: keep one of each.")
        return dict(pairs)

    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file, object_pairs_hook=no_duplicates)
    except (OSError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"Cannot read a DeepSpeed configuration from {path!r}: {error}. Pass a dict, or the "
            "path of a JSON file; comments and other Hjson, which DeepSpeed reads, are not JSON."
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{os.fspath(path)!r} holds a {type(raw).__name__}, not a JSON object.")
    return raw


def _world_size(given: int | None) -> int:
    if given is not None:
        return given
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
