"""What DeepSpeed has and this library has not: each name with what to do instead."""

import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

from fzero.errors import FzeroError

_PIPELINE = "there is no pipeline parallelism: shard the whole model at stage 3"
_INFERENCE = "there is no inference engine: evaluate under torch.no_grad(), at any stage"
_MOE = "there are no expert-parallel layers: experts are modules of the model, sharded at stage 3"
_MUON = "initialize(optimizer=fzero.optim.muon(...)) has it: matrices to muon, the rest to adamw"
_ONEBIT = "gradients are not compressed"

NAMES: Mapping[str, str] = {
    "DeepSpeedHybridEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "DeepSpeedTransformerConfig": "write the layer in PyTorch: scaled_dot_product_attention",
    "DeepSpeedTransformerLayer": "write the layer in PyTorch: scaled_dot_product_attention",
    "InferenceEngine": _INFERENCE,
    "OnDevice": "build the module by a function: fzero.Engine(lambda: Model(), ...)",
    "PipelineEngine": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "autotuning": "see fzero.simulate and python -m fzero.simulate --sweep",
    "compression": "compress the model itself",
    "default_inference_config": _INFERENCE,
    "inference": _INFERENCE,
    "init_inference": _INFERENCE,
    "launcher": "start ranks with torchrun",
    "module_inject": "change the model itself",
    "moe": _MOE,
    "monitor": "read engine.get_global_grad_norm(), engine.get_lr() and log them yourself",
    "nebula": "see fzero.checkpoint",
    "pipe": _PIPELINE,
    "profiling": "see Program.cost() and torch.profiler",
    "replace_transformer_layer": _INFERENCE,
    "sequence": "there is no sequence parallelism",
    "tp_model_init": "there is no tensor parallelism: shard the model at stage 3",
}
"""Of the package itself."""

ENGINE: Mapping[str, str] = {
    "compile": "compile the model, or its blocks, with torch.compile before initialize",
    "eval_batch": _PIPELINE,
    "flops_profiler": "see torch.utils.flop_counter",
    "get_pipeline_parallel_rank": _PIPELINE,
    "get_sequence_parallel_group": "there is no sequence parallelism",
    "load_moe_state_dict": _MOE,
    "offload_states": 'set "offload_optimizer": {"device": "cpu"} in the configuration',
    "random_ltd_initialize": "choose tokens in the model itself",
    "register_compile_pass": "see Config.passes of fzero.make_train_step",
    "reload_states": 'set "offload_optimizer": {"device": "cpu"} in the configuration',
    "set_custom_curriculum_learning_schedule": "choose the batches yourself",
    "set_data_post_process_func": "process the batches yourself",
    "sparse_allreduce": "gradients of embeddings are dense here",
    "train_batch": _PIPELINE,
}
"""Of `DeepSpeedEngine`."""

ZERO: Mapping[str, str] = {
    "MiCS_Init": "pass a mesh of two axes to fzero.Config(mesh=...): hybrid sharding",
    "TiledLinear": "there are no tiles: a large layer is sharded, and gathered by itself",
    "TiledLinearReturnBias": "there are no tiles: a large layer is sharded, and gathered by itself",
    "ContiguousMemoryAllocator": "memory is torch's",
    "ZeroParamType": "a parameter is sharded or not; engine.state tells how",
}
"""Of `deepspeed.zero`."""

UTILS: Mapping[str, str] = {
    "OnDevice": NAMES["OnDevice"],
    "groups": "there is one group of ranks, torch.distributed's own",
    "get_full_hp_param": "call safe_get_full_fp32_param",
    "get_full_hp_grad": "call safe_get_full_grad",
}
"""Of `deepspeed.utils`."""

OPTIMIZERS: Mapping[str, str] = {
    "DeepSpeedCPUAdagrad": "there is no Adagrad: use AdamW, or an optimizer of fzero.optim",
    "Muon": _MUON,
    "MuonWithAuxAdam": _MUON,
    "OneBitAdam": _ONEBIT,
    "OneBitLamb": _ONEBIT,
    "ZeroOneAdam": _ONEBIT,
}
"""Of `deepspeed.ops`."""


MODULES: Mapping[str, str] = {
    "ops.sparse_attention": "use sparse attention in the model",
    "ops.transformer": NAMES["DeepSpeedTransformerLayer"],
    "runtime.activation_checkpointing": "deepspeed.checkpointing is here",
    "runtime.data_pipeline": "choose the batches yourself",
    "runtime.fp16": f'set "fp16" in the configuration; {_ONEBIT}',
    "runtime.pipe": _PIPELINE,
    "runtime.utils": "see torch.cuda.memory_summary() and Config(clip_norm=...)",
    "utils.groups": UTILS["groups"],
    "utils.nvtx": "see torch.cuda.nvtx.range",
    "utils.timer": "see torch.profiler",
}
"""Below the package, and not its own names."""


class AbsentModuleError(FzeroError, ModuleNotFoundError):
    """An import of a module of DeepSpeed's that is not here."""


class Absent(MetaPathFinder):
    """Asked last for a module below the package: says what there is in its place.

    Args:
        package: whose modules these are.
    """

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """None for modules of others.

        Raises:
            AbsentModuleError: for all of the package's: nobody before has found it.
        """
        package, _, name = fullname.partition(f"{self.package}.")
        if package or not name:
            return
        table = {**NAMES, **MODULES}
        parts = name.split(".")
        around = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        instead = next((f": {table[module]}" for module in around if module in table), "")
        raise AbsentModuleError(
            f"the module deepspeed.{name} has no counterpart in fzero{instead}. "
            "docs/deepspeed.md lists what has one.",
            name=fullname,
        )


def watch_imports(package: str) -> None:
    """Have imports of modules that a package has not refused in words, with what to do instead."""
    if not any(isinstance(x, Absent) and x.package == package for x in sys.meta_path):
        sys.meta_path.append(Absent(package))


def refuse(name: str, instead: str) -> NoReturn:
    """Raise: DeepSpeed's `name` has no counterpart.

    Raises:
        FzeroError: always.
    """
    raise FzeroError(
        f"deepspeed.{name} has no counterpart in fzero: {instead}. "
        "docs/deepspeed.md lists what has one."
    )


def missing(module: str, table: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: names of the table are refused, others unknown.

    Args:
        module: as DeepSpeed calls it, after "deepspeed."; "" for the package.
        table: names with what to do instead.
    """

    def __getattr__(name: str) -> Any:
        full = f"{module}.{name}" if module else name
        if name in table:
            refuse(full, table[name])
        raise AttributeError(f"fzero.compat.deepspeed knows no deepspeed.{full}")

    return __getattr__
