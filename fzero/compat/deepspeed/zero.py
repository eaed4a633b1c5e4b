"""`deepspeed.zero`: building a model, and parameters that are there in full for a while."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fzero.compat.deepspeed import comm
from fzero.compat.deepspeed.owners import owner_of
from fzero.compat.deepspeed.refused import ZERO, missing
from fzero.compat.deepspeed.settings import settings
from fzero.engine import Engine


class Init(contextlib.AbstractContextManager[None]):
    """A model is built inside, in the dtype that it will compute in.

    It is whole on each rank until `initialize` splits it. DeepSpeed splits each parameter as it is
    made; where no rank can hold the model, build it by a function: `fzero.Engine(build, opt, cfg)`.

    Args:
        module: built already: nothing happens to it.
        config_dict_or_path: the configuration, which says the dtype; `config` is its other name.
        dtype: counts instead of the configuration's.
        enabled: False: nothing happens.
        ignored: DeepSpeed's other arguments, of no effect.

    Examples:
        >>> with Init(config_dict_or_path={"bf16": {"enabled": True}}):
        ...     model = nn.Linear(2, 2)
        >>> model.weight.dtype
        torch.bfloat16
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
        **ignored: Any,
    ) -> None:
        source = config if config_dict_or_path is None else config_dict_or_path
        self.dtype = dtype if enabled else None
        if enabled and dtype is None and source is not None:
            self.dtype = settings(source, comm.get_world_size()).config.dtypes.param
        self.block = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self.dtype is not None:
            # random values drawn in 16 bits are others than those that are rounded afterwards
            self.block.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)

    def __exit__(self, *raised: object) -> None:
        self.block.close()


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
