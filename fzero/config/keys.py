"""DeepSpeed's keys: those that cannot change a result, those that ask for nothing, the refused.

Every key of DeepSpeed's JSON is in one of four tables or is read by `config.deepspeed`; a key that
is in none of them is unknown.
"""

import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

# Keys that change what is printed, profiled or when something runs, but no result.
IGNORED = frozenset(
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
        # DeepSpeed takes these names of stage 3 without their prefix, too
        "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.max_live_parameters",
        "zero_optimization.max_reuse_distance",
        "zero_optimization.model_persistence_threshold",
        "zero_optimization.param_persistence_threshold",
        "zero_optimization.legacy_stage1",
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.memory_efficient_linear",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_optimizer.fast_init",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.offload_optimizer.pipeline_write",
        # of interest with a device alone, which is refused but for "none"
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.offload_param.max_in_cpu",
        "zero_optimization.offload_param.pin_memory",
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

# Of these, the sections and flags that ask for something to be written or shown: in vain.
WRITES = (
    "autotuning",
    "comet",
    "comms_logger",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "tensorboard",
    "wall_clock_breakdown",
    "wandb",
)

# Keys that may stand at these values only, which ask for nothing; otherwise, what to do instead.
INERT: dict[str, tuple[tuple[Any, ...], str]] = {
    "data_types.grad_accum_dtype": (
        (None, "fp32", "float32"),
        "gradients are accumulated in float32; remove it",
    ),
    "data_types.buffer_dtype": ((None,), "buffers keep their dtype: cast them yourself"),
    "data_types.keep_in_fp32_modules": (
        (None, []),
        "buffers keep their dtype: cast them yourself",
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
REFUSED: dict[str, str] = {
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

SECTIONS = frozenset(
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


class Keys:
    """A configuration by dotted key, typed; it remembers what was read and what was wrong.

    >>> keys = Keys({"fp16": {"enabled": True}, "stepsperprint": 10})
    >>> keys.flag("fp16.enabled")
    True
    >>> keys.refuse_the_rest()
    >>> keys.problems
    ["stepsperprint = 10: unknown; did you mean 'steps_per_print'?"]
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.read: set[str] = set()
        self.problems: list[str] = []

    def problem(self, key: str, value: Any, advice: str) -> None:
        """Note that a key can't be honoured, and what to do instead."""
        self.problems.append(f"{key} = {json.dumps(value, default=repr)}: {advice}")

    def get(self, key: str) -> Any:
        """The value; None where it is missing, null or "auto"."""
        self.read.add(key)
        value = self._raw(key)
        return None if value == "auto" else value

    def is_auto(self, key: str) -> bool:
        """Whether DeepSpeed is to choose the value."""
        return self._raw(key) == "auto"

    def _raw(self, key: str) -> Any:
        node: Any = self.raw
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def flag(self, key: str) -> bool:
        """Whether it is true; anything but true and false is a problem."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.problem(key, value, "must be true, false or 'auto'")
        return value is True

    def number(self, key: str, low: float = 0) -> float | None:
        """A number of at least `low`; None where it is not given, or a problem."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= low:
            self.problem(key, value, f"must be a number >= {low:g} or 'auto'")
            return None
        return value

    def integer(self, key: str, low: int = 0) -> int | None:
        """A whole number of at least `low`; None where it is not given, or a problem."""
        value = self.number(key, low)
        if value is None:
            return None
        if value != value // 1:  # DeepSpeed takes 5e8 for an int
            self.problem(key, value, "must be a whole number or 'auto'")
            return None
        return int(value)

    @property
    def ignored(self) -> list[str]:
        """The keys that are there and mean nothing here."""
        there = dict(_leaves(self.raw, ""))
        return [key for key in there if key in IGNORED and key not in self.read]

    @property
    def in_vain(self) -> list[str]:
        """What is switched on and would be written or shown by DeepSpeed, and is not here."""
        found: list[str] = []
        for key in WRITES:
            value = self._raw(key)
            if value is True:
                found.append(key)
            elif isinstance(value, dict) and value.get("enabled") is True:
                found.append(f"{key}.enabled")
        return found

    def refuse_the_rest(self) -> None:
        """Note each key that was not read and may change results, and each that is unknown."""
        for key, value in _leaves(self.raw, ""):
            if key in self.read or key in IGNORED or value == "auto":
                continue
            if key in INERT:
                allowed, advice = INERT[key]
                if not any(value is a or (value == a and not isinstance(a, bool)) for a in allowed):
                    self.problem(key, value, advice)
            elif key in REFUSED:
                off = isinstance(value, dict) and value.get("enabled") is False
                if _asks(value) and not off:
                    self.problem(key, value, f"no counterpart in Config: {REFUSED[key]}")
            elif key in SECTIONS:
                if value is not None:
                    self.problem(key, value, "must be a JSON object, such as {...}")
            else:
                known = [*self.read, *IGNORED, *INERT, *REFUSED, *SECTIONS]
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
        if isinstance(value, dict) and path in SECTIONS:
            yield from _leaves(value, path)
        else:
            yield path, value
