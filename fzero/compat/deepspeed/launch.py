"""`initialize`, and the command line of scripts."""

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fzero.compat.deepspeed import comm
from fzero.compat.deepspeed.engine import DeepSpeedEngine, Given
from fzero.compat.deepspeed.owners import owner_of
from fzero.compat.deepspeed.settings import settings
from fzero.errors import ConfigError


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Take a model over, as DeepSpeed's `initialize` does.

    Args:
        args: has `deepspeed_config`, the path of the configuration, if `config` is not given.
        model: any module.
        optimizer: of `torch.optim` or `deepspeed.ops`, made of the model's parameters; or a
            function that makes one of parameters or groups; or one of `fzero.optim`. It counts
            instead of the configuration's.
        model_parameters: what is trained: parameters, or groups of them as dicts. None: all that
            have `requires_grad`.
        training_data: a data set; each rank loads its share.
        lr_scheduler: any object with `step()`, or a function that makes one of an optimizer. It
            counts instead of the configuration's.
        distributed_port, dist_init_required: see `init_distributed`.
        mpu, mesh_param: refused: there is no model parallelism.
        collate_fn: of the loader.
        config, config_params: the configuration, or the path of its file.

    Returns:
        The engine, its optimizer, loader and scheduler; those that there aren't are None.

    Raises:
        ConfigError: what was given can't be honoured.

    Examples:
        >>> import torch
        >>> config = {
        ...     "train_micro_batch_size_per_gpu": 2,
        ...     "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        ... }
        >>> engine, optimizer, _, _ = initialize(
        ...     model=nn.Linear(3, 1), config=config, dist_init_required=False
        ... )
        >>> loss = engine(torch.ones(2, 3)).square().mean()
        >>> _ = engine.backward(loss)
        >>> engine.step()
        >>> engine.global_steps, optimizer.param_groups[0]["lr"]
        (1, 0.1)
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"deepspeed.initialize(model={type(model).__name__}): must be a torch.nn.Module."
        )
    params = list(model.parameters())
    if params and all(owner_of(param) is not None for param in params):
        raise ConfigError(
            "deepspeed.initialize: the model belongs to an engine that initialize has returned "
            "before. Call engine.destroy() of that one on every rank, which gives the model back, "
            "or build another model; and make optimizers and model_parameters of it after that."
        )
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ConfigError(
                f"deepspeed.initialize({name}=...) has no counterpart: there is no model "
                "parallelism. Shard the model at stage 3."
            )
    config = config if config is not None else config_params
    asked = getattr(args, "deepspeed_config", None)
    if config is not None and asked is not None:
        raise ConfigError(
            "deepspeed.initialize was given two configurations, config and args.deepspeed_config. "
            "Leave one of them out."
        )
    config = config if config is not None else asked
    if config is None:
        raise ConfigError(
            "deepspeed.initialize needs a configuration: config={...} or --deepspeed_config FILE."
        )
    comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    given = Given(optimizer, model_parameters, training_data, lr_scheduler, collate_fn)
    engine = DeepSpeedEngine(model, settings(config, comm.get_world_size()), given)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser.

    >>> parser = add_config_arguments(argparse.ArgumentParser())
    >>> parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    Namespace(deepspeed=True, deepspeed_config='ds.json')
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration")
    group.add_argument("--deepspeed", action="store_true", help="of no effect: a flag for scripts")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON file")
    return parser
