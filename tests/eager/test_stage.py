"""`stage` changes when parameters are gathered, and never a value."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

import fzero
from fzero import ConfigError, FzeroError
from fzero.functional.remat import remat
from fzero.optim import sgd
from tests.ranks import fake_ranks, run_ranks

Fn = Callable[..., Any]


def _as_it_is(fn: Fn) -> Fn:
    return fn


def _train(model_of: Callable[[Fn], Fn], wrap: Fn, start: Any, batch: Any, **fields: Any) -> Any:
    """Full parameters, aux and loss after two steps of `model_of(wrap)`."""
    cfg = fzero.Config(**{"executor": "eager", **fields})
    step_fn = fzero.make_train_step(model_of(wrap), sgd(0.1, momentum=0.9), cfg)
    params, opt_state = step_fn.init(start)
    for _ in range(2):
        params, opt_state = step_fn(params, opt_state, batch)
    return fzero.unshard(params), opt_state.metrics


def _assert_same(model_of: Callable[[Fn], Fn], start: Any, batch: Any, **fields: Any) -> None:
    staged = _train(model_of, fzero.stage, start, batch, **fields)
    plain = _train(model_of, _as_it_is, start, batch, **fields)
    for a, b in zip(pytree.tree_leaves(staged), pytree.tree_leaves(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# --- laws
@st.composite
def _chains(draw: st.DrawFn) -> tuple[list[dict[str, Tensor]], list[int], Tensor]:
    """Layers of any widths, in an order that may use one twice or never."""
    width = draw(st.integers(1, 5))
    hidden = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    layers = [{"up": _values(width, n), "down": _values(n, width)} for n in hidden]
    order = draw(st.lists(st.integers(0, len(layers) - 1), min_size=1, max_size=5))
    return layers, order, _values(draw(st.integers(1, 3)), width)


@settings(max_examples=15)
@given(_chains(), st.booleans())
def test_any_chain_is_the_same(chain: Any, reshard: bool) -> None:
    layers, order, x = chain

    def model_of(wrap: Fn) -> Fn:
        @wrap
        def block(p: Any, h: Tensor) -> Tensor:
            return h + torch.tanh(F.dropout(h @ p["up"], 0.3)) @ p["down"]

        def model_fn(params: Any, batch: Tensor) -> Tensor:
            for i in order:
                batch = block(params[i], batch)
            return batch.square().mean()

        return model_fn

    _assert_same(model_of, layers, x, reshard_after_forward=reshard)


def _gpt(wrap: Fn) -> tuple[Fn, Any]:
    """A GPT with tied embeddings, a frozen, an unused and a twice used leaf; and its parameters."""
    block, _ = fzero.functionalize(_Block())
    block = wrap(block)
    start = {
        "tok": _values(11, 8),
        "blocks": [_block_params(i) for i in range(2)],
        "frozen": _values(7, 8),
        "unused": _values(3, 5),
    }

    def model_fn(params: Any, batch: Any) -> Tensor:
        tokens, wanted = batch
        h = params["tok"][tokens] + params["frozen"]
        for p in [*params["blocks"], params["blocks"][0]]:
            h = block(p, h)
        return F.cross_entropy((h @ params["tok"].t()).flatten(0, 1), wanted.flatten())

    return model_fn, start


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 24)
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8, bias=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))


def _block_params(i: int) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(i)
        return fzero.functionalize(_Block().double())[1]


_CONFIGS: list[dict[str, Any]] = [
    {"stage": stage, "accum_steps": accum, "clip_norm": clip, "frozen": "frozen"}
    for stage, accum, clip in ((0, 4, 0.05), (1, 4, 0.05), (2, 1, None), (3, 1, None), (3, 4, 0.05))
]


@pytest.mark.parametrize("i", range(len(_CONFIGS)))
@pytest.mark.parametrize("world", [1, 2])
def test_a_gpt_trains_as_in_the_traced_executor(world: int, i: int) -> None:
    for errors in _gpt_errors(world):
        assert errors[i] <= 1e-12


@functools.cache  # one job per world for all configs
def _gpt_errors(world: int) -> list[list[float]]:
    return run_ranks(world, _train_gpts, timeout=240)


def _train_gpts() -> list[float]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(11, (4, 7), generator=generator)
    found = []
    for fields in _CONFIGS:
        runs = [
            _train(lambda wrap: _gpt(wrap)[0], fzero.stage, _gpt(_as_it_is)[1], batch, **more)
            for batch in [(tokens, tokens.flip(1))]
            for more in (fields, fields | {"executor": "traced"})
        ]
        pairs = zip(*map(pytree.tree_leaves, runs), strict=True)
        found.append(max((a.double() - b.double()).abs().max().item() for a, b in pairs))
    return found


# --- what a staged function may take and give
def test_outside_of_a_step_it_is_the_function() -> None:
    staged = fzero.stage(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    assert torch.equal(staged(x), staged.__wrapped__(x))  # pyright: ignore
    assert fzero.stage(lambda p, x: (p, x))({"w": 1}, 2) == ({"w": 1}, 2)


def test_any_tree_goes_in_and_comes_out() -> None:
    def model_of(wrap: Fn) -> Fn:
        @wrap
        def block(p: Any, given: Any, count: int, *, names: Any) -> Any:
            tokens, mask = given["tokens"], given["mask"]
            h = p["w"][tokens] * count
            return {"h": h, "same": tokens, "none": None, "n": len(names)}, (mask & (tokens > 1),)

        def model_fn(params: Any, tokens: Tensor) -> Any:
            out, (mask,) = block(
                params, {"tokens": tokens, "mask": tokens > 0}, 3, names=["a", None]
            )
            assert out["none"] is None
            assert out["n"] == 2
            loss = (out["h"] * mask.unsqueeze(-1)).square().mean()
            return loss, {"tokens": out["same"], "mask": mask}

        return model_fn

    _assert_same(model_of, {"w": _values(6, 3)}, torch.tensor([0, 2, 2, 5]), has_aux=True)


def test_an_output_that_is_not_used_and_a_call_that_is_not() -> None:
    def model_of(wrap: Fn) -> Fn:
        block = wrap(lambda p, x: (x @ p["a"], x @ p["b"]))

        def model_fn(params: Any, x: Tensor) -> Tensor:
            block(params, x)
            return block(params, x)[0].square().mean()

        return model_fn

    _assert_same(model_of, {"a": _values(4, 4), "b": _values(4, 4)}, _values(3, 4))


def test_inputs_get_their_gradients() -> None:
    def model_of(wrap: Fn) -> Fn:
        block = wrap(lambda p, x, y: torch.tanh(x @ p["w"]) * y)

        def model_fn(params: Any, x: Tensor) -> Tensor:
            h = x * params["gain"]
            return block({"w": params["w"]}, h, h.exp()).mean()

        return model_fn

    _assert_same(model_of, {"w": _values(4, 4), "gain": _values(4)}, _values(3, 4))


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_autocast_holds_in_the_second_run(inner: torch.dtype) -> None:
    def model_of(wrap: Fn) -> Fn:
        block = wrap(lambda p, x: torch.tanh(x @ p["w"]))

        def model_fn(params: Any, x: Tensor) -> Tensor:
            with torch.autocast("cpu", inner, enabled=inner == torch.bfloat16):
                # two weights: the gradients of two uses would be added in the low precision
                return block(params[0], block(params[1], x)).float().mean()

        return model_fn

    start = [{"w": _values(4, 4).float()}, {"w": _values(4, 4).float() / 2}]
    _assert_same(model_of, start, _values(3, 4).float())


def test_remat_inside() -> None:
    def model_of(wrap: Fn) -> Fn:
        def half(w: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(F.dropout(x, 0.5) @ w)

        block = wrap(lambda p, x: remat(half)(p["w"], x))
        return lambda params, x: block(params, block(params, x)).square().mean()

    _assert_same(model_of, {"w": _values(4, 4)}, _values(3, 4))


@pytest.mark.parametrize("through", ["torch.autograd", "torch.func"])
def test_second_derivatives(through: str) -> None:
    def model_of(wrap: Fn) -> Fn:
        block = wrap(lambda p, x: torch.tanh(x @ p["w"]))

        def model_fn(params: Any, x: Tensor) -> Tensor:
            def energy(x: Tensor) -> Tensor:
                return block(params, block(params, x)).square().sum()

            if through == "torch.func":
                return torch.func.grad(energy)(x).square().mean()
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(energy(x), x, create_graph=True)
            return slope.square().mean()

        return model_fn

    _assert_same(model_of, {"w": _values(4, 4)}, _values(3, 4))


# --- errors
def test_a_tensor_that_is_no_argument_is_an_error() -> None:
    def model_fn(params: Any, x: Tensor) -> Tensor:
        h = x * params["gain"]
        return fzero.stage(lambda p, x: x @ p["w"] + h)({"w": params["w"]}, x).mean()

    with pytest.raises(FzeroError, match=r"'gain'.*not among its arguments"):
        _train(lambda _: model_fn, _as_it_is, {"w": _values(4, 4), "gain": _values(4)}, _values(4))


@pytest.mark.parametrize("what", ["the parameter 'w'", r"an argument of shape \(4,\)"])
def test_an_argument_changed_in_place_is_an_error(what: str) -> None:
    @fzero.stage
    def block(p: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            (p["w"] if "parameter" in what else x).zero_()
        return x @ p["w"]

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return block(params, x * 2).mean()

    with pytest.raises(FzeroError, match=f"changed {what} in place"):
        _train(lambda _: model_fn, _as_it_is, {"w": _values(4, 4)}, _values(4))


def test_only_functions_are_staged() -> None:
    with pytest.raises(ConfigError, match=r"stage\(block\)\(params, x\)"):
        fzero.stage(torch.ones(2))  # pyright: ignore


# --- memory
def test_a_step_holds_one_block_at_a_time() -> None:
    width, depth, world = 64, 8, 4
    block_bytes = 2 * width * 4 * width * 4
    with fake_ranks(world):
        staged, plain = (_peak(wrap, width, depth) for wrap in (fzero.stage, _as_it_is))
    params = depth * block_bytes
    # parameters and the sum of gradients are there in shards; the rest is what a step adds
    assert plain - 2 * params // world > params
    assert staged - 2 * params // world < 5 * block_bytes


def _peak(wrap: Fn, width: int, depth: int) -> int:
    """Most bytes of tensors during a step of a deep MLP."""
    block = wrap(lambda p, x: x + torch.relu(x @ p["up"]) @ p["down"])

    def model_fn(params: Any, x: Tensor) -> Tensor:
        for p in params:
            x = block(p, x)
        return x.mean()

    step_fn = fzero.make_train_step(model_fn, sgd(0.1), fzero.Config(executor="eager"))
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        state = step_fn.init(
            [{name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(depth)]
        )
        state = step_fn(*state, torch.ones(1, width))
        with record_function("## measured"):
            step_fn(*state, torch.ones(1, width))
    events: Any = profiled.profiler.kineto_results.events()  # pyright: ignore
    (start,) = [e.start_ns() for e in events if e.name() == "## measured"]
    held = peak = 0
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    for when, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held) if when >= start else 0
    return peak
