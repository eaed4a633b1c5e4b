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
from fzero.layout.end_to_end import lay
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
def test_leaves_times_a_factor_lie_as_they_lay(sizes: list[int]) -> None:
    (leaves,) = _columns(sizes, 1)
    lay(leaves, [str(i) for i in range(len(sizes))])
    before = [x.clone() for x in leaves]
    kernel, counts = _heard(torch._foreach_mul)
    found = joined._scaling(kernel)(leaves, torch.tensor(0.3))
    assert [x.shape for x in found] == [x.shape for x in before]
    for x, y, old in zip(found, torch._foreach_mul(before, torch.tensor(0.3)), leaves, strict=True):
        assert torch.equal(x, y)
        assert not x.numel() or x.data_ptr() != old.data_ptr()
    # again, of what came out
    joined._scaling(kernel)(list(found), 2.0)
    assert counts[0] == counts[1]


def _of_clip(clip: float | None, **fields: Any) -> tuple[Any, ...]:
    """A model whose small gradients are worth a slab, and a step of it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    apply, params = fzero.functionalize(model)
    cfg = fzero.Config(stage=0, clip_norm=clip, **fields)
    step_fn = fzero.make_train_step(
        lambda p, x: (apply(p, x) ** 2).mean(), fzero.optim.adamw(1e-2), cfg
    )
    return step_fn, *step_fn.init(params), torch.randn(256, 64)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_step_updates_all_small_leaves_in_one_call(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    updating = joined._updating

    def heard(kernel: Any) -> Any:
        def call(*lists: Any, **more: Any) -> None:
            calls.append(len(lists[0]))
            kernel(*lists, **more)

        return updating(call)

    monkeypatch.setattr(joined, "_updating", heard)
    step_fn, params, opt_state, batch = _of_clip(clip)
    for _ in range(2):
        params, opt_state = step_fn(params, opt_state, batch)
    assert calls == [1, 1]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_leaves_in_memory_of_their_own_are_trained_alike(clip: float | None) -> None:
    """As a checkpoint brings them, or a user's `tree_map`."""
    found = []
    for apart in (False, True):
        step_fn, params, opt_state, batch = _of_clip(clip)
        if apart:
            params, opt_state = fzero.tree_map(
                lambda x: x.clone() if isinstance(x, Tensor) else x, (params, opt_state)
            )
        for _ in range(3):
            params, opt_state = step_fn(params, opt_state, batch)
        found.append([*fzero.unshard(params).values(), opt_state.metrics["grad_norm"]])
    assert all(map(torch.equal, *found))


def test_results_that_others_see_have_memory_of_their_own() -> None:
    def views(*xs: Tensor) -> list[Tensor]:
        return [x.view(4, 8) for x in torch._foreach_mul(list(xs), 2.0)]

    found = fzero.jit(views)(*torch.arange(96.0).split(32))
    assert len({x.untyped_storage().data_ptr() for x in found}) == 3


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
