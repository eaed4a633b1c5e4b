"""Train and save with the real DeepSpeed on the CPU, one rank under torchrun.

    real_deepspeed.py OUT STAGE

OUT/ds is the checkpoint that DeepSpeed saves, OUT/universal what its ds_to_universal makes of it,
OUT/values.pt the full parameters, moments and the count that rank 0 saw before saving.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["DS_ACCELERATOR"] = "cpu"  # before it is imported

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main as to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

# else init_distributed compiles a shared-memory all-reduce, which takes minutes and is not used
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS = 3


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def main(out: Path, stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": False},
    }
    model = module()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=config)
    rank = torch.distributed.get_rank()
    for step in range(STEPS):
        x = torch.full((4, 5), 0.1 + rank + step, dtype=torch.bfloat16)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    values = {}
    for name, p in engine.module.named_parameters():
        values[f"fp32 {name}"] = safe_get_full_fp32_param(p).clone()
        for state in ("exp_avg", "exp_avg_sq"):
            values[f"{state} {name}"] = safe_get_full_optimizer_state(p, state).clone()
    engine.save_checkpoint(str(out / "ds"), tag="tag")
    torch.distributed.barrier()
    if rank == 0:
        torch.save(values, out / "values.pt")
        args = SimpleNamespace(
            input_folder=str(out / "ds" / "tag"),
            output_folder=str(out / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        to_universal(args)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
