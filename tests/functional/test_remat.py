"""Checkpointing outside of a Program: the same gradients, computed in less memory; no leaks."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import fzero
from fzero.errors import ConfigError, TraceError
from fzero.functional import torch_checkpoint as ours
from fzero.functional.patch import Patch

NOTHING = contextlib.nullcontext()

WAYS: dict[str, Callable[..., Any]] = {
    "remat": lambda fn, *args: fzero.remat(fn)(*args),
    "re-entrant": functools.partial(checkpoint, use_reentrant=True),
    "not re-entrant": functools.partial(checkpoint, use_reentrant=False),
}


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.way = WAYS.get(way, lambda fn, *args: fn(*args))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.way(block, x)
        return x


def layer(w: Tensor, x: Tensor) -> Tensor:
    return nn.functional.dropout(torch.tanh(x @ w), 0.5)


@pytest.fixture(autouse=True)
def _torch_is_left_alone() -> Iterator[None]:
    before = {name: x for name, x in vars(torch_checkpoint).items() if callable(x)}
    yield
    assert {name: x for name, x in vars(torch_checkpoint).items() if callable(x)} == before


# --------------------------------------------------------------------------- plain autograd
@settings(max_examples=25)
@given(
    depth=st.integers(1, 4),
    kept=st.sampled_from([None, "mm", "two", "none"]),
    seed=st.integers(0, 99),
)
def test_gradients_are_the_functions_bit_for_bit(depth: int, kept: str | None, seed: int) -> None:
    policy: Any = {
        None: None,
        "mm": torch.ops.aten.mm,
        "two": lambda op: op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.tanh),
        "none": lambda op: CheckpointPolicy.MUST_RECOMPUTE,
    }[kept]
    torch.manual_seed(seed)
    ws = [torch.randn(3, 3, requires_grad=True) for _ in range(depth)]
    x = torch.randn(2, 3)

    def loss(wrap: Callable[..., Any]) -> Tensor:
        torch.manual_seed(seed)
        h = x
        for w in ws:
            h = wrap(lambda h, w=w: layer(w, h))(h)  # a closure over what needs a gradient
        return h.square().sum()

    plain = torch.autograd.grad(loss(lambda fn: fn), ws)
    again = torch.autograd.grad(loss(functools.partial(fzero.remat, policy=policy)), ws)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_it_runs_again_and_keeps_less() -> None:
    calls: list[bool] = []

    def fn(x: Tensor, *, scale: float) -> Tensor:
        calls.append(True)
        return (x * scale).sin().cos().exp()

    def kept(fn: Callable[..., Tensor]) -> tuple[int, Tensor]:
        saved: list[Tensor] = []
        x = torch.ones(5, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = fn(x, scale=2.0)
        return sum(t.numel() > 0 for t in saved), y  # torch 2.11 keeps an empty one besides

    assert kept(fn)[0] == 3
    calls.clear()
    count, y = kept(fzero.remat(fn))
    assert (count, len(calls)) == (1, 1)  # the input
    y.sum().backward()
    assert len(calls) == 2


# ------------------------------------------------------------------------------- torch.func
def test_it_composes_with_torch_func() -> None:
    w, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)

    def loss(wrap: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda w: wrap(lambda x: torch.tanh(x @ w))(x).square().sum()  # w is closed over

    def results(wrap: Callable[..., Any]) -> list[Tensor]:
        fn = loss(wrap)
        grad = torch.func.grad(fn)
        return [
            grad(w),
            torch.func.jvp(grad, (w,), (w,))[1],
            torch.func.grad(lambda w: grad(w).square().sum())(w),
            torch.func.vmap(grad)(torch.stack([w, 2 * w])),
        ]

    for plain, again in zip(results(lambda fn: fn), results(fzero.remat), strict=True):
        assert torch.equal(plain, again)


# ----------------------------------------------------------------------- functionalised modules
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", ["autograd", "torch.func"])
def test_a_functionalised_module_recomputes_with_the_tensors_of_its_call(
    way: str, transform: str
) -> None:
    """Its slots hold its own weights again by then: reading those would be silently wrong."""

    def gradients(way: str) -> list[Tensor]:
        torch.manual_seed(0)
        apply, params, buffers = fzero.functionalize(Net(way), buffers=True)
        own = {name: (2 * p).requires_grad_() for name, p in params.items()}
        x = torch.randn(8, 4, requires_grad=True)

        def loss(params: dict[str, Tensor]) -> tuple[Tensor, Any]:
            out, state = apply(params, buffers, x)
            return out.square().sum(), state

        if transform == "torch.func":
            grads, state = torch.func.grad(loss, has_aux=True)(
                {n: p.detach() for n, p in own.items()}
            )
            return [*grads.values(), *state.values()]
        value, state = loss(own)
        before = [buffer.clone() for buffer in state.values()]
        grads = torch.autograd.grad(value, list(own.values()))
        assert all(map(torch.equal, before, state.values()))  # a recomputation updates none twice
        return [*grads, *before]

    assert all(map(torch.equal, gradients("plain"), gradients(way)))


def test_a_recomputation_sees_the_buffers_of_its_time() -> None:
    class Counts(nn.Module):
        scale: Tensor
        checkpointed: Any

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))
            self.w = nn.Parameter(torch.tensor(3.0))

        def once(self, x: Tensor) -> Tensor:
            self.scale += 1
            return (x * self.w * self.scale.clone()).sin()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = fzero.remat(self.once)(x) if self.checkpointed else self.once(x)
            return x

    module = Counts()
    apply, params, buffers = fzero.functionalize(module, buffers=True)
    w = params["w"].clone().requires_grad_()
    results = []
    for module.checkpointed in (False, True):
        out, _ = apply({"w": w}, buffers, torch.ones(()))
        results.append(torch.autograd.grad(out, w)[0])
    assert torch.equal(*results)


# ------------------------------------------------------------------------------ torch's module
@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("forgotten", [ours.REENTRANT, *ours.NON_REENTRANT])
def test_a_torch_that_goes_another_way_is_refused(
    executor: str, forgotten: str, monkeypatch: Any
) -> None:
    """As torch 2.14 did, which kept a name and stopped calling it."""
    if not hasattr(torch_checkpoint, forgotten):
        return  # of another torch
    monkeypatch.setattr(
        ours,
        "_PATCH",
        Patch(*(part for part in ours._PATCH.parts if part[1] != forgotten)),
    )
    called = forgotten == ours.REENTRANT or forgotten == _called_by_checkpoint()
    check = ours.check_checkpoints.__wrapped__  # not what an earlier one found
    with pytest.raises(TraceError, match=r"runs torch\.utils\.checkpoint") if called else NOTHING:
        check(executor)


def _called_by_checkpoint() -> str:
    """Which of the names this torch calls."""
    called = []

    def noting(name: str) -> Callable[[Any], Any]:
        return lambda original: lambda *a, **k: called.append(name) or original(*a, **k)

    with Patch(*((torch_checkpoint, name, noting(name)) for name in ours.NON_REENTRANT)):
        checkpoint(torch.sin, torch.ones(1), use_reentrant=False)
    return called[0]


def test_policies_are_where_they_are_looked_for() -> None:
    contexts = torch_checkpoint.create_selective_checkpoint_contexts(lambda *_: True)
    assert callable(getattr(contexts[0], "policy_fn", None))


def test_torchs_module_is_restored_when_the_last_leaves() -> None:
    original = torch_checkpoint.CheckpointFunction

    def raising() -> None:
        with ours.checkpoints_as_regions():
            with ours.checkpoints_as_regions():
                assert torch_checkpoint.CheckpointFunction is not original
            assert torch_checkpoint.CheckpointFunction is not original
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raising()
    assert torch_checkpoint.CheckpointFunction is original


def test_other_threads_meet_torchs_own() -> None:
    """While one is in a functionalised call, another's checkpoint recomputes as torch does."""
    calls: list[bool] = []

    def elsewhere() -> None:
        def fn(x: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return x.sin()

        x = torch.ones(2, requires_grad=True)
        checkpoint(fn, x, use_reentrant=True).sum().backward()

    def never(fn: Callable[..., Any]) -> Callable[..., Any]:
        raise AssertionError("another thread's call")

    with ours.recomputing(never):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert calls == [False, True]  # re-entrant: forward without a graph, then again with one


# ----------------------------------------------------------------------------- policies by name
def test_policies_by_name_keep_what_they_say() -> None:
    """One more product is computed again for each that is not kept, and no number changes."""

    def block(w: Tensor, x: Tensor) -> Tensor:
        h = fzero.checkpoint_name(x @ w, "first")
        h = torch.tanh(torch.tanh(h) @ w)  # tanh keeps its result
        return torch.tanh(h)

    def trained(policy: Any) -> tuple[int, Tensor]:
        again = fzero.remat(block, policy=policy)
        step_fn = fzero.make_train_step(
            lambda p, x: again(p["w"], again(p["w"], x)).square().mean(), fzero.optim.sgd(0.1)
        )
        state, x = step_fn.init({"w": torch.eye(4) + 0.1}), torch.arange(8.0).view(2, 4)
        program = step_fn.lower(*state, x)
        program.verify()
        params, _ = step_fn(*state, x)
        return program.cost().recomputed // (2 * 2 * 4 * 4), fzero.unshard(params)["w"]

    policies = ["everything", "dots", fzero.save_only("first"), "nothing", None]
    found = {str(policy): trained(policy) for policy in policies}
    counts = [count for count, _ in found.values()]
    assert counts == [0, 0, 2, 4, 4]
    assert len({tuple(w.flatten().tolist()) for _, w in found.values()}) == 1


@pytest.mark.parametrize("names", [(), ("",), (3,)])
def test_what_is_no_name_is_refused(names: Any) -> None:
    with pytest.raises(ConfigError, match="save_only got"):
        fzero.save_only(*names)
    with pytest.raises(ConfigError, match="checkpoint_name got"):
        fzero.checkpoint_name(torch.ones(1), *(names or (None,)))


# ------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("policy", [[3], "mm", 3])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="policy="):
        fzero.remat(torch.sin, policy=policy)


def test_a_policy_must_answer_yes_or_no() -> None:
    with pytest.raises(ConfigError, match="answered None"):
        fzero.remat(torch.sin, policy=lambda op: None)(torch.ones(1, requires_grad=True))


def test_a_result_is_no_function() -> None:
    with pytest.raises(ConfigError, match=r"remat\(block\)\(x\)"):
        fzero.remat(torch.ones(1))  # pyright: ignore
