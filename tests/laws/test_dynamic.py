"""A recorded step serves batches of other lengths with the bits of a recording of their own, or is
recorded again: whatever the model does with sizes. See [Note: dynamic dims]."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from tests.ranks import run_ranks

WIDTH = 8


class Net(nn.Module):
    """A module around a function of itself, a matrix `w` and a batch of rows of `WIDTH`."""

    def __init__(self, fn: Callable[[Any, Tensor], Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.fn, self.inner = fn, inner
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


def _numbers(net: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    places = torch.arange(length, dtype=x.dtype).sum() + torch.full((length,), length).sum()
    return (x @ net.w).sum(1) / length + places


def _causal(net: Any, x: Tensor) -> Tensor:
    scores = (x @ net.w) @ x.transpose(1, 2)
    mask = torch.tril(torch.ones(x.shape[1], x.shape[1]))
    return scores.masked_fill(mask == 0, -1e9).softmax(-1) @ x


def _shifted(net: Any, x: Tensor) -> Tensor:
    h = x @ net.w
    one_more = torch.zeros(x.shape[0], x.shape[1] + 1, WIDTH)
    one_more[:, 1:] = h
    one_more[:, 0] = 1.0
    one_more[:, :-1].mul_(2)
    return one_more


def _turned(net: Any, x: Tensor) -> Tensor:
    both = torch.stack([x.sum(1), x.mean(1)])  # its second size is the rows', and then it is not
    return net.inner(both.transpose_(0, 1)) @ net.w


def _halves(net: Any, x: Tensor) -> Tensor:
    h, middle = x @ net.w, x.shape[1] // 2
    return h[:, :middle].sum() + 2 * h[:, middle:].sum()


def _loop(net: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for i in range(x.shape[1]):
        h = torch.tanh(h @ net.w + x[:, i])
    return h


def _checkpoint(net: Any, x: Tensor) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        return torch.tanh(F.dropout(h, 0.5) @ net.w)

    return torch.utils.checkpoint.checkpoint(inner, x @ net.w, use_reentrant=False)


def _inner(net: Any, x: Tensor) -> Tensor:
    return net.inner(x @ net.w)


def _across(net: Any, x: Tensor) -> Tensor:
    return net.inner((x @ net.w).transpose(1, 2))


# a model, and whether lengths from 2 on are served without recordings of their own
MODELS: Mapping[str, tuple[Callable[[], Net], bool]] = MappingProxyType(
    {
        "linear": (lambda: Net(_inner, nn.Linear(WIDTH, WIDTH)), True),
        "numbers": (lambda: Net(_numbers), True),
        "causal mask": (lambda: Net(_causal), True),
        "encoder": (
            lambda: Net(_inner, nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)),
            True,
        ),
        "encoder without dropout": (
            lambda: Net(
                _inner, nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0, batch_first=True)
            ),
            True,
        ),
        "dropout": (lambda: Net(lambda net, x: F.dropout(x @ net.w, 0.3)), True),
        "noise": (lambda: Net(lambda net, x: x @ net.w + torch.randn(*x.shape)), True),
        "checkpoint": (lambda: Net(_checkpoint), True),
        "convolution": (lambda: Net(_across, nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), True),
        # a kernel lays out its result otherwise than its fake one: that is settled for one length
        "batch norm": (
            lambda: Net(_across, nn.BatchNorm1d(WIDTH, track_running_stats=False)),
            False,
        ),
        "joined": (lambda: Net(lambda net, x: torch.cat([x @ net.w, x[:, -1:]], 1)), True),
        "written slices": (lambda: Net(_shifted), True),
        "turned in place": (lambda: Net(_turned, nn.Linear(WIDTH, WIDTH)), True),
        "a size in a float": (lambda: Net(lambda net, x: (x @ net.w) / x.shape[1] ** 0.5), False),
        "branch": (
            lambda: Net(lambda net, x: (x @ net.w) * (2 if x.shape[1] > 6 else 3)),
            False,
        ),
        "even or odd": (lambda: Net(_halves), False),
        "a loop over rows": (lambda: Net(_loop), False),
        "a table by length": (
            lambda: Net(lambda net, x: (x @ net.w) * {5: 1, 7: 2}.get(x.shape[1], 3)),
            False,
        ),
    }
)


def _step(name: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    apply, params = fzero.functionalize(MODELS[name][0]())

    def model_fn(params: Any, batch: Tensor) -> Tensor:
        return apply(params, batch).square().mean()

    return (
        lambda: fzero.make_train_step(
            model_fn, fzero.optim.sgd(0.1), fzero.Config(donate=False, dynamic=True)
        ),
        params,
    )


def _batch(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rows + length)
    return torch.randn(rows, length, WIDTH, generator=generator)


# torch 2.11 fails inside of products of two batches of matrices with symbols: recorded one by one
OLD = torch.__version__.startswith("2.11")
BATCHES_OF_MATRICES = ("causal mask", "encoder", "encoder without dropout")
QUICK = (
    "linear",
    "numbers",
    "dropout",
    "written slices",
    "turned in place",
    "checkpoint",
    "batch norm",
    "branch",
    "even or odd",
)
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 13)).filter(lambda sizes: sizes != (1, 1))


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in MODELS]
)
@given(sizes=st.lists(SIZES, min_size=2, max_size=2))
@settings(max_examples=1)
@pytest.mark.quick("written slices", "batch norm", "numbers", "dropout", "branch")
def test_every_batch_has_the_bits_of_a_recording_of_its_own(
    name: str, sizes: list[tuple[int, int]]
) -> None:
    make, params = _step(name)
    step_fn = make()
    state = step_fn.init(params)
    for length in (5, 8):
        state = step_fn(*state, _batch(3, length))
    for rows, length in sizes:
        batch = _batch(rows, length)
        own = make()
        own.init(params)
        found, wanted = step_fn(*state, batch), own(*state, batch)
        torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0, equal_nan=True)
        loss, other = (one.metrics["loss"] for _, one in (found, wanted))
        torch.testing.assert_close(loss, other, rtol=0, atol=0, equal_nan=True)
        state = found


@pytest.mark.parametrize(
    ("name", "more"),
    # the length alone is followed as both are, by fewer symbols
    [(name, i % 3 > 0) for i, name in enumerate(MODELS)],
    ids=lambda x: x if isinstance(x, str) else "rows and length" if x else "length",
)
def test_two_recordings_serve_all_lengths_where_nothing_else_changes(name: str, more: bool) -> None:
    calls: list[int] = []
    # nor rows of a linear layer's input that is not dense
    fails = OLD and (name in BATCHES_OF_MATRICES or (name == "turned in place" and more))
    net, serves = MODELS[name][0](), MODELS[name][1] and not fails
    net.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[1]))
    apply, params = fzero.functionalize(net)

    def model_fn(params: Any, batch: Tensor) -> Tensor:
        return apply(params, batch).square().mean()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config(dynamic=True))
    state = step_fn.init(params)
    for rows, length in ((3, 5), (3 + more, 8)):
        state = step_fn(*state, _batch(rows, length))
    before = len(calls)
    for rows, length in ((2, 13), (5, 2), (3, 9), (4, 5)):
        state = step_fn(*state, _batch(rows if more else 3, length))
    assert (len(calls) == before) == serves


class Images(nn.Module):
    """Convolutions over images of any size, or of one size in any number."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, WIDTH, 3, stride=2, padding=1)
        self.last = nn.Linear(WIDTH * 9 if flat else WIDTH, 2)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        x = F.dropout(torch.relu(self.second(x)), 0.2)
        return self.last(x.flatten(1) if self.flat else x.mean((2, 3)))


@pytest.mark.parametrize("flat", [True, False])
def test_images_have_the_bits_of_a_recording_of_their_own(flat: bool) -> None:
    torch.manual_seed(0)
    calls: list[int] = []
    net = Images(flat=flat)
    net.register_forward_pre_hook(lambda module, args: calls.append(args[0].dim()))
    apply, params = fzero.functionalize(net)

    def make() -> tuple[Any, Any]:
        step_fn = fzero.make_train_step(
            lambda params, batch: apply(params, batch).square().mean(),
            fzero.optim.sgd(0.1),
            fzero.Config(donate=False, dynamic=True),
        )
        return step_fn, step_fn.init(params)

    def images(rows: int, side: int) -> Tensor:
        side = 12 if flat else side
        generator = torch.Generator().manual_seed(100 * rows + side)
        return torch.randn(rows, 3, side, side, generator=generator)

    step_fn, state = make()
    for rows, side in ((4, 8), (3, 12)):
        step_fn(*state, images(rows, side))
    # pooling of torch 2.11 asks whether a side is even
    for rows, side in ((2, 10 if OLD else 9), (7, 14 if OLD else 13), (1, 12)):
        batch = images(rows, side)
        before = len(calls)
        found = step_fn(*state, batch)
        assert (len(calls) == before) == (rows > 1)
        own, _ = make()
        torch.testing.assert_close(found[0], own(*state, batch)[0], rtol=0, atol=0)
    # where memory lies otherwise than was recorded, nothing that was recorded is used
    before = len(calls)
    last = images(7, 13).to(memory_format=torch.channels_last)
    torch.testing.assert_close(step_fn(*state, last)[0], step_fn(*state, images(7, 13))[0])
    assert len(calls) > before


def test_lower_gives_the_program_of_the_very_batch() -> None:
    make, params = _step("linear")
    step_fn, own = make(), make()
    state = step_fn.init(params)
    for length in (5, 8, 13):
        state = step_fn(*state, _batch(3, length))
    own.init(params)
    program = step_fn.lower(*state, _batch(3, 13))
    assert program.peak_bytes() == own.lower(*state, _batch(3, 13)).peak_bytes()
    program.verify()


def test_what_is_read_from_outside_counts_for_every_length() -> None:
    factor = [1.0]

    def model_fn(params: Any, batch: Tensor) -> Tensor:
        return factor[0] * (batch @ params["w"]).square().mean()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.0), fzero.Config(dynamic=True))
    state = step_fn.init({"w": torch.eye(WIDTH)})
    for i, length in enumerate((5, 8, 13, 9, 13, 9)):
        factor[0] += i > 3
        state = step_fn(*state, _batch(3, length))
        wanted = factor[0] * _batch(3, length).square().mean()
        torch.testing.assert_close(state[1].metrics["loss"], wanted)


def test_a_kernel_that_lays_out_some_lengths_otherwise_is_found_at_each() -> None:
    with torch.library._scoped_library("fzero_tests_dynamic", "FRAGMENT") as lib:
        lib.define("turned(Tensor x) -> Tensor")

        def turned(x: Tensor) -> Tensor:
            # only of long ones
            return x.clone() if x.shape[0] < 9 else x.t().contiguous().t()

        lib.impl("turned", turned, "CPU")
        torch.library.register_fake("fzero_tests_dynamic::turned", torch.clone, lib=lib)
        calls = []

        def fn(params: Any, batch: Tensor) -> Tensor:
            calls.append(batch.shape[0])
            rows = torch.ops.fzero_tests_dynamic.turned(batch)
            return rows.as_strided((4,), (1,)) * params["w"].sum()

        run = fzero.sharded(fn, fzero.Config(dynamic=True))
        params = {"w": torch.ones(2)}
        for length in (5, 7, 6, 12, 12, 6, 13):
            batch = _batch(1, length)[0]
            assert torch.equal(run(params, batch), batch.flatten()[:4] * 2), length
        # what laid out one length otherwise is not trusted with others
        assert calls[-3:] == [12, 6, 13]


def test_strides_that_are_restored_are_those_of_one_length() -> None:
    with torch.library._scoped_library("fzero_tests_restored", "FRAGMENT") as lib:
        lib.define("turned(Tensor x) -> Tensor")

        def turned(x: Tensor) -> Tensor:
            return x.t().contiguous().t()

        # the fake kernel is wrong about the recorded length alone
        lib.impl("turned", lambda x: x.clone() if x.shape[0] == 7 else turned(x), "CPU")
        torch.library.register_fake("fzero_tests_restored::turned", turned, lib=lib)

        def fn(params: Any, batch: Tensor) -> Tensor:
            return torch.ops.fzero_tests_restored.turned(batch) * params["w"].sum()

        run = fzero.sharded(fn, fzero.Config(dynamic=True))
        for length in (5, 7, 9, 9, 12, 12):
            batch = _batch(1, length)[0]
            assert torch.equal(run({"w": torch.ones(2)}, batch), 2 * batch), length


def test_functions_of_shards_serve_other_lengths_too() -> None:
    calls = []

    def loss_fn(params: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(batch.shape)
        rows = batch @ params["w"]
        return rows.square().mean(), rows

    grad_fn = fzero.value_and_grad(loss_fn, fzero.Config(dynamic=True), has_aux=True)
    params = {"w": torch.randn(WIDTH, WIDTH, dtype=torch.float64)}
    recorded = 0
    for length in (5, 8, 13, 2, 9):
        batch = _batch(3, length).double()
        (loss, rows), grads = grad_fn(params, batch)
        recorded = len(calls) if length == 8 else recorded
        w = params["w"].clone().requires_grad_()
        wanted = (batch @ w).square().mean()
        torch.testing.assert_close(loss, wanted.detach())
        torch.testing.assert_close(rows, (batch @ w).detach())
        torch.testing.assert_close(grads["w"], torch.autograd.grad(wanted, w)[0])
    assert len(calls) == recorded


def test_a_donated_argument_of_another_length_is_not_taken_for_a_result_of_the_first() -> None:
    def keep(params: Any, batch: Tensor) -> Tensor:
        return (params["w"] @ batch.sum(1).sum(0)).expand(3, 5, WIDTH) + 1.0

    step = fzero.jit(keep, fzero.Config(dynamic=True), donate_argnums=(1,))
    params = {"w": torch.eye(WIDTH)}
    for length in (8, 5, 7, 5, 3):
        batch = _batch(3, length)
        wanted = keep(params, batch)
        torch.testing.assert_close(step(params, batch), wanted)


def test_what_the_size_has_become_elsewhere_is_never_of_another_length() -> None:
    def numbers(params: Any, batch: Tensor) -> Any:
        length = batch.shape[1]
        return {
            "tensor": torch.tensor(float(length)) * params["w"][0, 0],
            "new": batch.new_tensor([length, 2 * length]),
            "list": torch.tensor(list(range(length))),
            "text": batch.sum() * len(f"{length:>{length}}"),
            "scaled": F.scaled_dot_product_attention(batch, batch, batch, scale=length**-0.5),
            "parts": torch.stack([x.sum() for x in batch.split(2, dim=1)]).sum(),
        }

    for name in numbers({"w": torch.eye(WIDTH)}, _batch(3, 5)):

        def one(params: Any, batch: Tensor, name: str = name) -> Tensor:
            return numbers(params, batch)[name]

        run = fzero.sharded(one, fzero.Config(dynamic=True))
        params = {"w": torch.eye(WIDTH)}
        for length in (5, 8, 11, 5, 6):
            batch = _batch(3, length)
            torch.testing.assert_close(run(params, batch), one(params, batch))


def _lengths_of_ranks() -> Any:
    """Losses of steps in which each rank has a length of its own, and what plain PyTorch gives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    w = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    calls: list[int] = []

    def model_fn(params: Any, batch: Tensor) -> Tensor:
        calls.append(batch.shape[1])
        return torch.tanh(batch @ params["w"]).square().mean()

    step_fn = fzero.make_train_step(
        model_fn, fzero.optim.sgd(0.5), fzero.Config(stage=3, dynamic=True)
    )
    state = step_fn.init({"w": w})
    plain, losses, wanted = w.clone(), [], []
    lengths = [(5, 5), (8, 5), (5, 8), (8, 9), (3, 13), (13, 3), (6, 6)]
    for length in lengths:
        batches = [_batch(3, n).double() + i for i, n in enumerate((*length, *length)[:world])]
        state = step_fn(*state, batches[rank])
        losses.append(state[1].metrics["loss"].item())
        plain.requires_grad_()
        loss = torch.stack([torch.tanh(x @ plain).square().mean() for x in batches]).mean()
        (grad,) = torch.autograd.grad(loss, plain)
        plain = (plain - 0.5 * grad).detach()
        wanted.append(loss.item())
    full = fzero.unshard(state[0])["w"]
    return losses, wanted, (full - plain).abs().max().item(), len(calls)


def test_ranks_have_lengths_of_their_own() -> None:
    for losses, wanted, apart, calls in run_ranks(2, _lengths_of_ranks):
        assert losses == pytest.approx(wanted, rel=1e-12)
        assert apart < 1e-12
        assert calls <= 5  # one of the first length, two each of at most two more
