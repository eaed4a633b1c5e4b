"""Where things live, told without allocating anything there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero import Config
from fzero.state.masters import copied, plan_residence

CPU = torch.device("cpu")
devices = st.builds(torch.device, st.sampled_from(["cuda", "xpu", "mps"]), st.integers(0, 7))


@given(device=st.one_of(devices, st.just(CPU)), stage=st.integers(0, 3))
def test_without_offload_everything_is_on_the_device(device: torch.device, stage: int) -> None:
    found = plan_residence(Config(stage=stage), device)
    assert found.params == found.masters == device
    assert not found.pinned


@given(device=devices, stage=st.integers(0, 3))
def test_offload_moves_masters_and_keeps_parameters(device: torch.device, stage: int) -> None:
    found = plan_residence(Config(stage=stage, offload="cpu"), device)
    assert found.params == device
    assert found.masters == CPU
    assert found.pinned == (device.type == "cuda")


def test_on_a_cpu_host_and_device_are_one() -> None:
    assert plan_residence(Config(offload="cpu"), CPU) == plan_residence(Config(), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_copies_in_row_major_order(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4).t()
    made = plan_residence(Config(offload="cpu"), CPU).master(x, dtype)
    assert made.is_contiguous()
    assert made.data_ptr() != x.data_ptr()
    assert torch.equal(made, x.to(dtype))
    assert torch.equal(copied(made), made)
    assert copied(made).data_ptr() != made.data_ptr()
