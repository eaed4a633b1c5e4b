"""Stochastic rounding: to a neighbour, without a bias, from bits that depend on no sharding."""

import hashlib
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fzero.layout import LeafLayout, plan_layout
from fzero.numerics.rounding import random_bits, stochastically

ALL_BITS = torch.arange(2**16, dtype=torch.int32)
# below the largest bfloat16, where every float32 has a bfloat16 on both sides
floats = st.floats(-(2.0**126), 2.0**126, width=32)


@settings(max_examples=50)
@given(value=floats)
def test_the_mean_over_all_bits_is_the_number_itself(value: float) -> None:
    rounded = stochastically(torch.full((2**16,), value), ALL_BITS)
    assert rounded.double().mean().item() == value


@settings(max_examples=50)
@given(value=floats, bits=st.integers(-(2**31), 2**31 - 1))
def test_rounds_to_a_neighbour(value: float, bits: int) -> None:
    x = torch.tensor(value)
    rounded = stochastically(x, torch.tensor(bits, dtype=torch.int32))
    down = stochastically(x, torch.tensor(0, dtype=torch.int32))
    up = stochastically(x, torch.tensor(0xFFFF, dtype=torch.int32))
    low, high = sorted((down.float().item(), up.float().item()))
    assert low <= value <= high
    assert rounded.item() in (low, high)
    if value == x.bfloat16().float().item():
        assert low == high == value


def test_what_is_not_finite_stays() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    payload = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    for bits in (0, 0xFFFF, -1):
        drawn = torch.tensor(bits, dtype=torch.int32)
        rounded = stochastically(x, drawn.expand(5))
        assert torch.equal(rounded.isnan(), x.isnan())
        assert torch.equal(rounded[x == x].float(), x[x == x])
        assert stochastically(payload, drawn.expand(2)).isnan().all()


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    world=st.integers(1, 5),
    step=st.integers(0, 2**40),
)
def test_bits_are_those_of_the_whole_leaf(shape, world: int, step: int) -> None:
    (leaf,) = plan_layout(["w"], [torch.empty(shape)], world)
    when = torch.tensor(step)
    whole = random_bits(3, when, leaf, torch.empty(shape), None)
    shards = [
        random_bits(3, when, leaf, torch.empty(leaf.shard_shape(rank)), rank)
        for rank in range(world)
    ]
    assert torch.equal(leaf.join(shards), whole)


def _in_python(seed: int, step: int, name: str, place: int) -> int:
    """The bits of one element, by the definition."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    first, second = struct.unpack("<II", digest)
    key = mixed(mixed(step ^ first) ^ second)
    return mixed((mixed(place ^ key) + key) % 2**32)


@pytest.mark.parametrize("step", [0, 12345])
def test_bits_are_the_hash_that_is_documented(step: int) -> None:
    leaf = LeafLayout("a.b", (3, 5), torch.bfloat16)
    bits = random_bits(7, torch.tensor(step), leaf, torch.empty(3, 5), None).flatten().tolist()
    assert [b % 2**32 for b in bits] == [_in_python(7, step, "a.b", i) for i in range(15)]


def _bits(seed: int = 0, step: int = 0, name: str = "w") -> Tensor:
    leaf = LeafLayout(name, (256, 256), torch.bfloat16)
    return random_bits(seed, torch.tensor(step), leaf, torch.empty(256, 256), None)


@pytest.mark.parametrize(
    "other", [{}, {"seed": 1}, {"step": 1}, {"name": "v"}], ids=["same", "seed", "step", "leaf"]
)
def test_bits_look_random_and_differ_by_seed_step_and_leaf(other) -> None:
    # each of the low 16 bits, and its agreement with a neighbour's: 65536 coins, within 5 sigma
    bits, there = _bits(**other), _bits()
    neighbours = bits ^ bits.roll(1, 1)
    for shift in range(16):
        for coins in (bits, neighbours, bits ^ there) if other else (bits, neighbours):
            heads = ((coins >> shift) & 1).sum().item()
            assert abs(heads - 2**15) < 5 * 2**7
