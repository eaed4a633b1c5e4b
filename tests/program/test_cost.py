"""FLOPs are torch's own count, bytes sent are the collectives', times follow from the hardware."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fzero
from fzero.program.cost import COMPUTE, node_cost, spans
from fzero.program.graph import is_op
from fzero.program.hardware import CPU, Hardware
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
