"""Copies to the host: what they bring back, and on which machine they are worth anything."""

import pytest
import torch

from fzero.program.hardware import CPU, GPU
from fzero.program.transfers import FROM_HOST, LANDED, TO_HOST, machine_of, planned_for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("strides", [(5, 1), (1, 3)])
def test_a_copy_and_back_is_the_same_bits_and_strides(
    dtype: torch.dtype, strides: tuple[int, int]
) -> None:
    x = torch.empty_strided((3, 5), strides, dtype=dtype).copy_(torch.randn(3, 5).mul(9))
    device = x.device
    there = LANDED(TO_HOST(x, True), device)
    here = LANDED(FROM_HOST(there, device), device)
    assert torch.equal(here, x)
    assert here.stride() == there.stride() == x.stride()
    assert len({y.untyped_storage().data_ptr() for y in (x, there, here)}) == 3


def test_not_a_number_keeps_its_bits() -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32)
    here = FROM_HOST(TO_HOST(bits.view(torch.float32), True), bits.device)
    assert torch.equal(here.view(torch.int32), bits)


def test_only_a_machine_whose_host_is_apart_is_one_to_send_from() -> None:
    inputs = [torch.zeros(2)]
    assert machine_of(inputs) is None
    with planned_for(GPU):
        assert machine_of(inputs) is GPU
        with planned_for(CPU):
            assert machine_of(inputs) is None
    assert machine_of(inputs) is None
