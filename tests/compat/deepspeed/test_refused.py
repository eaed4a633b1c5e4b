"""Names of DeepSpeed without a counterpart."""

import importlib
from types import ModuleType

import pytest

import fzero.compat.deepspeed as deepspeed
from fzero.compat.deepspeed import refused
from fzero.errors import FzeroError

CASES = [
    (module, name)
    for module, table in (
        (deepspeed, refused.NAMES),
        (deepspeed.zero, refused.ZERO),
        (deepspeed.utils, refused.UTILS),
        (deepspeed.ops, refused.OPTIMIZERS),
    )
    for name in table
]


@pytest.mark.parametrize(("module", "name"), CASES, ids=str)
def test_a_name_without_a_counterpart_says_so(module: ModuleType, name: str) -> None:
    with pytest.raises(FzeroError, match=rf"deepspeed\.(\w+\.)?{name} has no counterpart"):
        getattr(module, name)


def test_a_name_that_deepspeed_has_not_is_unknown() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = deepspeed.no_such_name


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("pipe", "pipeline"),
        ("moe.layer", "experts"),
        ("profiling.flops_profiler", "Program.cost"),
        ("monitor.monitor", "log them yourself"),
        ("runtime.pipe.engine", "pipeline"),
        ("runtime.fp16.onebit.adam", "compressed"),
        ("utils.timer", "profiler"),
        ("no_such_module", "docs/deepspeed.md"),
    ],
)
def test_a_module_without_a_counterpart_says_so_when_it_is_imported(
    module: str, instead: str
) -> None:
    name = rf"the module deepspeed\.{module.split('.')[0]}.* has no counterpart.*{instead}"
    with pytest.raises(FzeroError, match=name):
        importlib.import_module(f"fzero.compat.deepspeed.{module}")
    with pytest.raises(ImportError):  # as scripts expect that ask what there is
        importlib.import_module(f"fzero.compat.deepspeed.{module}")


def test_modules_of_others_are_not_looked_at() -> None:
    deepspeed.refused.watch_imports(deepspeed.__name__)  # a second time
    with pytest.raises(ModuleNotFoundError) as found:
        importlib.import_module("no_such_package")
    assert not isinstance(found.value, FzeroError)
