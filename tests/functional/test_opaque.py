"""Islands: what can't be recorded is one node of the Program; the numbers are plain PyTorch's."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fzero
from fzero.errors import ConfigError, FzeroError, ShardError, TraceError
from fzero.functional.islands import PULL, RUN, check_islands
from fzero.functional.opaque import HiddenDraws
from fzero.program.origin import origin_of
from tests.ranks import run_ranks

LR = 0.1


class Experts(nn.Module):
    """Each row goes to one expert, chosen by its values: a boolean index, and a branch on it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mine = chosen == k
            if mine.any():
                out[mine] = expert(x[mine]) * weights[mine, k, None]
        return out


class Packed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(0).expand(2, -1, -1)
        lengths = torch.tensor([x.shape[0], x.shape[0] - 1])
        packed = pack_padded_sequence(rows, lengths, batch_first=True)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], True, total_length=x.shape[0])
        return out.sum(0)


class Aligned(nn.Module):
    """CTC loss, whose backward depends on values, beside a norm that keeps statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        log_probs = self.norm(x).log_softmax(-1).unsqueeze(1)
        lengths = torch.tensor([x.shape[0]]), torch.tensor([2])
        targets = torch.tensor([[1, 2]])
        return x + nn.functional.ctc_loss(log_probs, targets, *lengths, reduction="mean")


class Chosen:
    """What a router has decided, as an object that no pytree knows."""

    def __init__(self, weights: Tensor, rows: list[int]) -> None:
        self.weights, self.rows = weights, rows


class Router(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Chosen:
        weights = self.scores(x).sigmoid()
        return Chosen(weights, (weights[:, 0] > 0.5).nonzero()[:, 0].tolist())


class Routed(nn.Module):
    """What reads values is a module that can't be an island: the one around it has to be."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.expert = Router(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x)
        out = x.clone()
        out[chosen.rows] = self.expert(x[chosen.rows])
        return out * chosen.weights


class Keeps(nn.Module):
    """Puts what it found into a list that it was given: the module that made the list is opaque."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: list[Tensor]) -> Tensor:
        out = self.scores(x)
        memory.append(out * float(out.detach().max()))
        return out


class Remembers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.keeps = Keeps(width)

    def forward(self, x: Tensor) -> Tensor:
        memory: list[Tensor] = []
        return self.keeps(x, memory) + sum(memory)


class Reversed(nn.Module):
    """Runs itself again in backward, where a backward inside accumulates, as reversible layers do.

    What forward leaves in an attribute is there in backward.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.limit: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        return _Reversed.apply(self, x)  # pyright: ignore


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: Reversed, x: Tensor) -> Tensor:  # pyright: ignore
        ctx.module = module
        ctx.save_for_backward(x)
        module.limit = float(x.max())
        return module.inner(x).clamp(max=module.limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            assert ctx.module.limit is not None
            ctx.module.inner(x).clamp(max=ctx.module.limit).backward(grad)
        return None, x.grad


class Net(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 4), kind(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))


KINDS = {
    "experts": Experts,
    "packed": Packed,
    "ctc and a norm": Aligned,
    "routed by an object": Routed,
    "a list to fill": Remembers,
    "reversible": Reversed,
}


def built(kind: str) -> Net:
    torch.manual_seed(0)
    return Net(KINDS[kind]).double()


def rows(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(7, 6, generator=generator, dtype=torch.float64)


def trains_as_plain_torch(kind: str, stage: int, how: str) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plain = built(kind)
    opt = torch.optim.SGD(plain.parameters(), LR)
    for step in range(3):
        opt.zero_grad()
        states = []
        for other in range(world):
            mine = copy.deepcopy(plain.state_dict())
            (plain(rows(other, step)).square().mean() / world).backward()
            states.append({k: v.clone() for k, v in plain.named_buffers()})
            plain.load_state_dict(mine)
        for name, buffer in plain.named_buffers():  # as documented: the mean, or rank 0's
            found = torch.stack([state[name] for state in states])
            buffer.copy_(found.mean(0) if buffer.is_floating_point() else found[0])
        opt.step()

    module = built(kind)
    cfg = fzero.Config(stage=stage, opaque=() if how == "wrapped" else how)
    if how == "wrapped":
        assert fzero.opaque(module.middle) is module.middle
    apply, params, buffers = fzero.functionalize(module, buffers=True)

    def model_fn(params: Any, buffers: Any, x: Tensor) -> tuple[Tensor, Any]:
        out, buffers = apply(params, buffers, x)
        return out.square().mean(), buffers

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(LR), cfg)
    params, state = step_fn.init(params, buffers)
    program = step_fn.lower(params, state, rows(rank, 0))
    program.verify()
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(RUN) == 2  # again in backward, for its tape
    assert targets.count(PULL) == 1
    if how == "auto":  # the parts that it tried inside of one are not named
        assert len([line for line in program.log if line.startswith("opaque: middle")]) == 1
        assert "opaque: middle.router, middle" not in program.log
    for step in range(3):
        params, state = step_fn(params, state, rows(rank, step))
    full = fzero.unshard(params)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(full[name], p.detach(), rtol=0, atol=1e-12)
    for name, b in plain.named_buffers():
        torch.testing.assert_close(state.model_state[name], b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["wrapped", "middle", "auto"])
def test_an_island_trains_as_plain_torch(kind: str, how: str) -> None:
    trains_as_plain_torch(kind, 3, how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_island_trains_as_plain_torch_on_ranks(kind: str, stage: int) -> None:
    run_ranks(2, trains_as_plain_torch, kind, stage, "auto")


def test_parameters_of_an_island_are_gathered_for_it_and_freed_after_it() -> None:
    """At stage 3 its tape does not keep them: it runs again in backward."""
    text = run_ranks(2, gathered_twice)[0]
    assert text.count("middle.router.weight") >= 2


def gathered_twice() -> str:
    apply, params = fzero.functionalize(built("experts"))
    cfg = fzero.Config(stage=3, opaque="middle", bucket_mb=1e-5)
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).square().mean(), fzero.optim.sgd(LR), cfg
    )
    program = step_fn.lower(*step_fn.init(params), rows(0, 0))
    return " ".join(
        leaf for row in program.collectives() if row.kind == "all_gather" for leaf in row.leaves
    )


def test_a_glob_that_matches_no_module_is_refused_by_names_that_are_there() -> None:
    apply, params = fzero.functionalize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).mean()

    for globs, named in (("o", "'o'"), (["1", "2"], "'2'")):
        step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.1), fzero.Config(opaque=globs))
        state = step_fn.init(params)
        with pytest.raises(ConfigError, match=rf"Config.opaque: {named} matches no module.*'0'"):
            step_fn(*state, torch.ones(3, 2))


def test_the_look_at_torch_is_the_same_under_any_defaults() -> None:
    before = torch.get_default_dtype()
    check_islands.cache_clear()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            check_islands()
    finally:
        torch.set_default_dtype(before)
        check_islands.cache_clear()


def test_backward_sees_the_random_numbers_of_forward() -> None:
    """Of a linear function the gradient times the leaf is the loss, if the mask is the same."""

    @fzero.opaque
    def dropped(w: Tensor) -> Tensor:
        return nn.functional.dropout(w, 0.5) if float(w.detach().sum()) else w

    losses = []
    cfg = fzero.Config(has_aux=True)
    step_fn = fzero.make_train_step(
        lambda p, x: ((dropped(p["w"]) * x).sum(), {}), fzero.optim.sgd(1.0), cfg
    )
    params, state = step_fn.init({"w": torch.ones(64)})
    for _ in range(3):
        before = fzero.unshard(params)["w"]
        drawn = torch.get_rng_state()
        params, state = step_fn(params, state, torch.arange(64.0))
        assert torch.equal(torch.get_rng_state(), drawn)
        grads = before - fzero.unshard(params)["w"]
        losses.append(float(state.metrics["loss"]))
        assert losses[-1] == pytest.approx(float((grads * before).sum()), rel=1e-5)
    assert len(set(losses)) == 3

    again, state = step_fn.init({"w": torch.ones(64)})
    _, state = step_fn(again, state, torch.arange(64.0))
    assert float(state.metrics["loss"]) == losses[0]


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_values_without_a_gradient_too(executor: str) -> None:
    module = built("experts")
    fzero.opaque(module.middle)
    apply, params = fzero.functionalize(module)
    cfg: Any = fzero.Config(executor=executor)  # pyright: ignore
    predict = fzero.sharded(apply, cfg)
    x = rows(0, 0)
    torch.testing.assert_close(predict(fzero.shard(params, cfg), x), module(x).detach())
    copied = copy.deepcopy(module)
    assert copied.middle.forward.module is copied.middle  # pyright: ignore


def test_results_that_are_arguments_and_whole_numbers() -> None:
    @fzero.opaque
    def split(x: Tensor, scale: float) -> dict[str, Any]:
        return {"same": x, "view": x[:2], "times": x * scale, "order": x.detach().argsort()}

    def fn(params: Any) -> Any:
        found = split(params["w"], 3.0)
        return (
            found["same"].sum()
            + found["view"].sum()
            + found["times"].gather(0, found["order"]).cumsum(0)[0]
        )

    grads = fzero.grad(fn)({"w": torch.tensor([2.0, 1.0, 5.0])})
    assert grads["w"].tolist() == [2.0, 5.0, 1.0]


@dataclass(frozen=True)
class Record:
    """As libraries return them."""

    chosen: Chosen
    dtype: torch.dtype = torch.float32
    values: Tensor | None = None


class Scores(dict[str, Any]):
    """A mapping of a class of its own."""


@pytest.mark.parametrize("like", [None, lambda given: Record(Chosen(given["w"], []))])
def test_records_and_objects_are_taken_and_returned(like: Any) -> None:
    def scored(given: Scores) -> Record:
        w = given["w"]
        if float(w.detach().max()) > 9:
            raise ValueError("too large")
        return Record(Chosen(w * given["scale"], []))

    def fn(params: Any) -> Tensor:
        found = fzero.opaque(scored, like=like)(Scores(w=params["w"] * 2, scale=3))
        assert found.dtype is torch.float32
        assert found.chosen.rows == []
        return found.chosen.weights.square().sum()

    w = torch.tensor([2.0, 1.0, 4.0])
    grads = fzero.grad(fn)({"w": w})
    assert grads["w"].equal(2 * 36 * w)


def test_autocast_is_that_of_the_call() -> None:
    seen = []

    @fzero.opaque
    def product(w: Tensor, x: Tensor) -> Tensor:
        out = x @ w
        seen.append(out.dtype)
        return out

    def fn(params: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return product(params["w"], x).float().sum()

    fzero.value_and_grad(fn)({"w": torch.ones(3, 2)}, torch.ones(4, 3))
    assert set(seen) == {torch.bfloat16}


# ------------------------------------------------------------------------------------ refusals
def gradient_of(fn: Callable[..., Any], *args: Any) -> Any:
    return fzero.grad(lambda p, *args: fn(p["w"], *args).sum())({"w": torch.ones(4)}, *args)


def test_a_tensor_that_is_closed_over_is_refused() -> None:
    def fn(w: Tensor) -> Tensor:
        return fzero.opaque(lambda: w * float(w.detach().sum()))()

    with pytest.raises(TraceError, match="as an argument"):
        gradient_of(fn)


def test_a_result_of_another_shape_is_refused() -> None:
    picked = fzero.opaque(lambda w, x: w[: 2 if int(x.sum()) == 3 else 4])
    with pytest.raises(TraceError, match="follow from those of its arguments"):
        gradient_of(picked, torch.tensor([1, 2]))


def test_shapes_that_depend_on_values_are_refused() -> None:
    def repeated(w: Tensor, n: Tensor) -> Tensor:
        return w.repeat_interleave(torch.tensor(n.tolist()).expand(4))

    with pytest.raises(TraceError, match="depend on values"):
        gradient_of(fzero.opaque(repeated), torch.tensor(3))


def test_like_tells_the_shapes() -> None:
    def padded(w: Tensor, n: Tensor) -> Tensor:
        if int(n) < 3:
            raise ValueError("too few")
        return w * int(n)

    with pytest.raises(TraceError, match="like="):
        gradient_of(fzero.opaque(padded), torch.tensor(3))
    found = gradient_of(fzero.opaque(padded, like=lambda w, n: w), torch.tensor(3))
    assert found["w"].tolist() == [3.0] * 4


def test_what_it_raises_is_raised() -> None:
    def fails(w: Tensor) -> Tensor:
        if not isinstance(w, torch._subclasses.FakeTensor):
            raise ZeroDivisionError("of mine")
        return w * 1

    with pytest.raises(ZeroDivisionError, match="of mine"):
        gradient_of(fzero.opaque(fails))


class Cache:
    def __init__(self) -> None:
        self.values: Tensor | None = None


@pytest.mark.parametrize("given", [[], {}, Cache(), [torch.ones(4)]])
def test_a_tensor_that_is_put_into_an_argument_is_refused(given: Any) -> None:
    def fn(w: Tensor) -> Tensor:
        @fzero.opaque
        def kept(w: Tensor, given: Any) -> Tensor:
            if isinstance(given, list):
                given.append(w)
            elif isinstance(given, dict):
                given["w"] = w
            else:
                given.values = w
            return w * float(w.detach().max())

        return kept(w, given)

    before = copy.deepcopy(given)
    with pytest.raises(TraceError, match="into one of its arguments"):
        gradient_of(fn)
    assert str(vars(given) if isinstance(given, Cache) else given) == str(
        vars(before) if isinstance(before, Cache) else before
    )


@pytest.mark.parametrize("number", [int, float, bool])
def test_numbers_that_may_depend_on_values_are_refused(number: Any) -> None:
    found = fzero.opaque(lambda w: Chosen(w, [number(w.detach().max())]))
    with pytest.raises(TraceError, match="may depend on values"):
        gradient_of(lambda w: found(w).weights)


def test_a_change_of_an_argument_is_refused() -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        x.add_(1)
        return w * x

    with pytest.raises(FzeroError, match="in place"):
        gradient_of(fzero.opaque(fn), torch.ones(4))


def test_second_derivatives_are_refused() -> None:
    square = fzero.opaque(lambda w: w**2)
    params = {"w": torch.ones(4)}
    with pytest.raises(TraceError, match="derivative"):
        fzero.hvp(lambda p: square(p["w"]).sum())(params, params)
    with pytest.raises(TraceError, match="derivative"):
        fzero.jvp(lambda p: square(p["w"]))(params, params)


def test_shards_are_refused() -> None:
    cfg = fzero.Config()
    params = fzero.shard({"w": torch.ones(4)}, cfg)
    with pytest.raises(ShardError, match=r"fzero\.sharded"):
        fzero.jit(lambda p: fzero.opaque(torch.square)(p["w"]), cfg)(params)
    inside = fzero.sharded(lambda p: fzero.opaque(torch.square)(p["w"]), cfg)
    assert inside(params).tolist() == [1.0] * 4


def test_only_functions_and_modules_are_opaque() -> None:
    with pytest.raises(ConfigError, match=r"opaque\(block\)"):
        fzero.opaque(torch.ones(1))  # pyright: ignore


def test_the_message_names_the_module_to_wrap() -> None:
    apply, params = fzero.functionalize(built("experts"))
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).square().mean(), fzero.optim.sgd(LR), fzero.Config()
    )
    with pytest.raises(TraceError, match=r"opaque=\['middle'\]"):
        step_fn.lower(*step_fn.init(params), rows(0, 0))


def test_beside_an_opaque_part_forward_may_leave_what_it_likes() -> None:
    """What it had left broke the recording: the part is differentiated, which calls it again."""

    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(3, 3), None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.inner(x)
            return self.last.tanh()

    losses = []
    for opaque in ((), "inner"):
        torch.manual_seed(0)
        module = Leaves()
        apply, params = fzero.functionalize(module)
        step_fn = fzero.make_train_step(
            lambda p, x, apply=apply: apply(p, x).square().mean(),
            fzero.optim.sgd(0.1),
            fzero.Config(opaque=opaque),
        )
        params, state = step_fn.init(params)
        for _ in range(2):
            params, state = step_fn(params, state, torch.ones(2, 3))
        losses.append(float(state.metrics["loss"]))
        assert module.last is None
    assert losses[0] == pytest.approx(losses[1])


class Aside(nn.Module):
    """Returns one tensor, and leaves another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.aux = nn.Linear(3, 3), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.aux = y.square().mean()
        return y


@pytest.mark.parametrize("way", ["module", "function", "stage"])
def test_what_a_part_apart_leaves_is_told_of(way: str) -> None:
    """The function around it finds what was there before."""
    module = Aside()
    apply, params = fzero.functionalize(module)
    run = {"module": apply, "function": fzero.opaque(apply), "stage": fzero.stage(apply)}[way]
    cfg = fzero.Config(
        opaque="*" if way == "module" else (), executor="eager" if way == "stage" else "traced"
    )
    step_fn = fzero.make_train_step(
        lambda p, x: run(p, x).mean() + module.aux, fzero.optim.sgd(0.1), cfg
    )
    params, state = step_fn.init(params)
    with pytest.warns(UserWarning, match="leaves tensors in the attribute 'aux'"):
        step_fn(params, state, torch.ones(2, 3))
    assert module.aux == 0.0


# ------------------------------------------------------------------------- what torch.compile made
class Compiling(nn.Module):
    """Calls what has been compiled, in one of the ways that models have."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.way = way
        if way == "itself":
            self.block.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.way == "in forward":
            x = torch.compile(self.block, backend="aot_eager")(x)
        else:
            x = self.block(x)
        tanh = torch.compile(torch.tanh, backend="aot_eager")
        return self.last(tanh(x) if self.way == "function" else torch.tanh(x))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("way", ["itself", "in forward", "function"])
def test_an_island_may_hold_what_was_compiled(way: str, stage: int) -> None:
    torch.manual_seed(0)
    compiling, x = Compiling(way), torch.ones(3, 4)
    module = Compiling("not at all")
    module.load_state_dict(compiling.state_dict())
    apply, params = fzero.functionalize(compiling)

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    without = fzero.make_train_step(loss, fzero.optim.sgd(0.1), fzero.Config(stage))
    with pytest.raises(TraceError, match=r"torch\.compile has made.*fzero\.opaque"):
        without(*without.init(params), x)
    cfg = fzero.Config(stage, opaque="auto")
    step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.1), cfg)
    opt = torch.optim.SGD(module.parameters(), 0.1)
    params, state = step_fn.init(params)
    for _ in range(3):
        params, state = step_fn(params, state, x)
        module(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    found = fzero.unshard(params)
    for name, value in module.named_parameters():
        torch.testing.assert_close(found[name], value.detach())


class _Counted(nn.Linear):
    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [nn.Linear, _Counted])
def test_a_layer_may_be_opaque_and_compiled(kind: type[nn.Linear]) -> None:
    """Of which nobody asks for a length: a compiled module raises, and one of 0 is a module."""
    torch.manual_seed(0)
    layer, x = kind(4, 2), torch.ones(3, 4)
    module = nn.Sequential(
        nn.Linear(4, 4), fzero.opaque(torch.compile(layer, backend="aot_eager")), kind(2, 2)
    )
    reference = copy.deepcopy(nn.Sequential(module[0], layer, module[2]))
    apply, params = fzero.functionalize(module)
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).square().mean(), fzero.optim.sgd(0.1), fzero.Config(3)
    )
    params, state = step_fn.init(params)
    params, state = step_fn(params, state, x)
    program = step_fn.lower(params, state, x)
    assert {"0", "2"} <= {origin_of(node).module for node in program.graph.nodes}
    opt = torch.optim.SGD(reference.parameters(), 0.1)
    reference(x).square().mean().backward()
    opt.step()
    for found, wanted in zip(fzero.unshard(params).values(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.detach())


# ---------------------------------------------------------------------- masks that no seed reaches
class _OnCuda:
    is_cuda = True


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_an_rnn_whose_masks_are_of_cudnns_own_is_refused(name: str, packed: bool) -> None:
    """The calls that nn.RNNBase makes, of tensors that say that they are on CUDA."""
    called: list[Any] = []

    def rnn(*args: Any) -> None:
        called.append(args)

    rnn.__name__ = name
    sizes = [torch.ones(2)] if packed else []
    hidden = [[torch.ones(1)] * 2 if name == "lstm" else torch.ones(1)]
    given: list[Any] = [_OnCuda(), *sizes, *hidden, [torch.ones(1)]]

    def call(layers: int, dropout: float, training: bool) -> None:
        last = [] if packed else [True]
        args = (*given, True, layers, dropout, training, False, *last)
        mode = HiddenDraws()
        mode.rnns = (rnn,)  # pyright: ignore
        mode.__torch_function__(rnn, (), args)

    for harmless in ((1, 0.5, True), (2, 0.0, True), (2, 0.5, False)):
        call(*harmless)
    assert len(called) == 3
    with pytest.raises(TraceError, match=f"{name} with dropout=0.5"):
        call(2, 0.5, True)
    assert len(called) == 3


def test_it_knows_the_calls_of_torchs_rnns() -> None:
    """On a CPU they draw as all others do; what is checked is which function they call, and how."""
    seen: list[tuple[str, Any]] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in HiddenDraws.rnns:
                at = [type(x) for x in args].index(bool)
                seen.append((func.__name__, args[at + 1 : at + 4]))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, 2, 4)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        rnn: Any = kind(4, 4, num_layers=2, dropout=0.5)
        with Watch(), HiddenDraws():
            rnn(x)
            rnn(pack_padded_sequence(x, torch.tensor([3, 2])))
    assert seen == [
        (name, (2, 0.5, True)) for name in ("lstm", "lstm", "gru", "gru", "rnn_tanh", "rnn_tanh")
    ]
