"""Collectives under compute: the same values, one order on all ranks, never more than the cap."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fzero
from benchmarks.models import Size, batch_of, fzero_step
from fzero.distributed.buckets import Bucket
from fzero.errors import ConfigError
from fzero.passes import overlap
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.cost import cost
from fzero.program.graph import UPDATE
from fzero.program.hardware import CPU, Hardware
from fzero.program.memory import is_wait
from fzero.program.passes.overlap import Overlap
from fzero.program.passes.rewrite import is_cheap
from fzero.program.pipeline import optimise
from tests.program.programs import Recorded
from tests.ranks import fake_ranks, run_ranks

WIDTHS = st.lists(st.integers(1, 40), min_size=2, max_size=7)
RATES = itertools.product((0, 1e-3), (1e6, 1e9, 1e12))
LINKS = [replace(CPU, link_latency=a, link_bandwidth=b) for a, b in RATES]
GPT = Size(vocabulary=64, width=64, layers=3, heads=4, tokens=32, rows=2)


def built(recorded: Recorded, bucket: int, passes: Any = (), prefetch: int = 0) -> Program:
    return optimise(
        recorded.program,
        reshard_after_forward=True,
        bucket_bytes=bucket,
        prefetch=prefetch,
        exact=True,
        passes=[("overlap", fn) for fn in passes],
    )


def order(program: Program) -> list[str]:
    """The collectives in the order in which they are launched."""
    return [repr(n.meta["bucket"]) for n in program.graph.nodes if "bucket" in n.meta]


def check_cap(program: Program, cap: int) -> None:
    """Count what is on its way at each launch, independently of how places were found."""
    flying: dict[bool, dict[Any, int]] = {True: {}, False: {}}
    nodes = list(program.graph.nodes)
    for i, node in enumerate(nodes):
        if "bucket" in node.meta and node.meta["phase"] != UPDATE:
            bucket = node.meta["bucket"]
            mine = flying[bucket.gathers]
            mine[node] = bucket.nbytes
            if sum(mine.values()) > cap:
                # what the cap has no room for is alone, and awaited at once
                assert list(mine) == [node]
                following = [n for n in nodes[i + 1 :] if not _fills(n) and not is_cheap(n)]
                assert is_wait(following[0])
                assert following[0].args[0] is node
        if is_wait(node):
            for mine in flying.values():
                mine.pop(node.args[0], None)


def _fills(node: Any) -> bool:
    return "bucket" in node.meta or any(isinstance(x, Bucket) for x in node.args)


@settings(max_examples=4)
@given(
    widths=WIDTHS,
    bucket=st.sampled_from([200, 2000, 20000]),
    cap=st.sampled_from([0, 500, 3000, 10**6]),
    link=st.sampled_from(LINKS),
    world=st.sampled_from([2, 3]),
    prefetch=st.sampled_from([0, 1]),
)
@example([12, 40, 40, 40, 40, 40], 2000, 3000, LINKS[3], 2, 0)
def test_no_more_than_the_cap_is_on_its_way_and_all_ranks_have_one_order(
    widths: list[int], bucket: int, cap: int, link: Hardware, world: int, prefetch: int
) -> None:
    orders = []
    for rank in range(world):
        with fake_ranks(world, rank):
            recorded = Recorded(widths)
            one = overlap(cap / 2**20, link)
            program = built(recorded, bucket, [one], prefetch)
            program.verify()
            before = built(recorded, bucket, (), prefetch)
        check_cap(program, cap)
        assert sorted(order(program)) == sorted(order(before))
        for kind in ("all_gather", "reduce_scatter"):
            mine, theirs = ([x for x in order(p) if x.startswith(kind)] for p in (program, before))
            assert mine == theirs
        orders.append(order(program))
    assert all(one == orders[0] for one in orders)


def _same_results(cases: list[tuple[list[int], int, int, int]]) -> bool:
    for widths, bucket, cap, link in cases:
        recorded = Recorded(widths)
        programs = [
            built(recorded, bucket),
            built(recorded, bucket, [overlap(cap / 2**20, LINKS[link])]),
        ]
        wanted, found = (compile_program(program)(*recorded.inputs) for program in programs)
        if not all(map(torch.equal, wanted, found)):
            return False
    return True


def test_results_are_the_same_bit_for_bit() -> None:
    cases = [
        ([7, 30, 5, 9], 500, 10**6, 0),
        ([7, 30, 5, 9], 500, 3000, 4),
        ([12, 12, 12, 12, 12, 3], 700, 1500, 3),
        ([40, 3, 40, 3, 40], 2000, 0, 5),
    ]
    assert run_ranks(2, _same_results, cases) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_waits_less_by_estimate_than_with_any_fixed_distance(stage: int) -> None:
    # a link on which a layer's leaves take about as long as it computes
    hardware = replace(CPU, link_bandwidth=3e8, link_latency=1e-6)

    def waits(**config: Any) -> float:
        cfg = fzero.Config(stage=stage, bucket_mb=0.05, clip_norm=None, **config)
        step = fzero_step(GPT, batch_of(GPT, 2), fzero.optim.sgd(0.1), cfg)
        first = next(step.lower().parts())
        return cost([first], hardware).exposed

    with fake_ranks(4):
        found = waits(passes=[overlap(1, hardware)], prefetch=0)
        assert found < 0.9 * waits(prefetch=0)
        assert found <= 1.02 * min(waits(prefetch=n) for n in (1, 2))


def test_places_allow_for_what_shares_the_link() -> None:
    # gathers and reductions fit under what computes, but not if each takes the link for its own
    hardware = replace(CPU, link_bandwidth=6e8, link_latency=1e-6)
    with fake_ranks(4):
        cfg = fzero.Config(stage=3, bucket_mb=0.05, clip_norm=None, prefetch=0)
        program = next(fzero_step(GPT, batch_of(GPT, 2), fzero.optim.sgd(0.1), cfg).lower().parts())
        done = Overlap(1, hardware)
        alone, _ = done._placed(program, {})  # pyright: ignore[reportPrivateUsage]
    found = cost([done(program)], hardware)
    assert found.exposed < 0.9 * cost([alone], hardware).exposed
    assert found.seconds < 0.98 * cost([alone], hardware).seconds


def test_what_is_no_cap_is_refused() -> None:
    for cap in (-1, float("nan"), True, "1GB"):
        with pytest.raises(ConfigError, match="cap_mb"):
            overlap(cap)  # pyright: ignore
    assert repr(Overlap(1, CPU)) == repr(Overlap(1, CPU))
