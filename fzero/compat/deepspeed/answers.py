"""What a `DeepSpeedEngine` is asked: rates, norms, sizes of batches, kinds of numbers."""

from typing import Any

import torch
from torch import Tensor, nn

from fzero.compat.deepspeed.settings import Settings
from fzero.engine import Engine


class Answers(nn.Module):
    """Methods that tell, and change nothing.

    Attributes:
        settings: the configuration.
        inner: the `fzero.Engine`.
        optimizer: with `param_groups`, or None.
        global_rank: this rank.
        world_size: ranks.
    """

    settings: Settings
    inner: Engine
    optimizer: Any
    global_rank: int
    world_size: int
    _norm: Tensor | None

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each group."""
        groups = self.optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients before clipping, at the last update; None before one."""
        return None if self._norm is None else float(self._norm)

    def loss_scale(self) -> float:
        """The loss scale of now; 1 without one."""
        state = self.inner.state[1].loss_scale
        return 1.0 if state is None else float(state.scale)

    def dynamic_loss_scale(self) -> bool:
        """Whether it changes."""
        scaling = self.settings.config.scaling
        return scaling is not None and scaling.dynamic

    def train_micro_batch_size_per_gpu(self) -> Any:
        """Rows of a rank's micro-batch; None if the configuration does not say."""
        return self.settings.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self.settings.config.accum_steps

    def managed_gradient_accumulation(self) -> bool:
        """Whether updates come after that many; else each `step()` is one."""
        return self.settings.managed

    def train_batch_size(self) -> Any:
        """Rows per update, over all ranks."""
        micro = self.settings.micro_batch
        return micro and micro * self.gradient_accumulation_steps() * self.world_size

    def get_batch_info(self) -> tuple[Any, Any, int]:
        """Rows per update, per micro-batch, and micro-batches per update."""
        micro = self.settings.micro_batch
        return self.train_batch_size(), micro, self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        """The bound on the norm of gradients; 0: none."""
        return self.settings.config.clip_norm or 0.0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.settings.config.stage

    def zero_optimization(self) -> bool:
        """Whether something is sharded."""
        return self.settings.config.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether the model computes in float16."""
        return self.settings.config.dtypes.param == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.settings.config.dtypes.param == torch.bfloat16

    def optimizer_name(self) -> str | None:
        """Of the configuration's optimizer."""
        return self.settings.optimizer and self.settings.optimizer.type

    def scheduler_name(self) -> str | None:
        """Of the configuration's scheduler."""
        return self.settings.scheduler and self.settings.scheduler.type

    def get_data_parallel_rank(self) -> int:
        """This rank."""
        return self.global_rank

    def get_model_parallel_rank(self) -> int:
        """There is one."""
        return 0
