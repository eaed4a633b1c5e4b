"""Kernels that join leaves give what they give of each leaf, to the last bit."""

import copy
import io
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.distributed.dtensor import local_tensor
from fzero.layout.end_to_end import lay, runs
from fzero.program import joined

SIZES = st.lists(st.sampled_from([0, 3, 16, 32, 100, 4096]), min_size=1, max_size=6)


def _heard(kernel: Any) -> tuple[Any, list[int]]:
    """A kernel, and of how many leaves it was called."""
    counts: list[int] = []

    def call(*lists: Any, **more: Any) -> Any:
        counts.append(len(lists[0]))
        return kernel(*lists, **more)

    return call, counts


def _columns(sizes: Sequence[int], count: int) -> list[list[Tensor]]:
    torch.manual_seed(0)
    return [[torch.rand(n) for n in sizes] for _ in range(count)]


@pytest.mark.parametrize("amsgrad", [False, True])
@given(sizes=SIZES, flags=st.lists(st.booleans(), min_size=5, max_size=5))
def test_an_update_of_runs_is_that_of_the_leaves(
    amsgrad: bool, sizes: list[int], flags: list[bool]
) -> None:
    more: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    more |= {"eps": 1e-8, "amsgrad": amsgrad, "maximize": False}
    apart, laid = (_columns(sizes, 5 if amsgrad else 4) for _ in range(2))
    for column, flag in zip(laid, flags, strict=False):
        if flag:
            lay(column, [str(i) for i in range(len(sizes))])
    step = torch.tensor(3.0)
    for columns, fused in (
        (apart, torch._fused_adamw_),
        (laid, joined._updating(torch._fused_adamw_)),
    ):
        given = columns if amsgrad else [*columns, []]
        fused(*given, [step] * len(sizes), **more)
    for x, y in zip(chain(*apart), chain(*laid), strict=True):
        assert torch.equal(x, y)


def test_leaves_of_other_ages_are_not_joined() -> None:
    columns = _columns([16] * 3, 4)
    for column in columns:
        lay(column, "abc")
    kernel, counts = _heard(torch._fused_adamw_)
    more: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    more |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
    one = torch.tensor(1.0)
    joined._updating(kernel)(*columns, [], [one] * 3, **more)
    joined._updating(kernel)(*columns, [], [one, one, torch.tensor(2.0)], **more)
    assert counts == [1, 3]


@given(SIZES)
def test_leaves_times_a_factor_are_taken_as_they_lie(sizes: list[int]) -> None:
    apart, laid = (_columns(sizes, 1)[0] for _ in range(2))
    lay(laid, [str(i) for i in range(len(sizes))])
    kernel, counts = _heard(torch._foreach_mul_)
    joined._scaling(kernel)(laid, torch.tensor(0.3))
    torch._foreach_mul_(apart, torch.tensor(0.3))
    for x, y in zip(apart, laid, strict=True):
        assert torch.equal(x, y)
    assert counts == [len(runs(laid))]


def _of_clip(clip: float | None, stage: int, **fields: Any) -> tuple[Any, ...]:
    """A model whose small gradients are worth a slab, and a step of it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    apply, params = fzero.functionalize(model)
    cfg = fzero.Config(stage=stage, clip_norm=clip, **fields)
    step_fn = fzero.make_train_step(
        lambda p, x: (apply(p, x) ** 2).mean(), fzero.optim.adamw(1e-2), cfg
    )
    return step_fn, *step_fn.init(params), torch.randn(256, 64)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_step_updates_all_small_leaves_in_one_call(
    clip: float | None, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    updating = joined._updating

    def heard(kernel: Any) -> Any:
        def call(*lists: Any, **more: Any) -> None:
            calls.append(len(lists[0]))
            kernel(*lists, **more)

        return updating(call)

    monkeypatch.setattr(joined, "_updating", heard)
    step_fn, params, opt_state, batch = _of_clip(clip, stage)
    for _ in range(2):
        params, opt_state = step_fn(params, opt_state, batch)
    assert calls == [1, 1]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_leaves_in_memory_of_their_own_are_trained_alike(clip: float | None, stage: int) -> None:
    """As a checkpoint brings them, or a user's `tree_map`."""
    found = []
    for apart in (False, True):
        step_fn, params, opt_state, batch = _of_clip(clip, stage)
        if apart:
            params, opt_state = fzero.tree_map(
                lambda x: x.clone() if isinstance(x, Tensor) else x, (params, opt_state)
            )
        for _ in range(3):
            params, opt_state = step_fn(params, opt_state, batch)
        found.append([*fzero.unshard(params).values(), opt_state.metrics["grad_norm"]])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_can_be_copied_and_pickled(stage: int) -> None:
    apply, params = fzero.functionalize(torch.nn.Linear(64, 64))
    step_fn = fzero.make_train_step(
        lambda p, x: (apply(p, x) ** 2).mean(), fzero.optim.adamw(1e-2), fzero.Config(stage=stage)
    )
    state = step_fn.init(params)
    state = step_fn(*state, torch.randn(4, 64))
    for x, y in zip(fzero.tree.leaves(state), fzero.tree.leaves(copy.deepcopy(state)), strict=True):
        assert torch.equal(local_tensor(x), local_tensor(y))
    torch.save(state, io.BytesIO())
    torch.save(state[0]["bias"], file := io.BytesIO())
    assert len(file.getvalue()) < 4096  # itself, and not what lies beside it
