"""What is alive at the peak, row by row: it adds up, and each row is what it says."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import fzero
from fzero import Config
from fzero.program.categories import ORDER
from tests.ranks import fake_ranks


class Net(nn.Module):
    """A stack of layers with dropout, one of them rematerialised, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):

            def block(x: Tensor, layer: Any = layer) -> Tensor:
                return torch.sin(torch.tanh(layer(x)))

            x = torch.dropout((fzero.remat(block) if i == 1 else block)(x), 0.1, True)
        return self.norm(x).square().mean()


def lowered(cfg: Config, world: int) -> tuple[fzero.Program, Any, Any]:
    apply, params, buffers = fzero.functionalize(Net(), buffers=True)
    step_fn = fzero.make_train_step(apply, fzero.optim.adam(0.1), cfg)
    with fake_ranks(world):
        state = step_fn.init(params, buffers)
        batch = torch.ones(8 * cfg.accum_steps, 12)
        return step_fn.lower(*state, batch), *state


def local_bytes(tree: Any) -> int:
    leaves = [x.to_local() if isinstance(x, DTensor) else x for x in tree_leaves(tree)]
    return sum(x.nbytes for x in leaves if isinstance(x, Tensor))


CASES = [
    (3, Config(stage=0, accum_steps=3, precision="bf16")),
    (3, Config(stage=1, frozen=("layers.0.*",), bucket_mb=0.0005)),
    (3, Config(stage=1, accum_steps=3, precision="fp16")),
    (2, Config(stage=2, accum_steps=3, frozen=("layers.0.*",))),
    (1, Config(stage=3, precision="bf16")),
    (3, Config(stage=3, precision="bf16", frozen=("layers.0.*",), bucket_mb=0.0005)),
    (2, Config(stage=3, accum_steps=3)),
]


@pytest.mark.parametrize(
    ("world", "cfg"), CASES, ids=[f"{w}-{c.stage}-{c.accum_steps}-{c.precision}" for w, c in CASES]
)
def test_rows_add_up_and_categories_are_what_the_state_holds(world: int, cfg: Config) -> None:
    program, params, opt_state = lowered(cfg, world)
    peak = program.peak()
    assert sum(row.bytes for row in peak) == peak.bytes == program.peak_bytes()
    assert [row.bytes for row in peak] == sorted((row.bytes for row in peak), reverse=True)
    assert sum(peak.by_category().values()) == peak.bytes
    assert set(peak.by_category()) <= set(ORDER) - {"inputs"}  # nothing is left unknown

    memory = program.memory()
    assert max(moment.bytes for moment in memory) == peak.bytes
    for moment in memory:
        held = moment.categories
        assert sum(held.values()) == moment.bytes
        assert held["parameters"] == local_bytes(params)
        # the update writes the count of steps and reads no batch; both are there
        assert held["optimizer"] in {local_bytes(opt_state.inner) + n for n in (0, 8)}
        assert held.get("masters", 0) == local_bytes(opt_state.master)
        assert held["batch"] == 8 * cfg.accum_steps * 12 * 4
        sharded = cfg.stage == 3 and world > 1
        cast = cfg.precision is not None
        assert "gathered" not in held or sharded or cast
    at = [m for m in memory if (m.program, m.node) == (peak.program, peak.node)]
    assert at[0].categories == peak.by_category()
    assert peak.node in str(peak)


def test_leaves_and_lines_are_named() -> None:
    program, _, _ = lowered(Config(stage=3), 2)
    peak = program.peak()
    rows = {(row.category, row.name) for row in peak}
    assert {("parameters", "layers.0.weight"), ("batch", "batch")} <= rows
    assert any(name.endswith("layers.2.weight") for kind, name in rows if kind == "optimizer")
    activations = [row for row in peak if row.category == "activations"]
    assert activations
    assert all(__file__ in row.where for row in activations)
    seen = {kind for moment in program.memory() for kind in moment.categories}
    assert {"gathered", "buckets", "recomputed", "temporaries", "gradients", "results"} <= seen


def test_a_gradient_is_one_from_where_it_is_made() -> None:
    """Full gradients live until they are reduced; after it their shards do."""
    program, _, _ = lowered(Config(stage=3, bucket_mb=0.0001), 2)
    by_node = {moment.node: moment for moment in program.memory() if moment.program == "gradients"}
    nodes = list(program.graph.nodes)
    place = next(i for i, node in enumerate(nodes) if node.name.startswith("pack_reduce_scatter"))
    before = by_node[nodes[place].name].categories["gradients"]
    sizes = {12 * 12 * 4, 12 * 4, 12 * 4 * 2, 12 * 12 * 4 + 12 * 4}
    assert before in sizes | {n + m for n in sizes for m in sizes}


@pytest.mark.parametrize("accum", [1, 2, 4])
def test_the_batch_counts_once_however_it_is_cut(accum: int) -> None:
    step_fn = fzero.make_train_step(
        lambda p, x: (x @ p["w"]).square().mean(),
        fzero.optim.sgd(0.1),
        Config(accum_steps=accum),
    )
    state, batch = step_fn.init({"w": torch.ones(6, 2)}), torch.ones(8, 6)
    assert step_fn.lower(*state, batch).peak().by_category()["batch"] == batch.nbytes
