"""A builder that is recorded and replayed gives what calling it gives, with less memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import fzero
from fzero import RankMismatchError, TraceError, tree
from fzero.distributed.dtensor import local_tensor
from fzero.optim import adam, sgd
from fzero.state.builder import record
from tests.ranks import fake_ranks, run_ranks

Builder = Callable[[], Any]


class GPT(nn.Module):
    """With what such models do to their weights: tied, rescaled, truncated, padded, cast."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(11, 8), nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tok.weight
        rates = [x.item() for x in torch.linspace(0, 0.2, 3)]
        self.apply(self._init)
        for rate, block in zip(rates, self.blocks.layers, strict=True):
            with torch.no_grad():
                block.linear1.weight.mul_(1 - rate)  # pyright: ignore
            nn.init.trunc_normal_(block.linear2.weight, std=0.02, a=-0.03, b=0.03)  # pyright: ignore

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0, 0.02)
            module.weight.data[0].zero_()


def _params_of(module: nn.Module) -> dict[str, Tensor]:
    return fzero.functionalize(module)[1]


def _forked() -> list[Tensor]:
    """Draws from generators that are seeded, left and gone back to."""
    first = torch.randn(20)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        inside = torch.randn(4)
    own = torch.empty(3, 3).normal_(generator=torch.Generator().manual_seed(9))
    second = torch.randn(6)
    torch.manual_seed(7)
    return [first, inside, own, second, torch.rand(2)]


def _until_small() -> dict[str, Tensor]:
    """Reads what it draws."""
    torch.randn(3)
    w, tries = torch.randn(4, 4), torch.tensor(0)
    while w.abs().max() > 1.5:
        w = torch.where(w.abs() > 1.5, torch.randn(4, 4), w)
        tries += 1
    return {"w": w, "tries": tries, "after": torch.rand(2, dtype=torch.float64)}


def _constants() -> dict[str, Any]:
    table = torch.from_numpy(np.arange(6.0))
    view = torch.arange(12).view(3, 4).t()
    return {"table": table, "more": table.clone().add_(1), "view": view, "one": torch.tensor(1.0)}


def _orthogonal() -> list[Tensor]:
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    sparse = nn.init.sparse_(torch.empty(6, 4), 0.5)
    return [nn.init.orthogonal_(torch.empty(5, 7)), sparse, conjugate]


def _data_assigned() -> dict[str, Tensor]:
    linear = nn.Linear(3, 3)
    linear.weight.data = torch.randn(3, 3)
    return dict(linear.named_parameters())


BUILDERS: dict[str, Builder] = {
    "linear": lambda: dict(nn.Linear(7, 15).named_parameters()),
    "conv": lambda: _params_of(nn.Conv2d(3, 8, 3)),
    "embedding": lambda: _params_of(nn.Embedding(9, 5, padding_idx=2)),
    "lstm": lambda: _params_of(nn.LSTM(5, 6, 2, bidirectional=True)),
    "batch norm": lambda: dict(nn.BatchNorm2d(4).state_dict()),
    "weight norm": lambda: _params_of(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))),
    "spectral norm": lambda: _params_of(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))),
    "gpt": lambda: _params_of(GPT()),
    "gpt in half": lambda: _params_of(GPT().half()),
    "gpt twice named": lambda: dict(GPT().named_parameters(remove_duplicate=False)),
    "forked": _forked,
    "until small": _until_small,
    "constants": _constants,
    "orthogonal": _orthogonal,
    "data assigned": _data_assigned,
    "nothing": dict,
}


def _replayed(builder: Builder) -> Any:
    recording = record(builder)
    leaves: dict[int, Tensor] = {}
    recording.replay(lambda i, x: leaves.update({i: x.clone()}))
    return tree.unflatten(recording.spec, [leaves[i] for i in range(len(leaves))])


def _assert_same(builder: Builder) -> None:
    torch.manual_seed(5)
    torch.rand(3)
    before = torch.get_rng_state()
    plain, after = builder(), torch.get_rng_state()
    torch.set_rng_state(before)
    ours = _replayed(builder)
    assert torch.equal(torch.get_rng_state(), after)
    assert tree.paths(ours) == tree.paths(plain)
    for a, b in zip(tree.leaves(ours), tree.leaves(plain), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# --- values
@pytest.mark.parametrize("name", BUILDERS)
def test_a_replay_is_a_call_bit_for_bit(name: str) -> None:
    _assert_same(BUILDERS[name])


_FILLS: list[Callable[[Tensor], Any]] = [
    lambda x: x.normal_(),
    lambda x: x.uniform_(-1, 1),
    lambda x: x.bernoulli_(0.3),
    lambda x: x.zero_(),
    lambda x: x[:1].fill_(2),
    lambda x: x.t().mul_(0.5),
    lambda x: x.copy_(torch.randn_like(x).sort()[0]),
    lambda x: nn.init.trunc_normal_(x, std=1.0, a=-1.0, b=1.0),
    lambda x: x.add_(torch.poisson(torch.full_like(x, 3.0))),
    lambda x: x.div_(x.abs().max().item() + 1),
    lambda x: torch.manual_seed(x.numel()),
]


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(range(len(_FILLS)))), max_size=12),
)
def test_any_fills_in_any_order(shapes: Any, fills: Any) -> None:
    def builder() -> list[Tensor]:
        leaves = [torch.zeros(shape) for shape in shapes]
        for place, fill in fills:
            x = leaves[place % len(leaves)]
            if x.numel():
                _FILLS[fill](x)
        return leaves

    _assert_same(builder)


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.quick("2")
def test_init_gives_every_rank_its_part(world: int) -> None:
    assert all(run_ranks(world, _init_everything, timeout=120))


def _init_everything() -> bool:
    for stage in range(4):
        for precision in (None, "bf16"):
            cfg = fzero.Config(stage=stage, precision=precision, frozen=lambda name: "pos" in name)
            for name in ("gpt", "linear", "lstm", "until small", "conv"):
                torch.manual_seed(5)
                plain = fzero.make_train_step(_no_model, adam(0.1), cfg).init(BUILDERS[name]())
                torch.manual_seed(5)
                ours = fzero.make_train_step(_no_model, adam(0.1), cfg).init(BUILDERS[name])
                for a, b in zip(*map(tree.leaves, (ours, plain)), strict=True):
                    assert type(a) is type(b)
                    assert torch.equal(*map(local_tensor, (a, b))), (stage, name)
    return True


def _no_model(params: Any, batch: Any) -> Any:
    raise AssertionError


def test_a_built_model_trains() -> None:
    apply, _ = fzero.functionalize(nn.Linear(3, 2, device="meta"))

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    def train(start: Any) -> Any:
        step_fn = fzero.make_train_step(model_fn, sgd(0.1))
        params, opt_state = step_fn.init(start)
        return fzero.unshard(step_fn(params, opt_state, torch.ones(4, 3))[0])

    torch.manual_seed(0)
    start = _params_of(nn.Linear(3, 2))
    torch.manual_seed(0)
    ours = train(lambda: _params_of(nn.Linear(3, 2)))
    torch.testing.assert_close(ours, train(start), rtol=0, atol=0)


# --- memory
@pytest.mark.parametrize("again", ["fill", "read", "rescale"])
def test_a_rank_holds_its_part_and_a_few_leaves(again: str) -> None:
    width, depth, world = 256, 20, 8
    leaf = width * width * 4

    def builder() -> dict[str, Tensor]:
        # all weights are there once before the first of them is initialised
        net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])
        for weight in net.parameters():
            if again == "fill":
                weight.data.normal_(0, 0.02)
            elif again == "read":
                nn.init.trunc_normal_(weight, std=0.02)
            else:
                weight.data.mul_(0.5)
        return _params_of(net)

    cfg = fzero.Config(stage=3)
    with fake_ranks(world):
        peak = _peak(lambda: fzero.make_train_step(_no_model, sgd(0.1), cfg).init(builder))
        whole = _peak(lambda: fzero.make_train_step(_no_model, sgd(0.1), cfg).init(builder()))
    assert whole > depth * leaf
    assert peak < depth * leaf / world + 5 * leaf


def _peak(run: Callable[[], Any]) -> int:
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
        record_function("## measured"),
    ):
        kept = run()
    del kept
    events: Any = profiled.profiler.kineto_results.events()  # pyright: ignore
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak


def test_a_leaf_is_done_after_its_last_use() -> None:
    def builder() -> list[Tensor]:
        a, b = torch.zeros(2), torch.zeros(3)
        b.normal_()
        a.add_(1)
        return [a, b, torch.ones(1), a[:1]]

    order: list[int] = []
    record(builder).replay(lambda i, x: order.append(i))
    assert order == [1, 0, 3, 2]


# --- errors
def test_what_needs_memory_is_an_error_with_the_way_on() -> None:
    def builder() -> dict[str, Tensor]:
        return {"w": torch.from_numpy(torch.randn(3).numpy())}

    state = torch.get_rng_state()
    with pytest.raises(TraceError, match=r"step_fn.init\(build\(\)\)"):
        record(builder)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_state_from_elsewhere_is_an_error() -> None:
    state = torch.Generator().manual_seed(3)
    torch.rand(5, generator=state)

    def builder() -> Tensor:
        a = torch.rand(2)
        torch.set_rng_state(state.get_state())
        return a + torch.rand(2)

    with pytest.raises(TraceError, match=r"torch\.manual_seed"):
        record(builder)


def test_a_leaf_that_is_no_tensor_is_named() -> None:
    step_fn = fzero.make_train_step(_no_model, sgd(0.1))
    with pytest.raises(fzero.ShardError, match=r"params\['n'\] is a int"):
        step_fn.init(lambda: {"n": 3, "w": torch.ones(2)})


def test_a_model_built_on_meta_has_no_values() -> None:
    step_fn = fzero.make_train_step(_no_model, sgd(0.1))
    with pytest.raises(fzero.ShardError, match=r"params\['weight'\] is on the meta device"):
        step_fn.init(lambda: _params_of(nn.Linear(2, 2, bias=False, device="meta")))


@pytest.mark.parametrize("how", ["state", "seed", "constant"])
def test_ranks_that_would_build_other_values_raise(how: str) -> None:
    for message in run_ranks(2, _build_own, how):
        assert "torch.manual_seed" in message


def _build_own(how: str) -> str:
    rank = dist.get_rank()
    torch.manual_seed(rank if how == "state" else 0)

    def builder() -> dict[str, Tensor]:
        w = torch.randn(3)
        if how == "seed":
            torch.manual_seed(rank)
        constant = torch.from_numpy(np.full(2, rank)) if how == "constant" else torch.randn(2)
        return {"w": w, "v": constant}

    try:
        fzero.make_train_step(_no_model, sgd(0.1)).init(builder)
    except RankMismatchError as error:
        return str(error)
    return "no error"
