"""What a user keeps beside a checkpoint: given back as it was, or refused by its place."""

import dataclasses
import json
import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.checkpoint import client_state, save
from fzero.checkpoint.client import decode, encode
from tests.ranks import run_ranks

_PLAIN = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=8)),
)
_KEYS = st.one_of(st.integers(), st.text(), st.booleans(), st.tuples(st.integers(), st.text()))


@given(
    st.recursive(
        _PLAIN,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(_KEYS, inner, max_size=4),
        ),
        max_leaves=12,
    )
)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    _same(decode(json.loads(json.dumps(encode(value)))), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 2)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.rand(shape) * 5).to(dtype)
    _same(decode(encode(x)), x)
    _same(decode(encode(x.mT if x.dim() > 1 else x)), x.mT if x.dim() > 1 else x)
    _same(decode(encode(x.conj())), x.conj().resolve_conj())


def test_generators_are_put_back(tmp_path: Path) -> None:
    kept = {"python": random.getstate(), "torch": torch.get_rng_state(), "epoch": 3}
    save(tmp_path, {"w": torch.ones(2)}, client_state=kept, asynchronous=True)
    drawn = random.random(), torch.rand(())
    found = client_state(tmp_path)
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    assert (random.random(), torch.rand(())) == drawn
    params, _ = fzero.checkpoint.load(tmp_path, {"w": torch.zeros(2)})  # nothing is in its way
    assert params["w"].sum() == 2
    save(tmp_path, {"w": torch.ones(2)}, step=1)
    assert client_state(tmp_path) is None


@dataclasses.dataclass
class Thing:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, Thing()]}, r"client_state\['a'\]\[1\] is a .*Thing"),
        (np.float64(0.5), r"client_state is a numpy\.float64"),
        ({"a": np.zeros(2)}, r"numpy\.ndarray.*torch\.from_numpy"),
        (OrderedDict(a=1), r"OrderedDict"),
        ({1, 2}, "set"),
        ({math.nan: 1}, "a key is"),
        ({(1, Thing): 1}, "a key is"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (10**2000, "int"),
        (torch.zeros(2**24 + 1, dtype=torch.uint8), "at most 16777216 bytes"),
    ],
)
def test_what_would_need_code_is_refused_by_its_place(
    value: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(fzero.CheckpointError, match=said):
        save(tmp_path, {"w": torch.ones(2)}, client_state=value)
    assert fzero.checkpoint.latest(tmp_path) is None


def test_what_holds_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(fzero.CheckpointError, match="holds itself"):
        encode(ring)


@pytest.mark.parametrize("forged", [{"object": "os.system"}, {"tensor": ["float32", [9], ""]}, {}])
def test_what_nobody_wrote_is_refused(forged: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError)):
        decode(forged)


def _differently(run: Path) -> Any:
    rank = torch.distributed.get_rank()
    params = {"w": torch.ones(2)}
    with pytest.raises(
        fzero.CheckpointError, match=r"client_state\['rank'\]: rank 0: 0; rank 1: 1"
    ):
        save(run, params, client_state={"epoch": 1, "rank": rank})
    save(run, params, client_state={"epoch": 1})
    return client_state(run)


def test_ranks_keep_the_same(tmp_path: Path) -> None:
    assert run_ranks(2, _differently, tmp_path) == [{"epoch": 1}] * 2


def _same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(b, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        bits = [x.contiguous().flatten().view(torch.uint8) for x in (a, b)]
        assert torch.equal(*bits)
    elif isinstance(b, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _same(x, y)
    elif isinstance(b, dict):
        _same(list(a), list(b))
        _same(list(a.values()), list(b.values()))
    else:
        assert repr(a) == repr(b)  # nan, and the sign of zero
