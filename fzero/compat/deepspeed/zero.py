"""`deepspeed.zero`: building a model, and parameters that are there in full for a while."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fzero.compat.deepspeed import comm
from fzero.compat.deepspeed.owners import owner_of
from fzero.compat.deepspeed.refused import ZERO, missing
from fzero.engine import Engine


class Init(contextlib.AbstractContextManager[None]):
    """A model is built inside. It is whole on each rank until `initialize` splits it.

    DeepSpeed splits each parameter as it is made. Where no rank can hold the model, build it by a
    function: `fzero.Engine(lambda: Model(), ...)`.

    Args:
        enabled: of no effect, as are DeepSpeed's other arguments: parameters take their dtype and
            their place in `initialize`.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self.enabled = enabled

    def __exit__(self, *raised: object) -> None:
        """Nothing is undone."""


class GatheredParameters(contextlib.AbstractContextManager[None]):
    """Parameters are there in full; see `fzero.Engine.gathered`.

    Before `initialize` they are so anyhow; then `modifier_rank`'s values go to all ranks at the
    end of the block, as they do later.

    Args:
        params: one, or several.
        modifier_rank: the rank whose writes count; None: nobody writes.
        fwd_module: of no effect: parameters are gathered by what reads them.
        enabled: False: nothing happens.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self.params = given if enabled else []
        self.modifier_rank = modifier_rank
        self.block = contextlib.ExitStack()

    def __enter__(self) -> None:
        names: dict[int, tuple[Engine, list[str]]] = {}
        for param in self.params:
            if (owner := owner_of(param)) is not None:
                engine, name = owner
                names.setdefault(id(engine), (engine, []))[1].append(name)
        for engine, mine in names.values():
            self.block.enter_context(engine.gathered(mine, self.modifier_rank))

    def __exit__(self, *raised: Any) -> Any:
        free = [param for param in self.params if owner_of(param) is None]
        out = self.block.__exit__(*raised)
        if raised[0] is None and self.modifier_rank is not None and comm.get_world_size() > 1:
            for param in free:
                comm.broadcast(param.data, self.modifier_rank)
        return out


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing: a parameter is gathered by whatever reads it, in this module or another."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing; see `register_external_parameter`."""


__getattr__ = missing("zero", ZERO)
