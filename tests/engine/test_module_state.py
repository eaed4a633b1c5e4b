"""`state_dict` and `load_state_dict`: full tensors, the module's names, and values that count."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.engine.models import Net
from tests.engine.parity import SGD, STAGES, build, data, here
from tests.ranks import run_fresh, run_ranks


class Rich(nn.Module):
    """Ties, buffers of two kinds, frozen parameters, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("mask", torch.ones(6), persistent=False)
        self.turns = 3

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0)
        return self.net(x * self.mask.to(x.dtype))

    def get_extra_state(self) -> dict[str, int]:
        return {"turns": self.turns}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.turns = state["turns"]


def there_and_back(stage: int, precision: str | None) -> None:
    rank, _ = here()
    make = lambda: build(Rich).float() if precision else build(Rich)  # noqa: E731
    cfg = fzero.Config(stage=stage, precision=precision)

    def engine_of() -> fzero.Engine:
        return fzero.Engine(make(), fzero.optim.sgd(2.0**-9, momentum=0.9), cfg)

    def step(engine: fzero.Engine, i: int) -> None:
        engine(data(rank, i)).float().square().mean().backward()
        engine.step()

    one = engine_of()
    step(one, 0)
    state = one.state_dict()
    plain = make()
    assert list(state) == list(plain.state_dict())
    for name, x in plain.state_dict().items():
        if isinstance(x, Tensor) and "frozen" not in name:  # which has no master
            assert state[name].dtype == x.dtype, name
    plain.load_state_dict(state)  # strict: a plain module takes it
    two = engine_of()
    two.module.turns = 9  # pyright: ignore
    assert two.load_state_dict(plain.state_dict()) == ([], [])
    assert two.module.turns == 3  # pyright: ignore
    # masters, too: every digit is there, and a step from here is the same step
    for name, x in two.state_dict().items():
        assert not isinstance(x, Tensor) or torch.equal(x, state[name]), name
    two.state = two.state[0], two.state[1]._replace(inner=one.state[1].inner)
    step(one, 1)
    step(two, 1)
    for name, x in two.state_dict().items():
        assert not isinstance(x, Tensor) or torch.equal(x, one.state_dict()[name]), name
    # what was given out is nobody's memory
    state["net.gain"].fill_(50.0)
    assert one.state_dict()["net.gain"].item() != 50.0


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_state_dict_is_all_there_is_of_the_module(world: int, precision: str | None) -> None:
    for stage in STAGES:
        if world == 1:
            there_and_back(stage, precision)
        else:
            run_ranks(world, there_and_back, stage, precision)


def checks(stage: int) -> None:
    engine = fzero.Engine(build(Rich), SGD(), fzero.Config(stage=stage))
    before = engine.state_dict()
    good: dict[str, Any] = {k: 2 * x if isinstance(x, Tensor) else x for k, x in before.items()}
    for change, words in (
        ({"net.up.wieght": torch.ones(5, 6)}, "the module has no 'net.up.wieght'"),
        ({"net.gain": torch.ones(1)}, r"'net.gain' is \(1,\), and must be \(\)"),
        ({"net.gain": 3.0}, "a float"),
        ({"net.gain": torch.ones((), device="meta")}, "meta"),
        ({"net.gain": torch.ones((), dtype=torch.int64)}, "int64"),
        ({"net.tied.weight": torch.zeros(5, 6)}, "one parameter, and have two values"),
        ({"seen": torch.ones(5)}, r"\(5,\), and must be \(6,\)"),
    ):
        with pytest.raises(fzero.ShardError, match=words):
            engine.load_state_dict({**good, **change})
    with pytest.raises(fzero.ShardError, match=r"'net\.gain' is missing"):
        engine.load_state_dict({k: x for k, x in good.items() if k != "net.gain"})
    with pytest.raises(fzero.ShardError, match="a list"):
        engine.load_state_dict([])  # pyright: ignore
    engine.module.net.register_forward_hook(lambda *_: engine.load_state_dict(good))
    with pytest.raises(fzero.BackwardError, match="inside a forward"):
        engine(data(0) * 0)
    for name, x in engine.state_dict().items():
        assert not isinstance(x, Tensor) or torch.equal(x, before[name]), f"{name} has changed"
    # one name of a tied parameter is enough, and the rest stays where strictness is off
    some = {"net.tied.weight": good["net.tied.weight"], "else": torch.ones(2)}
    keys = engine.load_state_dict(some, strict=False)
    assert keys.unexpected_keys == ["else"]
    assert "net.up.weight" not in keys.missing_keys
    assert "net.gain" in keys.missing_keys
    now = engine.state_dict()
    assert torch.equal(now["net.up.weight"], good["net.up.weight"])
    assert torch.equal(now["net.gain"], before["net.gain"])


class Tied(nn.Module):
    """What parameters alone do not tell: statistics, and two names of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(i)))


def as_advised() -> None:
    i = torch.arange(4)
    engine = fzero.Engine(build(Tied), SGD(), fzero.Config(stage=3))
    for _ in range(3):
        nn.functional.cross_entropy(engine(i), i).backward()
        engine.step()
    for copied in (
        lambda: copy.deepcopy(engine.module),
        lambda: torch.save(engine.module.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(fzero.FzeroError, match=r"engine\.state_dict\(\)"):
            copied()
    second = build(Tied)
    second.load_state_dict(engine.state_dict())
    with torch.no_grad():
        assert torch.equal(second.eval()(i), engine.eval()(i))


def test_a_module_that_can_not_be_copied_has_a_copy_that_can() -> None:
    run_ranks(2, as_advised)


@pytest.mark.parametrize("stage", STAGES)
def test_what_does_not_fit_changes_nothing(stage: int) -> None:
    checks(stage)
    run_ranks(2, checks, stage)


def of_other_ranks(stage: int) -> str:
    torch.distributed.init_process_group("gloo")
    engine = fzero.Engine(build(Net), SGD(), fzero.Config(stage=stage))
    state = {k: x + here()[0] * (k == "gain") for k, x in engine.state_dict().items()}
    with pytest.raises(fzero.RankMismatchError) as raised:
        engine.load_state_dict(state)
    return str(raised.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_values_of_one_rank_alone_are_refused_on_all(stage: int) -> None:
    for told in run_fresh(2, of_other_ranks, stage):
        assert "engine.load_state_dict at gain" in told


def test_looks_at_the_step() -> None:
    schedule = fzero.optim.linear(1.0, 0.0, 4)
    chained = fzero.optim.chain(
        fzero.optim.clip_by_global_norm(1.0),
        fzero.optim.masked(fzero.optim.adamw(schedule), lambda tree: dict.fromkeys(tree, True)),
    )
    for opt, rates in ((fzero.optim.lion(0.5), [0.5, 0.5]), (chained, [1.0, 0.75])):
        engine = fzero.Engine(nn.Linear(2, 1), opt)
        assert engine.metrics == {}
        assert (engine.lr, engine.global_steps) == (rates[0], 0)
        engine(torch.ones(1, 2)).sum().backward()
        engine.step()
        assert (engine.lr, engine.global_steps) == (rates[1], 1)
        assert engine.metrics["loss"].item() == engine.state[1].metrics["loss"].item()
        assert engine.device == torch.device("cpu")
        assert list(engine.parameters()) == list(engine.module.parameters())
    two = fzero.optim.chain(fzero.optim.sgd(0.5), fzero.optim.scale_by_learning_rate(0.25))
    for opt, words in ((SGD(), "no learning rate"), (two, r"2 learning rates: \[0.25, 0.5\]")):
        with pytest.raises(fzero.FzeroError, match=words):
            print(fzero.Engine(nn.Linear(2, 1), opt).lr)


class Fused(nn.Module):
    """One projection, which is stored as the three that an older release had; and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 9), nn.Linear(3, 3)
        self.also = self.out  # tied, as a whole
        self.register_buffer("turns", torch.zeros(2))
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)
        self.register_load_state_dict_post_hook(self._loaded)
        self.loaded: list[str] = []

    @staticmethod
    def _split(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for kind in ("weight", "bias"):
            parts = state.pop(f"{prefix}qkv.{kind}").chunk(3)
            for name, part in zip("qkv", parts, strict=True):
                state[f"{prefix}{name}.{kind}"] = part

    @staticmethod
    def _join(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{prefix}{name}.{kind}", None) for name in "qkv"]
            if parts[0] is not None:
                state[f"{prefix}qkv.{kind}"] = torch.cat(parts)

    @staticmethod
    def _loaded(module: Any, keys: Any) -> None:
        module.loaded += keys.missing_keys

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.also(torch.sigmoid(q * k) * v)


def _fused(seed: int) -> Any:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), Fused())
    net[1].turns += seed  # pyright: ignore
    return net


def _stored_otherwise(stage: int, precision: Any) -> None:
    rank, _ = here()
    cfg = fzero.Config(stage, precision=precision)
    engine = fzero.Engine(_fused(1), fzero.optim.sgd(2.0**-9), cfg)
    engine(data(rank).float()).float().square().mean().backward()
    engine.step()
    state, values, plain = engine.state_dict(), engine.full_params(), _fused(2)
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    assert state["1.also.weight"] is state["1.out.weight"]
    for name, x in plain.named_parameters():
        assert torch.equal(x, values[name]), name  # all digits, though they were cut to pieces

    other = fzero.Engine(_fused(3), fzero.optim.sgd(2.0**-9), cfg)
    before = other.full_params()
    with pytest.raises(fzero.ShardError, match=r"size mismatch.*Nothing was loaded"):
        other.load_state_dict(state | {"1.q.bias": torch.ones(7), "1.turns": torch.ones(2)})
    with pytest.raises(fzero.ShardError, match=r"'1.qkv.bias' is missing"):
        other.load_state_dict({k: x for k, x in state.items() if not k.endswith("q.bias")})
    assert all(torch.equal(x, before[name]) for name, x in other.full_params().items())
    assert other.module[1].turns.tolist() == [3, 3]  # pyright: ignore

    old = {k: x for k, x in state.items() if "also" not in k}  # one name of two is enough
    for part, name in (("original0", "weight_g"), ("original1", "weight_v")):  # an older torch's
        old[f"0.{name}"] = old.pop(f"0.parametrizations.weight.{part}")
    assert other.load_state_dict(old) == ([], [])
    assert all(torch.equal(x, values[name]) for name, x in other.full_params().items())
    assert other.module[1].turns.tolist() == [1, 1]  # pyright: ignore
    for net in (engine, other):
        net(data(rank, 1).float()).float().square().mean().backward()
        net.step()
    after = engine.full_params()
    assert all(torch.equal(x, after[name]) for name, x in other.full_params().items())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_module_that_is_stored_otherwise_is_loaded_so(stage: int, precision: str | None) -> None:
    run_ranks(2, _stored_otherwise, stage, precision)
