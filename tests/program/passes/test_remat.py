"""Checkpointed regions in a Program: the same gradients, masks included, in less memory."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fzero
from fzero import zero
from fzero.errors import TraceError
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.graph import BACKWARD, phases
from fzero.program.memory import input_bytes, peak_bytes
from fzero.program.passes.clean import clean
from fzero.program.passes.functionalise import functionalise
from fzero.program.passes.remat import rematerialise
from fzero.program.passes.seed import insert_seeds, number_sites
from fzero.program.sites import KEY
from fzero.program.trace import trace_program
from tests.ranks import run_ranks

FRONT_ENDS = {
    "torch.func.grad": zero.grad,
    "torch.func.vjp": zero.vjp,
    "torch.autograd.grad": zero.autograd,
}

Way = Callable[..., Any]


def plainly(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def rematerialised(fn: Callable[..., Any], *args: Any) -> Any:
    return fzero.remat(fn)(*args)


def nested(fn: Callable[..., Any], *args: Any) -> Any:
    return fzero.remat(lambda *args: checkpoint(fn, *args, use_reentrant=False))(*args)


WAYS: dict[str, Way] = {
    "plain": plainly,
    "remat": rematerialised,
    "nested": nested,
    "re-entrant": functools.partial(checkpoint, use_reentrant=True),
    "not re-entrant": functools.partial(checkpoint, use_reentrant=False),
}
CHECKPOINTED = [way for way in WAYS if way != "plain"]


# --------------------------------------------------------------------------------- programs
def staged(
    loss_fn: Callable[..., Tensor], inputs: Sequence[Tensor], front_end: str = "torch.func.grad"
) -> Program:
    """Gradients of `loss_fn(*inputs)`, and its value, up to where rematerialisation comes."""
    grad = FRONT_ENDS[front_end](zero.scaled(lambda leaves: (loss_fn(*leaves), ()), 1.0))

    def fn(*leaves: Tensor) -> tuple[Tensor, ...]:
        grads, (_, (loss, _)) = grad(leaves)
        return (*grads, loss)

    names = [f"x{i}" for i in range(len(inputs))]
    program = trace_program("gradients", [(front_end, fn)], inputs, names)
    return clean(number_sites(functionalise(program)))


def run(program: Program, inputs: Sequence[Tensor], key: int = 3) -> list[Tensor]:
    program = insert_seeds(program)
    return compile_program(program)(*inputs, *[key] * (KEY in program.inputs))


def computed_in_backward(program: Program, op: Any) -> int:
    phase = phases(program.graph)
    return sum(n.target is op and phase[n] == BACKWARD for n in program.graph.nodes)


def layer(w: Tensor, x: Tensor) -> Tensor:
    return x + F.dropout(torch.tanh(F.layer_norm(x, x.shape[-1:]) @ w), 0.3)


def stack(way: Way, ws: Sequence[Tensor], x: Tensor) -> Tensor:
    for w in ws:
        x = way(layer, w, x)
    return x.square().mean()


@st.composite
def nestings(draw: st.DrawFn, depth: int = 3) -> Any:
    """A tree of regions: how many layers, or a list of regions, one after another."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.integers(1, 2))
    return draw(st.lists(nestings(depth - 1), min_size=1, max_size=3))


def _layers(tree: Any) -> int:
    return tree if isinstance(tree, int) else sum(map(_layers, tree))


@settings(max_examples=15)
@given(tree=nestings(), front_end=st.sampled_from(sorted(FRONT_ENDS)), kept=st.booleans())
def test_any_nesting_of_regions_gives_the_same_gradients(
    tree: Any, front_end: str, kept: bool
) -> None:
    torch.manual_seed(_layers(tree))
    ws = [torch.randn(4, 4) for _ in range(_layers(tree))]
    x = torch.randn(3, 4)
    policy = [torch.ops.aten.mm] if kept else None

    def loss(x: Tensor, *ws: Tensor) -> Tensor:
        left = iter(ws)

        def part(tree: Any) -> Callable[[Tensor], Tensor]:
            def fn(x: Tensor) -> Tensor:
                if isinstance(tree, int):
                    for _ in range(tree):
                        x = layer(next(left), x)
                    return x
                for i, inner in enumerate(tree):
                    x = fzero.remat(part(inner), policy=policy if i % 2 else None)(x)
                return x

            return fn

        return fzero.remat(part(tree))(x).square().mean()

    before = staged(loss, [x, *ws], front_end)
    after = rematerialise(before)
    assert "computed again" in after.log[-1]
    pairs = zip(run(before, [x, *ws]), run(after, [x, *ws]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("way", CHECKPOINTED)
def test_a_checkpoint_changes_no_number(way: str, front_end: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(5, 4), *[torch.randn(4, 4) for _ in range(3)]]
    results = []
    for fn in (plainly, WAYS[way]):
        program = staged(lambda x, *ws, fn=fn: stack(fn, ws, x), inputs, front_end)
        results.append(run(rematerialise(program), inputs))
    assert all(map(torch.equal, *results))
    assert any(g.any() for g in results[0])


def test_sequential_checkpoints_are_regions() -> None:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    x = torch.randn(3, 4)

    def loss(x: Tensor) -> Tensor:
        return checkpoint_sequential(layers, 2, x, use_reentrant=False).sum()

    assert "remat: 1 regions" in rematerialise(staged(loss, [x])).log[-1]


def test_what_a_random_operator_drew_is_drawn_again() -> None:
    """Different keys, different masks: equality above is not that of a Program without dropout."""
    inputs = [torch.randn(50, 4), torch.randn(4, 4)]
    program = rematerialise(staged(lambda x, w: stack(rematerialised, [w], x), inputs))
    assert computed_in_backward(program, torch.ops.aten.bernoulli.p) == 1
    assert not torch.equal(run(program, inputs, 1)[0], run(program, inputs, 2)[0])
    assert torch.equal(run(program, inputs, 1)[0], run(program, inputs, 1)[0])


# ----------------------------------------------------------------------------------- memory
def activations(program: Program) -> int:
    """Bytes at the peak beside what is there in any case: inputs and gradients."""
    return peak_bytes(program) - 2 * input_bytes(program)


def test_of_many_blocks_one_is_alive() -> None:
    """Twelve blocks cost what one does, and their borders; that is computed, not just hoped for."""

    def block(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.tanh(x @ w)
        return x

    def loss(way: Way, x: Tensor, *ws: Tensor) -> Tensor:
        for w in ws:
            x = way(block, w, x)
        return x.sum()

    x, ws = torch.randn(512, 8), [torch.randn(8, 8) for _ in range(12)]
    plain, one, again = (
        activations(rematerialise(staged(functools.partial(loss, way), [x, *ws[:depth]])))
        for way, depth in ((plainly, 12), (plainly, 1), (rematerialised, 12))
    )
    borders = 12 * x.nbytes
    assert again <= one + borders
    assert again < 0.4 * plain


def test_a_region_of_regions_keeps_fewer_borders() -> None:
    def blocks(way: Way, ws: Sequence[Tensor], x: Tensor) -> Tensor:
        for w in ws:
            x = way(lambda w, x: (torch.tanh(x @ w) @ w).sin().cos(), w, x)
        return x

    def loss(groups: int, x: Tensor, *ws: Tensor) -> Tensor:
        size = len(ws) // groups
        for i in range(0, len(ws), size):
            part = functools.partial(blocks, rematerialised, ws[i : i + size])
            x = rematerialised(part, x) if groups < len(ws) else part(x)
        return x.sum()

    inputs = [torch.randn(512, 8), *[torch.randn(8, 8) for _ in range(16)]]
    flat, nested = (
        activations(rematerialise(staged(functools.partial(loss, groups), inputs)))
        for groups in (16, 4)
    )
    assert nested < 0.7 * flat


def test_only_what_backward_needs_is_computed_again() -> None:
    """The last operators of a block, and what has no gradient, are not."""

    def block(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w) @ w + x.detach().exp()

    inputs = [torch.randn(3, 4), torch.randn(4, 4)]
    program = rematerialise(staged(lambda x, w: rematerialised(block, w, x).sum(), inputs))
    assert computed_in_backward(program, torch.ops.aten.tanh.default) == 1
    assert computed_in_backward(program, torch.ops.aten.exp.default) == 0


# ---------------------------------------------------------------------------------- policies
def _list(fn: Callable[..., Any], *args: Any) -> Any:
    return fzero.remat(fn, policy=[torch.ops.aten.mm])(*args)


def _function(fn: Callable[..., Any], *args: Any) -> Any:
    return fzero.remat(fn, policy=lambda op: op is torch.ops.aten.mm.default)(*args)


def _torchs(fn: Callable[..., Any], *args: Any) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        mm = op is torch.ops.aten.mm.default and args[0].shape == ctx.op_output.shape
        return CheckpointPolicy.MUST_SAVE if mm else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(fn, *args, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("way", [_list, _function, _torchs])
def test_a_policy_says_what_is_kept(way: Way) -> None:
    def block(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh((x @ w).sin() @ w)

    def products(way: Way) -> int:
        program = staged(lambda x, w: way(block, w, x).sum(), inputs)
        return computed_in_backward(rematerialise(program), torch.ops.aten.mm.default)

    inputs = [torch.randn(3, 4), torch.randn(4, 4)]
    assert products(way) == products(plainly)
    assert products(rematerialised) > products(plainly)


def test_unknown_contexts_are_refused() -> None:
    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), contextlib.nullcontext()

    def loss(x: Tensor) -> Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts).sum()

    with pytest.raises(TraceError, match="context_fn"):
        staged(loss, [torch.ones(2)])


# ------------------------------------------------------------------------------- the guard
class _DrawsAgain(torch.autograd.Function):
    """A checkpoint of one's own that no one can take over."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        (x,) = ctx.saved_tensors
        return grad * (F.dropout(x, 0.5) / x)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_second_mask_is_refused(front_end: str) -> None:
    with pytest.raises(TraceError, match="draws random numbers in backward"):
        staged(lambda x: _DrawsAgain.apply(x).sum(), [torch.ones(3)], front_end)


def test_without_regions_a_second_mask_would_be_drawn(monkeypatch: Any) -> None:
    """What the guard is for, should torch rename its internals."""
    monkeypatch.setattr("fzero.program.trace.checkpoints_as_regions", contextlib.nullcontext)

    def loss(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5).sin(), x, use_reentrant=False).sum()

    with pytest.raises(TraceError, match="draws random numbers in backward"):
        staged(loss, [torch.ones(3)], "torch.autograd.grad")


# ------------------------------------------------------------------------------- whole steps
class _OldStyle(torch.autograd.Function):
    """Has no setup_context: `torch.func.grad` refuses it, the second front end doesn't."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(6), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, way: str, old_style: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.way, self.old_style = WAYS[way], old_style

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.way(block, x)
        return _OldStyle.apply(x) if self.old_style else x


def _trained(way: str, stage: int, old_style: bool, executor: str = "traced") -> list[Tensor]:
    """Full parameters after two steps of two micro-batches."""
    torch.manual_seed(0)
    apply, params = fzero.functionalize(Net(way, old_style))
    cfg = fzero.Config(stage=stage, accum_steps=2, executor=executor)  # pyright: ignore
    step_fn = fzero.make_train_step(
        lambda params, x: apply(params, x).square().mean(), fzero.optim.sgd(0.3), cfg
    )
    params, opt_state = step_fn.init(params)
    if executor == "traced":
        log = "\n".join(step_fn.lower(params, opt_state, torch.randn(8, 6)).log)
        assert ("staged out through torch.autograd.grad" in log) == old_style
        assert ("remat: " in log) == (way != "plain")
    for _ in range(2):
        params, opt_state = step_fn(params, opt_state, torch.randn(8, 6))
    return list(fzero.unshard(params).values())


def _different(stage: int, ways: Sequence[str]) -> list[str]:
    """The ways to checkpoint with which training differs from training without."""
    wrong = []
    for old_style in (False, True):
        plain = _trained("plain", stage, old_style)
        for way in ways[old_style::2]:
            if not all(map(torch.equal, plain, _trained(way, stage, old_style))):
                wrong.append(f"{way}, old style {old_style}")
    return wrong


@pytest.mark.parametrize(
    "stage",
    [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3],
)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.quick("2-3", "1-1")
def test_training_is_the_same_bit_for_bit(world: int, stage: int) -> None:
    """Each front end with another checkpoint; the next stage the other way round."""
    ways = ("remat", "not re-entrant") if stage % 2 == 0 else ("re-entrant", "nested")
    ways = ways if world == 1 else ways[::-1]
    found = run_ranks(2, _different, stage, ways) if world == 2 else [_different(stage, ways)]
    assert found == [[]] * world


@pytest.mark.parametrize(("stage", "way"), [(0, "re-entrant"), (2, "nested"), (3, "remat")])
def test_the_eager_executor_recomputes_too(stage: int, way: str) -> None:
    plain, again = (_trained(w, stage, False, "eager") for w in ("plain", way))
    assert all(map(torch.equal, plain, again))
