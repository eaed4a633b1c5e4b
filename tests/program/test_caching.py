"""The caching allocator's rules, and what they make of a Program's lifetimes."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.program.caching import CachingAllocator, replay, reserved_bytes
from fzero.program.memory import constant_bytes

MIB = 2**20
SIZES = st.sampled_from([1, 512, 700, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 33 * MIB])


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (1, 2 * MIB),  # small ones share segments of 2 MiB,
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),  # larger ones of 20,
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # and large ones have one of their own, of whole 2 MiB
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_are_as_large_as_the_source_says(asked: int, reserved: int) -> None:
    allocator = CachingAllocator()
    block = allocator.take(asked)
    assert allocator.reserved == reserved
    assert allocator.allocated == block.size == -(-asked // 512) * 512


def test_a_gap_is_cut_unless_too_little_is_left_of_it() -> None:
    allocator = CachingAllocator()
    allocator.give(allocator.take(12 * MIB))
    assert allocator.take(11 * MIB).size == 12 * MIB  # a MiB is too little
    allocator = CachingAllocator()
    allocator.give(allocator.take(12 * MIB))
    assert allocator.take(11 * MIB - 512).size == 11 * MIB - 512
    assert allocator.take(MIB + 512).size == MIB + 512
    assert allocator.reserved == 12 * MIB


def test_the_smallest_gap_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, middle = allocator.take(40 * MIB), allocator.take(14 * MIB)
    allocator.give(large)
    allocator.give(middle)
    assert allocator.take(12 * MIB).start == middle.start
    assert allocator.take(40 * MIB).start == large.start
    assert allocator.reserved == 54 * MIB


@given(
    st.lists(st.one_of(SIZES, st.integers(0, 20).map(lambda i: -i - 1)), max_size=60), st.booleans()
)
def test_blocks_never_overlap_and_what_is_free_joins(moves: list[int], expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    used: list[Any] = []
    most = 0
    for move in moves:
        if move > 0:
            used.append(allocator.take(move))
            assert used[-1].size >= move
        elif used:
            allocator.give(used.pop(move % len(used)))
        spans = sorted((block.start, block.start + block.size) for block in used)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert allocator.allocated == sum(block.size for block in used) <= allocator.reserved
        most = max(most, allocator.allocated)
    assert allocator.most == most
    for block in used:
        allocator.give(block)
    left = [block for gaps in allocator.gaps.values() for _, _, block in gaps]
    assert sum(block.size for block in left) == allocator.reserved
    assert all(block.before is block.after is None for block in left)  # whole segments


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3},
        {"stage": 1, "accum_steps": 3},
        {"stage": 3, "accum_steps": 2, "precision": "bf16", "clip_norm": 1.0},
        {"stage": 0, "precision": "fp16"},
    ],
    ids=str,
)
def test_as_much_is_allocated_as_the_program_says(options: dict[str, Any]) -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
    apply, params = fzero.functionalize(module)
    report = fzero.simulate(
        lambda params, x: apply(params, x).square().mean(),
        fzero.optim.adamw(1e-3),
        fzero.Config(**options),
        params,
        torch.empty(96, 128),
        world_size=4,
    )
    assert report.program is not None
    parts = list(report.program.parts())
    allocator = CachingAllocator()
    replay(allocator, parts)
    blocks = sum(len(part.graph.nodes) + len(part.resident) for part in parts)
    assert report.peak_bytes <= allocator.most <= report.peak_bytes + 512 * blocks
    assert allocator.reserved == report.reserved_bytes == report.program.reserved_bytes()
    assert min(map(constant_bytes, parts)) <= allocator.most <= allocator.reserved


def test_state_on_the_host_is_not_reserved() -> None:
    def reserved(offload: Any) -> int:
        report = fzero.simulate(
            lambda params, x: (x @ params["w"]).square().mean(),
            fzero.optim.adamw(1e-3),
            fzero.Config(stage=3, offload=offload),
            {"w": torch.empty(4096, 4096)},
            torch.empty(8, 4096),
            world_size=2,
        )
        assert report.reserved_bytes is not None
        return report.reserved_bytes

    both = 2 * 4 * 4096 * 4096 // 2  # two moments, half of each
    assert reserved(None) - reserved("cpu") >= both


def test_what_is_left_of_a_step_serves_the_next() -> None:
    apply, params = fzero.functionalize(torch.nn.Linear(512, 512))
    step_fn = fzero.make_train_step(
        lambda params, x: apply(params, x).square().mean(), fzero.optim.adamw(1e-3)
    )
    program = step_fn.lower(*step_fn.init(params), torch.empty(64, 512))
    parts = list(program.parts())
    found = []
    for steps in (2, 5):
        allocator = CachingAllocator()
        replay(allocator, parts, steps=steps)
        found.append(allocator.reserved)
    assert found[0] == found[1] == reserved_bytes(parts)
