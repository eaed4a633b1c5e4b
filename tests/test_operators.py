"""An operator of the library's own is one node of a graph, with its kernel and its fake."""

import uuid
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.operators import define


def _made() -> Any:
    # operators stay until the process ends: another name each time
    name = f"twice_{uuid.uuid4().hex}"
    return define(f"{name}(Tensor x) -> Tensor", lambda x: (x + x).clone(), torch.empty_like)


def test_a_graph_has_it_as_one_node_and_runs_its_kernel() -> None:
    twice = _made()

    def fn(x: Tensor) -> Tensor:
        return twice(x)

    module = make_fx(fn, tracing_mode="fake")(torch.ones(2, 3))
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert called == [twice]
    assert torch.equal(module(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_without_values_its_fake_says_what_comes() -> None:
    found = _made()(torch.ones(2, 3, device="meta"))
    assert found.is_meta
    assert found.shape == (2, 3)
