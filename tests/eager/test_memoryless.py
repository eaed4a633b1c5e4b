"""A parameter without memory gives its values, or says that it has none; it ends no process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.eager.lazy import LazyParameter
from fzero.eager.memoryless import METHODS
from fzero.eager.owned import become_former
from tests.eager.test_lazy import Brought

READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.cpu().numpy(),
    "__array__": lambda x: np.asarray(x),
    "np.array": lambda x: np.array(x, dtype="float32"),
    "__format__": lambda x: f"{x[0, 1]:.3f} {x.mean():.3f}",
    "is_shared": lambda x: x.is_shared(),
}
TAKES: dict[str, Callable[[Tensor], Any]] = {
    "untyped_storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (2, 2), (2, 1)),
    "_typed_storage": lambda x: x._typed_storage()[0],
    "storage": lambda x: x.storage()[0],
    "share_memory_": lambda x: x.share_memory_(),
    "__dlpack__": lambda x: torch.from_dlpack(x).sum(),
    "apply_": lambda x: x.apply_(lambda value: value + 1),  # pyright: ignore
    "map_": lambda x: x.map_(torch.ones(4, 6), lambda a, b: a + b),  # pyright: ignore
    "map2_": lambda x: x.map2_(x, x, lambda a, b, c: a),  # pyright: ignore
}


def lazies() -> dict[str, tuple[Tensor, Tensor]]:
    """What a user may hold, and the values that it stands for."""
    source = Brought(torch.arange(24.0).view(4, 6))
    lazy = LazyParameter(source, 0)
    former = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
    become_former(former, lazy)
    return {
        "parameter": (lazy, source.value),
        "view": (lazy.detach(), source.value),
        "variable of before": (former, source.value),
    }


def test_each_method_has_a_case() -> None:
    known = {*READS, *TAKES, "_none"}
    assert METHODS.keys() <= known


@pytest.mark.parametrize("held", lazies())
@pytest.mark.parametrize("name", READS)
def test_what_reads_has_the_values(name: str, held: str) -> None:
    x, values = lazies()[held]
    here, there = READS[name](x), READS[name](values)
    assert np.array_equal(here, there) if isinstance(there, np.ndarray) else here == there


@pytest.mark.parametrize("held", lazies())
def test_an_array_cant_be_written(held: str) -> None:
    array = lazies()[held][0].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0


@pytest.mark.parametrize("held", lazies())
@pytest.mark.parametrize("name", TAKES)
def test_what_takes_memory_is_refused_by_name(name: str, held: str) -> None:
    with pytest.raises(fzero.FzeroError, match="'w' is sharded and has no memory of its own"):
        TAKES[name](lazies()[held][0])


def test_a_module_isnt_shared_between_processes() -> None:
    module = nn.Linear(3, 2)
    fzero.Engine(module, fzero.optim.sgd(0.1), fzero.Config(stage=3, precision="bf16"))
    with pytest.raises(fzero.FzeroError, match="'weight' is sharded"):
        module.share_memory()
