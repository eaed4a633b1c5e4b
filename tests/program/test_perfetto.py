"""The trace of a step is what Perfetto reads, and has every node once."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.program.hardware import CPU
from tests.ranks import fake_ranks


def lowered() -> fzero.Program:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for w in params.values():
            x = torch.tanh(x @ w)
        return x.square().mean()

    with fake_ranks(2):
        cfg = fzero.Config(stage=3, bucket_mb=0.0001)
        step_fn = fzero.make_train_step(model_fn, fzero.optim.adam(0.1), cfg)
        params = {f"w{i}": torch.ones(4, 4) for i in range(3)}
        return step_fn.lower(*step_fn.init(params), torch.ones(3, 4))


def test_a_trace_has_every_node_in_its_lane(tmp_path: Path) -> None:
    program = lowered()
    program.save_trace(tmp_path / "step.json")
    trace: dict[str, Any] = json.loads((tmp_path / "step.json").read_text())
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    nodes = [n for part in program.parts() for n in part.graph.nodes if n.op == "call_function"]
    assert len(spans) == len(nodes)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    sends = {e["tid"] for e in spans if e["args"]["bytes sent"]}
    assert sends == {lane for lane, name in lanes.items() if name.startswith("group ")}
    # what is gathered and what is reduced beside it, in backward at the same time
    kinds = {lane: {e["name"].split("[")[0] for e in spans if e["tid"] == lane} for lane in sends}
    assert {"reduce_scatter"} in kinds.values()
    (beside,) = [lane for lane in sends if lanes[lane].endswith("reductions")]
    assert kinds[beside] == {"reduce_scatter"}
    for lane in lanes:  # one after another
        mine = [e for e in spans if e["tid"] == lane]
        for one, following in itertools.pairwise(mine):
            assert following["ts"] >= one["ts"] + one["dur"] - 0.01
    counted = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
    assert max(counted) <= program.peak_bytes()
    end = max(e["ts"] + e["dur"] for e in spans)
    assert end == pytest.approx(program.cost(CPU).seconds * 1e6, rel=1e-3)
