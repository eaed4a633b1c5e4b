"""Names of DeepSpeed without a counterpart."""

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
