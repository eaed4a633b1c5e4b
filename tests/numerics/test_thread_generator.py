"""A thread draws its own numbers, which are those of torch from the same state."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fzero.numerics.thread_generator import check_draws, drawing_from, thread_generator

X = torch.linspace(0.1, 2.0, 30).reshape(5, 6)


def _own(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _as_torch(draw: Callable[[], Any], seed: int = 3) -> Any:
    """What the global generator gives from the same state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return draw()


def _attention() -> Tensor:
    q = X.reshape(1, 1, 5, 6)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)


RECURRENT = nn.LSTM(6, 6, 2, dropout=0.5)
SCRIPTED = torch.jit.CompilationUnit("""
def dropped(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, True)
""")


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(7),
    "rand, double": lambda: torch.rand(7, dtype=torch.float64),
    "randn": lambda: torch.randn(3, 40),
    "randint": lambda: torch.randint(2, 9, (7,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 3),
    "normal of numbers": lambda: torch.normal(0.0, 1.0, (4,)),
    "normal of a tensor": lambda: torch.normal(X, 2.0),
    "normal of tensors": lambda: torch.normal(X, X),
    "bernoulli": lambda: torch.bernoulli(X / 2),
    "multinomial": lambda: torch.multinomial(X, 4),
    "multinomial, replaced": lambda: torch.multinomial(X, 9, replacement=True),
    "poisson": lambda: torch.poisson(X),
    "binomial": lambda: torch.binomial(torch.full_like(X, 5.0), X / 2),
    "bernoulli_": lambda: torch.empty(7).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda: torch.empty_like(X).bernoulli_(X / 2),
    "uniform_": lambda: torch.empty(7).uniform_(2, 3),
    "normal_": lambda: torch.empty(7).normal_(),
    "random_": lambda: torch.empty(7).random_(9),
    "random_ between": lambda: torch.empty(7).random_(3, 9),
    "random_ of all": lambda: torch.empty(7, dtype=torch.int64).random_(),
    "exponential_": lambda: torch.empty(7).exponential_(),
    "cauchy_": lambda: torch.empty(7).cauchy_(),
    "geometric_": lambda: torch.empty(7).geometric_(0.3),
    "log_normal_": lambda: torch.empty(7).log_normal_(),
    "complex": lambda: torch.randn(7, dtype=torch.complex64),
    "dropout": lambda: F.dropout(X),
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True),
    "alpha_dropout": lambda: F.alpha_dropout(X, training=True),
    "dropout2d": lambda: F.dropout2d(X.reshape(1, 5, 2, 3)),
    "rrelu": lambda: F.rrelu(X - 1, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(X[None], 2, output_size=2),
    "attention": _attention,
    "recurrent": lambda: RECURRENT(X)[0].detach(),
    "init": lambda: nn.init.kaiming_uniform_(torch.empty(4, 4)),
    "init, orthogonal": lambda: nn.init.orthogonal_(torch.empty(4, 4)),
    "gamma": lambda: torch.distributions.Gamma(X, X).rsample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(X).rsample(),
    "svd_lowrank": lambda: torch.svd_lowrank(X, 2),
    "scripted": lambda: SCRIPTED.dropped(X),
    "vmap, different": lambda: torch.func.vmap(F.dropout, randomness="different")(X),
    "vmap, same": lambda: torch.func.vmap(F.dropout, randomness="same")(X),
    "vmap of rand": lambda: torch.func.vmap(lambda x: x * torch.rand(6), randomness="same")(X),
    "grad": lambda: torch.func.grad(lambda x: F.dropout(x).square().sum())(X),
    "jvp": lambda: torch.func.jvp(F.dropout, (X,), (X,)),
    "cond": lambda: torch.ops.higher_order.cond(
        True, lambda x: (F.dropout(x),), lambda x: (x,), (X,)
    ),
    "the global generator is named": lambda: torch.rand(4, generator=torch.default_generator),
    "and in place": lambda: torch.empty(4).normal_(generator=torch.default_generator),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_numbers_are_torchs_and_its_generator_stays(draw: Callable[[], Any]) -> None:
    own = _own()
    before = torch.get_rng_state()
    with drawing_from(own):
        found = draw()
    assert not torch.equal(own.get_state(), _own().get_state()), "it drew elsewhere"
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(found, _as_torch(draw), rtol=0, atol=0)
    after = draw()
    assert not torch.equal(torch.get_rng_state(), before), "outside it is torch's again"
    del after


def test_every_random_operator_of_torch_takes_a_generator_or_calls_one_that_does() -> None:
    """Those that draw inside of a kernel on the CPU would go past us: there is none."""
    own = {"generator"}
    names = {
        str(schema.name)
        for schema in torch._C._jit_get_all_schemas()
        if own & {argument.name for argument in schema.arguments}
    }
    inside = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        and torch.Tag.nondeterministic_seeded in _tags(name)
        and name.partition(".")[0] not in names
    }
    # The first calls `bernoulli_`. The CPU's attention refuses dropout; to choose it draws nothing.
    assert {name.partition(".")[0].removeprefix("aten::") for name in inside} <= {
        *("native_dropout", "_scaled_dot_product_flash_attention_for_cpu", "_fused_sdp_choice"),
    }


def _tags(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default").tags


def test_operators_that_are_written_in_python_fall_through() -> None:
    with drawing_from(_own()):
        on = torch._C._dispatch_tls_local_include_set()
        off = on - torch._C.DispatchKeySet(torch._C._dispatch_key_parse("CustomRNGKeyId"))
        for operator in torch._ops._higher_order_ops.values():
            keys = operator.non_fallthrough_keys
            assert (on & keys).raw_repr() == (off & keys).raw_repr(), operator


def test_it_nests_and_ends_with_an_exception() -> None:
    outer, inner = _own(1), _own(2)
    with drawing_from(outer):
        with contextlib.suppress(ZeroDivisionError), drawing_from(inner):
            assert thread_generator() is inner
            torch.rand(1)
            _ = 1 / 0
        assert thread_generator() is outer
        again = torch.rand(2)
    assert thread_generator() is torch.default_generator
    assert torch.equal(again, torch.rand(2, generator=_own(1)))
    assert not torch.equal(inner.get_state(), _own(2).get_state())


def test_a_generator_of_the_users_gives_its_own_numbers() -> None:
    own, users = _own(), _own(9)
    with drawing_from(own):
        found = torch.rand(4, generator=users), torch.empty(4).normal_(generator=users)
    users = _own(9)
    assert torch.equal(found[0], torch.rand(4, generator=users))
    assert torch.equal(found[1], torch.empty(4).normal_(generator=users))
    assert torch.equal(own.get_state(), _own().get_state())


def test_other_threads_draw_from_torchs() -> None:
    seen: list[Any] = []

    def beside() -> None:
        seen.append(thread_generator())
        seen.append(torch.rand(3))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        with drawing_from(_own()):
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()
        torch.manual_seed(5)
        assert torch.equal(seen[1], torch.rand(3))
    assert seen[0] is torch.default_generator


# --------------------------------------------------------------- threads that go on with this one's
class _Deep(torch.autograd.Function):
    """Its backward runs another one's, so many deep; autograd has threads for those from 60 on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, seen: list[Any]) -> Tensor:  # pyright: ignore
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        if ctx.depth == 0:
            ctx.seen.append((threading.get_native_id(), thread_generator(), torch.rand(3)))
            return grad, None, None
        with torch.enable_grad():
            x = torch.ones(1, requires_grad=True)
            y: Any = _Deep.apply(x, ctx.depth - 1, ctx.seen)
        return torch.autograd.grad(y, x, grad)[0], None, None


def test_backward_draws_from_it_in_autograds_threads() -> None:
    own, seen = _own(), []
    with drawing_from(own):
        x = torch.ones(1, requires_grad=True)
        y: Any = _Deep.apply(x, 80, seen)
        y.backward()
    ((thread, generator, numbers),) = seen
    assert thread != threading.get_native_id()
    assert generator is own
    assert torch.equal(numbers, torch.rand(3, generator=_own()))


def test_backwards_of_two_threads_draw_from_their_own() -> None:
    found: dict[int, list[Any]] = {1: [], 2: []}
    both = threading.Barrier(2)

    def run(seed: int) -> None:
        with drawing_from(_own(seed)):
            x = torch.ones(1, requires_grad=True)
            y: Any = _Deep.apply(x, 80, found[seed])
            both.wait(30)
            y.backward()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, ((_, _, numbers),) in found.items():
        assert torch.equal(numbers, torch.rand(3, generator=_own(seed)))


def test_a_forked_call_of_torchscript_draws_from_it() -> None:
    with drawing_from(_own()):
        found = torch.jit.wait(torch.jit.fork(torch.rand, 3))
    assert torch.equal(found, torch.rand(3, generator=_own()))


# ------------------------------------------------------------------------------ who looks at calls
class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["dropout", "rand", "randperm", "attention", "vmap, different"])
def test_modes_see_what_they_see_without(name: str) -> None:
    draw = DRAWS[name]
    with _Noting() as wanted:
        _as_torch(draw)
    own = _own()
    with drawing_from(own), _Noting() as seen:
        found = draw()
    assert seen.calls == wanted.calls
    torch.testing.assert_close(found, _as_torch(draw), rtol=0, atol=0)


def test_what_modes_call_draws_from_it() -> None:
    own, before = _own(), torch.get_rng_state()
    with drawing_from(own), FlopCounterMode(display=False), _Noting():
        found = F.dropout(X)
    assert torch.equal(found, _as_torch(DRAWS["dropout"]))
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_without_values_draw_nothing() -> None:
    own = _own()
    with drawing_from(own):
        assert F.dropout(torch.empty(3, device="meta")).shape == (3,)
    assert torch.equal(own.get_state(), _own().get_state())


def test_there_is_nothing_to_see_outside() -> None:
    assert check_draws()
    calls: list[Any] = []
    with torch.profiler.profile() as profiler:
        torch.rand(3)
    calls += [event.name for event in profiler.events()]
    assert calls.count("aten::uniform_") == 1


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without it")
def test_tensors_of_other_layouts_are_what_they_were() -> None:
    x = torch.ones(2, 2)
    for _ in range(2):
        there = x.to_mkldnn()
        assert torch.equal(there.to_dense(), x)
        assert torch.equal(F.linear(there, there).to_dense(), x @ x.t())
        assert torch.equal(x.to_sparse().to_dense(), x)
        with drawing_from(_own()):
            torch.rand(2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_what_a_layout_has_of_its_own_runs_within(mode: Callable[[], Any]) -> None:
    weight = torch.ones(4, 3)
    with mode():
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)])
        with drawing_from(_own()):
            found = F.linear(nested, weight)
    assert torch.equal(torch.nested.to_padded_tensor(found, 3.0), torch.full((2, 5, 4), 3.0))
