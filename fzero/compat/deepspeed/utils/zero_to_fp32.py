"""`deepspeed.utils.zero_to_fp32`: full float32 weights of a checkpoint, without ranks."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fzero.checkpoint.foreign.safetensors import export_of_one_rank
from fzero.checkpoint.ranks import Ranks
from fzero.compat.deepspeed import saving
from fzero.compat.deepspeed.owners import owner_of
from fzero.errors import CheckpointError


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The module's `state_dict` in a checkpoint of `save_checkpoint`, floating ones in float32.

    Args:
        checkpoint_dir: what was given to `save_checkpoint`.
        tag: of the checkpoint; None: the latest.
        exclude_frozen_parameters: leave out what had no `requires_grad` when it was saved.
        lazy_mode: of no effect.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(checkpoint_dir)
    tag = tag or saving.latest_tag(folder)
    if tag is None:
        raise CheckpointError(f"{folder} has no file 'latest'. Pass a tag.")
    found = saving.module_of(saving.find(folder, tag), frozen=not exclude_frozen_parameters)
    return saving.cast(found, dict.fromkeys(found, torch.float32))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the weights into a module; it is returned.

    A plain module goes to the host. One that `initialize` has taken stays where it is, and its
    engine takes the weights, parameters and masters: every rank must call it then.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    owners = [owner_of(param) for param in model.parameters()]
    if owners and owners[0] is not None:
        owners[0][0].load_state_dict(weights, strict=False)
        return model
    model = model.cpu()
    model.load_state_dict(weights, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: Any = None,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights to OUTPUT_DIR/pytorch_model.bin, or as safetensors; one rank is enough.

    Args:
        max_shard_size: of no effect on pytorch_model.bin, which is one file.
        safe_serialization: write safetensors, as `fzero.checkpoint.export_safetensors` does.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters
    )
    if safe_serialization:
        export_of_one_rank(Path(output_dir), weights)
    else:
        saving.write_tensors(Path(output_dir) / "pytorch_model.bin", weights, Ranks.alone())
