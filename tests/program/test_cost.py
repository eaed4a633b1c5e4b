"""FLOPs are torch's own count, bytes sent are the collectives', times follow from the hardware."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fzero
from fzero.distributed.buckets import GATHER, KINDS, Bucket
from fzero.distributed.ragged import is_supported
from fzero.program import Program
from fzero.program.cost import COMPUTE, cost, node_cost, spans
from fzero.program.graph import copy_graph, is_op
from fzero.program.hardware import CPU, Hardware
from fzero.program.links import Load
from fzero.program.pipeline import optimise
from tests.program.programs import Recorded
from tests.ranks import fake_ranks


class Attention(nn.Module):
    """Convolution, attention and products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


TOKENS = torch.arange(12).remainder(11).view(2, 6)


def lowered(world: int = 1, **options: Any) -> fzero.Program:
    apply, params = fzero.functionalize(Attention())
    cfg = fzero.Config(**{"stage": 3, "bucket_mb": 0.0002, **options})
    step_fn = fzero.make_train_step(apply, fzero.optim.adam(0.1), cfg)
    with fake_ranks(world):
        return step_fn.lower(*step_fn.init(params), TOKENS.repeat(cfg.accum_steps, 1))


@pytest.mark.parametrize("accum", [1, 3])
def test_flops_are_those_that_torch_counts(accum: int) -> None:
    torch.manual_seed(0)
    module = Attention()
    # with a kernel that the counter knows
    kernel = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, kernel:
        module(TOKENS).backward()
    cost = lowered(accum_steps=accum).cost()
    # the flash kernel computes the scores of backward once more: one product of five
    flash = 2 * 2 * 2 * 6 * 6 * 4 * 1
    assert cost.flops == accum * (counter.get_total_flops() + flash)
    assert cost.flops == sum(row.flops for row in cost.by_module())
    (conv,) = [row for row in cost.rows if (row.phase, row.module) == ("forward", "conv")]
    assert conv.flops == accum * 2 * 2 * 6 * 8 * 8 * 3
    assert conv.intensity == conv.flops / conv.bytes_moved > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_sent_are_the_collectives(stage: int) -> None:
    program = lowered(4, stage=stage, accum_steps=2)
    sent: dict[str, int] = {}
    for row in program.collectives():
        sent[row.kind] = sent.get(row.kind, 0) + row.wire_bytes * row.times
    assert program.cost().sent == sent
    assert sum(program.cost().by_module(1)[0].sent.values()) <= sum(sent.values())


def test_bytes_moved_are_what_an_operator_reads_and_writes() -> None:
    nodes = {
        name: next(n for n in lowered().graph.nodes if is_op(n, f"aten::{name}"))
        for name in ("embedding", "view", "addmm", "_scaled_dot_product_flash_attention_for_cpu")
    }
    moved = {name: node_cost(node, CPU).bytes_moved for name, node in nodes.items()}
    assert moved["view"] == 0
    assert moved["embedding"] == 2 * (2 * 6 * 8) * 4 + 12 * 8  # the rows that it looks up
    assert moved["addmm"] == (8 + 12 * 8 + 8 * 8 + 12 * 8) * 4  # the last layer
    update = lowered().next
    assert update is not None
    (adam,) = [n for n in update.graph.nodes if is_op(n, "aten::_fused_adam_")]
    leaves = sum(x.numel() for x in Attention().parameters()) * 4
    # reads four of each leaf, and its counts; writes back what it changes
    assert 7 * leaves <= node_cost(adam, CPU).bytes_moved <= 9 * leaves


@pytest.mark.skipif(not is_supported(), reason="flats want a torch whose DTensors can be ragged")
@pytest.mark.parametrize(("precision", "copies"), [(None, 0), ("bf16", 1)])
def test_updated_leaves_that_lie_in_their_flat_are_not_copied(precision: Any, copies: int) -> None:
    shape = 64, 63
    params = {"up": torch.zeros(shape), "down": torch.zeros(shape).t().contiguous()}
    cfg = fzero.Config(stage=2, precision=precision)
    with fake_ranks(2):
        step_fn = fzero.make_train_step(
            lambda p, x: (x @ p["up"] @ p["down"]).square().mean(), fzero.optim.sgd(0.1), cfg
        )
        update = step_fn.lower(*step_fn.init(params), torch.ones(4, 64)).next
    assert update is not None
    (pack,) = [n for n in update.graph.nodes if n.target is KINDS[GATHER].pack]
    # in bfloat16 they are made of float32 masters, elsewhere: half of two leaves, read and written
    assert node_cost(pack, CPU).bytes_moved == copies * 2 * (64 * 63) * 2


def test_a_collective_runs_beside_what_computes_until_it_is_awaited() -> None:
    program = lowered(4)
    slow = Hardware("slow link", flops=1e12, memory_bandwidth=1e12, link_bandwidth=1e5)
    fast = Hardware("no link", flops=1e9, memory_bandwidth=1e9, link_latency=0, link_bandwidth=1e15)
    for hardware in (slow, fast):
        ends: dict[str, float] = {}
        done = {}
        for span in spans(program, hardware):
            assert span.start >= ends.get(span.lane, 0.0) or span.lane != COMPUTE
            assert span.end >= span.start >= 0
            for operand in span.node.all_input_nodes:  # nothing is read before it is there
                if not span.waits and "bucket" not in operand.meta:
                    assert span.start >= done.get(operand, 0.0)
            if span.waits:
                assert span.end >= done[span.node.all_input_nodes[0]]
            done[span.node] = ends[span.lane] = span.end
    assert program.cost(slow).exposed > 0.9 * program.cost(slow).seconds
    assert program.cost(fast).exposed < 1e-6 * program.cost(fast).seconds
    assert "waiting for collectives" in str(program.cost(slow))


def in_one_lane(program: Program) -> Program:
    """The same, where reductions go after the gathers of their group."""
    graph = copy_graph(program.graph)
    for node in graph.nodes:
        if bucket := node.meta.get("bucket"):
            node.meta["bucket"] = replace(bucket, apart=False)
    return program.logged(graph, "")


class _Half(Hardware):
    """On which reductions alone take time, or gathers alone."""

    reductions = True

    def load(self, bucket: Bucket) -> Load:
        return super().load(bucket) if bucket.gathers != self.reductions else Load(0.0, {})


class _OtherHalf(_Half):
    reductions = False


@settings(max_examples=15)
@given(
    widths=st.lists(st.integers(1, 60), min_size=2, max_size=7),
    world=st.sampled_from([2, 3, 8]),
    bucket=st.sampled_from([200, 2000, 20000]),
    prefetch=st.sampled_from([0, 1, 2]),
    latency=st.sampled_from([0.0, 1e-7, 1e-5]),
    bandwidth=st.floats(7, 11).map(lambda x: 10**x),
)
def test_a_step_takes_no_longer_for_a_second_lane_and_no_less_than_for_either(
    widths: list[int], world: int, bucket: int, prefetch: int, latency: float, bandwidth: float
) -> None:
    rates: dict[str, Any] = {"flops": 1e10, "memory_bandwidth": 1e10, "overhead": 0.0}
    rates |= {"link_latency": latency, "link_bandwidth": bandwidth}
    with fake_ranks(world):
        program = optimise(
            Recorded(widths).program,
            reshard_after_forward=True, bucket_bytes=bucket, prefetch=prefetch, exact=True,
        )  # fmt: skip
    sent = [node.meta["bucket"] for node in program.graph.nodes if "bucket" in node.meta]
    assert {x.apart for x in sent} == {True, False}
    two = cost([program], Hardware("two", **rates)).seconds
    for half in (_Half, _OtherHalf):
        assert two >= cost([program], half("half", **rates)).seconds * (1 - 1e-9)
    one = cost([in_one_lane(program)], Hardware("one", **rates)).seconds
    if not prefetch:
        assert two <= one * (1 + 1e-9)
    # a reduction that comes later slows down a gather that was launched early
    assert two <= one + sum(Hardware("one", **rates).load(x).transfer for x in sent if x.apart)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_where_nothing_is_gathered_meanwhile_there_is_one_lane(stage: int) -> None:
    program = next(lowered(4, stage=stage).parts())
    assert cost([program], CPU) == cost([in_one_lane(program)], CPU)
