"""What writing the example and the documentation brought to light."""

import pytest
import torch
from torch import nn

import fzero


def lazy_engine() -> fzero.Engine:
    """An engine whose module holds no parameters, on one rank."""
    cfg = fzero.Config(stage=3, precision="bf16")
    return fzero.Engine(nn.Linear(3, 2), fzero.optim.sgd(0.1), cfg)


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double])
def test_a_lazy_module_is_not_converted_behind_its_engines_back(convert) -> None:
    engine = lazy_engine()
    with pytest.raises(fzero.FzeroError, match=r"'weight' is sharded.*before the module gets"):
        convert(engine.module)
    assert engine.module.weight.dtype == torch.bfloat16
    engine(torch.ones(1, 3)).sum().backward()
    engine.step()


def test_a_conversion_to_what_a_lazy_module_is_already_does_nothing() -> None:
    engine = lazy_engine()
    before = engine.module.weight
    assert engine.module.to(torch.bfloat16).to("cpu").weight is before
