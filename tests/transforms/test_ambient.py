"""Torch's settings that a recording depends on: a change of each is noticed, and named."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fzero
from fzero.transforms.ambient import Ambient


@contextlib.contextmanager
def _set(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextlib.contextmanager
def _einsum(enabled: bool) -> Iterator[None]:
    with torch.backends.opt_einsum.flags(enabled, None):
        yield


SETTINGS: dict[str, Callable[[], Any]] = {
    "default_dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default_device": lambda: torch.device("meta"),
    "cpu_autocast_dtype": lambda: _set(
        lambda x: torch.set_autocast_dtype("cpu", x), torch.float16, torch.bfloat16
    ),
    "cuda_autocast_dtype": lambda: _set(
        lambda x: torch.set_autocast_dtype("cuda", x), torch.bfloat16, torch.float16
    ),
    "deterministic_algorithms": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "anomaly_mode": lambda: torch.autograd.set_detect_anomaly(True),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "flash_attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "memory_efficient_attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "math_attention": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "cudnn_attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "attention_priority": lambda: sdpa_kernel(
        [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True
    ),
    "reduced_attention": lambda: _set(
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, True, False
    ),
    "einsum_path": lambda: _einsum(not torch.backends.opt_einsum.enabled),
}


@pytest.mark.parametrize("name", Ambient._fields)
def test_a_change_of_each_is_named(name: str) -> None:
    if name == "einsum_path" and not torch.backends.opt_einsum.is_available():
        pytest.skip("opt_einsum is not installed, so torch has one way to contract")
    before = Ambient.of_now()
    with SETTINGS[name]():
        said = before.changes(Ambient.of_now())
        found = [row.split()[1] for row in said]
    assert name in found, said
    assert not before.changes(Ambient.of_now())


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.view(2, 4, 8, 4)
        return F.scaled_dot_product_attention(q, q, q)


def _operators(step_fn: Any, *args: Any) -> set[str]:
    return {
        str(node.target)
        for node in step_fn.lower(*args).graph.nodes
        if "attention" in str(node.target)
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_the_attention_that_is_asked_for_runs(stage: int) -> None:
    """Also of a step that was recorded with another, and when it is asked for no more."""
    attend = Attention()

    def loss(params: Any, x: Tensor) -> Tensor:
        return attend(x @ params["w"]).square().mean()

    step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.1), fzero.Config(stage))
    params, state = step_fn.init({"w": torch.eye(16)})
    x = torch.randn(2, 8, 16)
    params, state = step_fn(params, state, x)
    assert _operators(step_fn, params, state, x)
    with sdpa_kernel(SDPBackend.MATH):
        params, state = step_fn(params, state, x)
        assert not _operators(step_fn, params, state, x)
    params, state = step_fn(params, state, x)
    assert _operators(step_fn, params, state, x)


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_rnns_follow_a_library_that_is_switched_off(executor: Any) -> None:
    """oneDNN has an operator for a whole LSTM, which is gone from the Program without it."""
    torch.manual_seed(0)
    module = nn.LSTM(4, 4, batch_first=True)
    apply, params = fzero.functionalize(module)

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, x)[0].square().mean()

    cfg = fzero.Config(3, executor=executor)
    step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.1), cfg)
    params, state = step_fn.init(params)
    x = torch.randn(2, 5, 4)
    losses = []
    for enabled in (True, False, True):
        with torch.backends.mkldnn.flags(enabled=enabled):
            params, state = step_fn(params, state, x)
            losses.append(float(state.metrics["loss"]))
            if executor == "traced":
                text = str(step_fn.lower(params, state, x).graph)
                assert ("mkldnn_rnn" in text) is (enabled and torch.backends.mkldnn.is_available())
    assert losses[0] > losses[1] > losses[2]
