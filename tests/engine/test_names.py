"""Every name of a parameter finds it; one that there isn't is answered with those near it."""

import pytest
import torch

from fzero.engine.names import Names
from fzero.errors import ShardError
from fzero.layout import LeafLayout

LEAVES = [LeafLayout(name, (2,), torch.float32) for name in ("embed.weight", "out.bias")]
NAMES = Names(LEAVES, {"head.weight": "embed.weight"})


def test_all_names_of_a_tied_parameter_find_it() -> None:
    assert [NAMES.index("gathered", x) for x in ("embed.weight", "head.weight")] == [0, 0]
    assert NAMES.index("gathered", "out.bias") == 1


def test_what_was_asked_and_near_names_are_told() -> None:
    with pytest.raises(ShardError, match=r"full_grad\('out.bais'\).*Near ones: 'out.bias'"):
        NAMES.index("full_grad", "out.bais")
    with pytest.raises(ShardError, match=r"no parameter of that name\. Names are those of"):
        NAMES.index("full_grad", "?")
