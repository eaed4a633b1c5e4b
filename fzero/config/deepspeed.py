"""Read a DeepSpeed configuration: translate what has a counterpart, refuse the rest by key.

Every key of DeepSpeed's JSON is in one of four tables below or is read by `_translate`; a key
that is in none of them is unknown. Nothing is skipped in silence that could change results.
"""

import json
import os
from collections.abc import Iterator
from difflib import get_close_matches
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from fzero.errors import ConfigError
from fzero.numerics.loss_scale import LossScale
from fzero.numerics.precision import Precision

# Keys that change what is printed, profiled or when something runs, but no result.
_IGNORED = frozenset(
    {
        "autotuning",
        "comms_logger",
        "comet",
        "csv_monitor",
        "dump_state",
        "flops_profiler",
        "memory_breakdown",
        "monitor_config",
        "steps_per_print",
        "tensorboard",
        "timers",
        "wall_clock_breakdown",
        "wandb",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "bf16.immediate_grad_update",
        "zero_optimization.allgather_partitions",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.cpu_offload_use_pin_memory",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.enable_sanity_checks",
        "zero_optimization.legacy_stage1",
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.memory_efficient_linear",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_optimizer.fast_init",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.offload_optimizer.pipeline_write",
        "zero_optimization.overlap_comm",
        "zero_optimization.pipeline_loading_checkpoint",
        "zero_optimization.reduce_scatter",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.stage3_model_persistence_threshold",
        "zero_optimization.stage3_module_granularity_threshold",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "zero_optimization.sub_group_size",
        "zero_optimization.use_multi_rank_bucket_allreduce",
    }
)

# Keys that may stand at these values only, which ask for nothing; otherwise, what to do instead.
_INERT: dict[str, tuple[tuple[Any, ...], str]] = {
    "data_types.grad_accum_dtype": (
        (None, "fp32", "float32"),
        "gradients are accumulated in float32; remove it",
    ),
    "disable_allgather": ((False,), "remove it"),
    "fp16.auto_cast": ((False,), "cast the inputs, or use torch_autocast"),
    "fp16.consecutive_hysteresis": ((False,), "hysteresis is refilled when the scale grows"),
    "gradient_predivide_factor": ((1, 1.0), "gradients are averaged once, after the sum"),
    "prescale_gradients": ((False,), "gradients are averaged once, after the sum"),
    "sparse_gradients": ((False,), "gradients of embeddings are dense here; remove it"),
    "zero_optimization.ignore_unused_parameters": (
        (True,),
        "unused parameters get zero gradients; remove it",
    ),
    "zero_optimization.mics_hierarchical_params_gather": ((False,), "pass a 2-axis Config.mesh"),
    "zero_optimization.mics_shard_size": (
        (-1, 0),
        "pass Config.mesh with the axes (replicate, shard)",
    ),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), "offload is all or nothing"),
    "zero_optimization.offload_param.device": (
        (None, "none"),
        "parameters stay on the device at stage 3 as shards; offload_optimizer is available",
    ),
    "zero_optimization.override_module_apply": ((True,), "remove it"),
    "zero_optimization.zero_hpz_partition_size": (
        (1,),
        "pass Config.mesh with the axes (replicate, shard)",
    ),
    "zero_optimization.zero_quantized_gradients": ((False,), "collectives are not quantised"),
    "zero_optimization.zero_quantized_nontrainable_weights": (
        (False,),
        "collectives are not quantised",
    ),
    "zero_optimization.zero_quantized_weights": ((False,), "collectives are not quantised"),
    "zero_optimization.cpu_offload_params": ((False,), "parameters stay on the device as shards"),
}

# Sections without a counterpart in `Config`; accepted where they say `"enabled": false`.
_REFUSED: dict[str, str] = {
    "activation_checkpointing": "use fzero.remat or torch.utils.checkpoint in the model",
    "aio": "there is no NVMe offload",
    "amp": "use bf16, fp16 or torch_autocast",
    "checkpoint": "see fzero.checkpoint",
    "compile": 'see Config.executor="inductor"',
    "compression_training": "compress the model itself",
    "curriculum_learning": "choose the batches yourself",
    "data_efficiency": "choose the batches yourself",
    "dataloader_drop_last": "the loader is yours: torch.utils.data.DataLoader(drop_last=...)",
    "eigenvalue": "compose torch.func.grad over the loss",
    "elasticity": "a checkpoint loads into any world size",
    "hybrid_engine": "there is no inference engine",
    "nebula": "see fzero.checkpoint",
    "optimizer": "pass an optimizer: make_train_step(model_fn, fzero.optim.adamw(lr), cfg)",
    "pipeline": "there is no pipeline parallelism",
    "progressive_layer_drop": "drop layers in the model",
    "quantize_training": "quantise the model itself",
    "scheduler": "pass a schedule as the learning rate: fzero.optim.adamw(schedule)",
    "seq_parallel_communication_data_type": "there is no sequence parallelism",
    "sparse_attention": "use sparse attention in the model",
    "tensor_parallel": "there is no tensor parallelism",
    "zenflow": "there is no asynchronous optimizer",
    "zero_optimization.zenflow": "there is no asynchronous optimizer",
    "zero_optimization.leaf_module.classes": "name the modules: leaf_module.names, as globs",
    "zero_optimization.offload_param.nvme_path": "there is no NVMe offload",
    "zero_optimization.offload_optimizer.nvme_path": "there is no NVMe offload",
}

_SECTIONS = frozenset(
    {
        "bf16",
        "bfloat16",
        "data_types",
        "fp16",
        "torch_autocast",
        "zero_optimization",
        "zero_optimization.leaf_module",
        "zero_optimization.offload_optimizer",
        "zero_optimization.offload_param",
    }
)

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "torch.float16": torch.float16,
    "torch.bfloat16": torch.bfloat16,
}

_MIB = 2**20


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
    raw = source if isinstance(source, dict) else _load(source)
    reader = _Reader(raw)
    fields = _translate(reader, _world_size(world_size))
    reader.refuse_the_rest(raw)
    if reader.problems:
        where = "this dict" if isinstance(source, dict) else repr(os.fspath(source))
        raise ConfigError(
            f"The DeepSpeed configuration in {where} asks for what fzero cannot honour:\n  "
            + "\n  ".join(sorted(reader.problems))
            + "\nRule: a key is translated, or ignored because it cannot change results, or "
            "refused. Change or remove these keys."
        )
    return {name: value for name, value in fields.items() if value is not None}


class _Reader:
    """Typed access by dotted key, which remembers what was read and what was wrong."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.read: set[str] = set()
        self.problems: list[str] = []

    def problem(self, key: str, value: Any, advice: str) -> None:
        self.problems.append(f"{key} = {json.dumps(value, default=repr)}: {advice}")

    def get(self, key: str) -> Any:
        """The value; None where it is missing, null or "auto"."""
        self.read.add(key)
        value = self._raw(key)
        return None if value == "auto" else value

    def is_auto(self, key: str) -> bool:
        return self._raw(key) == "auto"

    def _raw(self, key: str) -> Any:
        node: Any = self.raw
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.problem(key, value, "must be true, false or 'auto'")
        return value is True

    def number(self, key: str, low: float = 0) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= low:
            self.problem(key, value, f"must be a number >= {low:g} or 'auto'")
            return None
        return value

    def integer(self, key: str, low: int = 0) -> int | None:
        value = self.number(key, low)
        if value is None:
            return None
        if value != value // 1:  # DeepSpeed takes 5e8 for an int
            self.problem(key, value, "must be a whole number or 'auto'")
            return None
        return int(value)

    def refuse_the_rest(self, raw: dict[str, Any]) -> None:
        for key, value in _leaves(raw, ""):
            if key in self.read or key in _IGNORED or value == "auto":
                continue
            if key in _INERT:
                allowed, advice = _INERT[key]
                if not any(value is a or (value == a and not isinstance(a, bool)) for a in allowed):
                    self.problem(key, value, advice)
            elif key in _REFUSED:
                off = isinstance(value, dict) and value.get("enabled") is False
                if _asks(value) and not off:
                    self.problem(key, value, f"no counterpart in Config: {_REFUSED[key]}")
            elif key in _SECTIONS:
                if value is not None:
                    self.problem(key, value, "must be a JSON object, such as {...}")
            else:
                known = [*self.read, *_IGNORED, *_INERT, *_REFUSED]
                near = get_close_matches(key, known, n=1)
                self.problem(
                    key, value, "unknown" + (f"; did you mean {near[0]!r}?" if near else "")
                )


def _asks(value: Any) -> bool:
    """Whether a section says anything but no: a false, zero or empty value asks for nothing."""
    return any(map(_asks, value.values())) if isinstance(value, dict) else bool(value)


def _leaves(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys with values; sections that have no table of their own are one leaf."""
    for key, value in node.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and path in _SECTIONS:
            yield from _leaves(value, path)
        else:
            yield path, value


# --- what has a counterpart ----------------------------------------------------------------------


def _translate(r: _Reader, world_size: int) -> dict[str, Any]:
    stage = r.integer("zero_optimization.stage")
    if stage is None and not r.is_auto("zero_optimization.stage"):
        stage = 0  # what DeepSpeed does without a word about ZeRO
    precision, loss_scale, on_nonfinite = _numerics(r)
    low = precision in ("bf16", "fp16")
    bucket = r.integer("zero_optimization.reduce_bucket_size", 1)
    gather_bucket = r.integer("zero_optimization.allgather_bucket_size", 1)
    bucket = bucket if bucket is not None else gather_bucket
    prefetch = r.integer("zero_optimization.stage3_prefetch_bucket_size")
    ahead = None
    if prefetch is not None:
        ahead = -(-prefetch // bucket) if bucket is not None else min(prefetch, 1)
    if stage is not None and stage > 3:
        r.problem("zero_optimization.stage", stage, "must be 0, 1, 2 or 3")
    return {
        "stage": stage,
        "accum_steps": _accum_steps(r, world_size),
        "clip_norm": r.number("gradient_clipping") or None,
        "precision": precision,
        "loss_scale": loss_scale,
        "on_nonfinite": on_nonfinite,
        "bucket_mb": None if bucket is None else bucket * (2 if low else 4) / _MIB,
        "prefetch": ahead,
        "gather_together": _leaf_modules(r),
        "offload": _offload(r),
    }


def _accum_steps(r: _Reader, world_size: int) -> int | None:
    """DeepSpeed's rule: train_batch_size = micro-batch per rank * accumulation * ranks."""
    total = r.integer("train_batch_size", 1)
    micro = r.integer("train_micro_batch_size_per_gpu", 1)
    accum = r.integer("gradient_accumulation_steps", 1)
    if total is None:
        return accum
    others = (micro or 1) * (accum or 1) * world_size
    if total % others or (micro and accum and total != others):
        r.problem(
            "train_batch_size",
            total,
            f"must be train_micro_batch_size_per_gpu ({micro or 'not given'}) * "
            f"gradient_accumulation_steps ({accum or 'not given'}) * ranks ({world_size})",
        )
        return accum
    return accum if accum is not None or micro is None else total // others


def _numerics(r: _Reader) -> tuple[Any, LossScale | None, str | None]:
    fp16 = r.flag("fp16.enabled")
    bf16 = any([r.flag("bf16.enabled"), r.flag("bfloat16.enabled")])
    autocast = r.flag("torch_autocast.enabled")
    skips = r.flag("bf16.check_grad_overflow") and bf16
    loss_scale = _loss_scale(r)
    dtype = _dtype(r, "torch_autocast.dtype")
    safe = r.get("torch_autocast.lower_precision_safe_modules")
    reduce = _dtype(r, "communication_data_type")
    if r.flag("fp32_allreduce"):
        reduce = torch.float32

    low = {name: r.flag(f"{name}.{name}_master_weights_and_grads") for name in ("bf16", "fp16")}
    states = r.flag("bf16.bf16_optimizer_states") and bf16

    on = [
        name
        for name, enabled in (
            ("bf16.enabled", bf16), ("fp16.enabled", fp16), ("torch_autocast.enabled", autocast)
        )
        if enabled
    ]  # fmt: skip
    precision: Any = None
    if len(on) > 1:
        r.problem(on[0], True, f"excludes {' and '.join(on[1:])}: enable one of them")
    elif autocast:
        precision = _attempt(
            r,
            "torch_autocast",
            autocast=dtype or torch.bfloat16,
            lower_precision_safe_modules=None if safe is None else tuple(safe),
        )
    elif on:
        precision = _low(r, "bf16" if bf16 else "fp16", reduce, low, states)
    if reduce is not None and not on:
        precision = _attempt(r, "communication_data_type", reduce=reduce)
    elif reduce is not None and autocast:
        r.problem("communication_data_type", str(reduce), "autocast chooses it by module")
    explicit = loss_scale if fp16 and loss_scale != LossScale() else None
    return precision, explicit, "skip" if skips else None


def _low(
    r: _Reader, kind: str, reduce: torch.dtype | None, low: dict[str, bool], states: bool
) -> Any:
    """The preset of 16 bits, or what differs from it: low masters, low states."""
    dtype = _DTYPES[kind]
    if not low[kind] and not states and reduce in (None, torch.float32):
        return kind
    return _attempt(
        r,
        kind if low[kind] or states else "communication_data_type",
        param=dtype,
        reduce=reduce or (dtype if low[kind] else torch.float32),
        master=dtype if low[kind] else torch.float32,
        optimizer=torch.bfloat16 if states else None,
    )


def _attempt(r: _Reader, key: str, **fields: Any) -> Precision | None:
    try:
        return Precision(**fields)
    except ConfigError as error:
        r.problem(key, r.get(key), str(error))
        return None


def _loss_scale(r: _Reader) -> LossScale | None:
    static = r.number("fp16.loss_scale")
    power = r.number("fp16.initial_scale_power")
    window = r.integer("fp16.loss_scale_window", 1)
    hysteresis = r.integer("fp16.hysteresis", 1)
    minimum = r.number("fp16.min_loss_scale")
    try:
        if static:
            return LossScale(init=static, dynamic=False)
        return LossScale(
            init=2.0 ** (16 if power is None else power),
            window=1000 if window is None else window,
            hysteresis=2 if hysteresis is None else hysteresis,
            minimum=1.0 if minimum is None else minimum,
        )
    except (ConfigError, OverflowError) as error:
        r.problem("fp16", r.get("fp16"), str(error))
        return None


def _dtype(r: _Reader, key: str) -> torch.dtype | None:
    value = r.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or value not in _DTYPES:
        r.problem(key, value, f"must be one of {', '.join(_DTYPES)} or 'auto'")
        return None
    return _DTYPES[value]


def _offload(r: _Reader) -> str | None:
    key = "zero_optimization.offload_optimizer.device"
    device = r.get(key)
    if device not in (None, "none", "cpu"):
        r.problem(key, device, "masters and optimizer state go to 'cpu' or stay ('none')")
    legacy = r.flag("zero_optimization.cpu_offload")
    return "cpu" if device == "cpu" or legacy else None


def _leaf_modules(r: _Reader) -> tuple[str, ...] | None:
    globs: list[str] = []
    for key, before in (("names", ""), ("name_suffixes", "*")):
        names = r.get(f"zero_optimization.leaf_module.{key}") or []
        if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
            r.problem(f"zero_optimization.leaf_module.{key}", names, "must be a list of names")
            continue
        # DeepSpeed's names are literal: a bracket in one is no glob.
        globs += [before + name.replace("[", "[[]") for name in names]
    return tuple(globs) or None


# --- the source ----------------------------------------------------------------------------------


def _load(path: str | PathLike[str]) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
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
            "path of a JSON file."
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
