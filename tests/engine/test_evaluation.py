"""Evaluation: the plain module's outputs in every mode, and training as if it had not been."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fzero
from benchmarks.allocations import measure
from fzero.distributed.transport import Transport
from tests.engine.models import Lost
from tests.engine.parity import SGD, STAGES, build, data, here
from tests.ranks import fake_ranks, run_ranks

Context = Callable[[], AbstractContextManager[Any]]
GRADS: list[Context] = [torch.enable_grad, torch.no_grad, torch.inference_mode]


class Normed(nn.Module):
    """What behaves in another way while it trains, with a buffer that is replaced, and ties."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.down = nn.Linear(8, 6, bias=False)
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.up(x)))
        for block in self.blocks:
            h = torch.tanh(block(h))
        out = self.down(h) + nn.functional.linear(h, self.up.weight.t())
        if self.training:
            self.last = out.detach().mean(0)
        return out


def evaluate(engine: fzero.Engine, plain: nn.Module, seed: int, *trainings: bool) -> None:
    """Every way to evaluate gives what the plain module gives, and leaves what it leaves."""
    rank, _ = here()
    for training in trainings:
        for grad in GRADS:
            for call, local in ((engine, 0), (engine.module, 0), (engine, 1), (engine.module, 2)):
                with ExitStack() as block:
                    block.enter_context(engine.local_forward() if local else nullcontext())
                    block.enter_context(grad())
                    # in a local block each rank as often as it likes
                    for turn in range((rank + local) % 3 if local else 1):
                        x = data(rank, seed + turn)
                        torch.default_generator.manual_seed(turn)
                        want = plain.train(training)(x)
                        engine.train(training)
                        torch.default_generator.manual_seed(turn)
                        assert torch.equal(call(x), want)
    for name, x in plain.named_buffers():
        assert torch.equal(engine.module.get_buffer(name), x), name
    engine.train()


def trains_with_and_without(fields: dict[str, Any], evaluates: bool) -> dict[str, Tensor]:
    """Two steps of two micro-batches; evaluations wherever one can be, or nowhere."""
    rank, _ = here()
    cfg = fzero.Config(accum_steps=2, **fields)
    engine = fzero.Engine(build(Normed), SGD(), cfg)

    def look(seed: int, *trainings: bool) -> None:
        if not evaluates:
            return
        plain = build(Normed)
        plain.load_state_dict(engine.state_dict())
        buffers = [*engine.module.named_buffers()]
        before = [x.clone() for _, x in buffers]
        with torch.random.fork_rng():
            evaluate(engine, plain, seed, *trainings)
        if trainings == (False,):
            for (name, x), old in zip(buffers, before, strict=True):
                assert torch.equal(engine.module.get_buffer(name), old), name
                assert engine.module.get_buffer(name) is x
        else:  # in training mode statistics have moved, as they do in plain torch
            for (name, x), old in zip(buffers, before, strict=True):
                x.copy_(old)
                engine.module.get_submodule(name.rpartition(".")[0])._buffers[
                    name.rpartition(".")[2]
                ] = x
        with torch.no_grad():
            engine.eval()(data(rank))
            engine.train()

    for step in range(2):
        for micro in range(2):
            torch.manual_seed(100 * step + 10 * micro + rank)
            out = engine(data(rank, 10 * step + micro))
            look(step, False)  # what plain torch allows while backward is to come
            out.square().mean().backward()
            look(step + 1, True, False)
        engine.step()
        look(step + 2, True, False)
    assert engine.global_steps == 2
    return {**engine.full_params(), **dict(engine.module.named_buffers())}


def laws(configs: list[dict[str, Any]]) -> None:
    for fields in configs:
        want = trains_with_and_without(fields, evaluates=False)
        found = trains_with_and_without(fields, evaluates=True)
        for name, x in want.items():
            torch.testing.assert_close(found[name], x, rtol=0, atol=1e-12, msg=f"{fields} {name}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.quick("2")
def test_evaluations_are_right_and_training_knows_nothing_of_them(world: int) -> None:
    configs: list[dict[str, Any]] = [{"stage": stage} for stage in STAGES]
    configs += [{"stage": 3, "reshard_after_forward": False, "prefetch": 2}]
    laws(configs) if world == 1 else run_ranks(world, laws, configs)


def on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    laws([{"stage": 3, "mesh": mesh}])


def test_evaluations_on_a_mesh_of_replicas_of_shards() -> None:
    run_ranks(4, on_a_mesh)


# ---- what travels, and when
def gathers(evaluate: Callable[[fzero.Engine, Tensor], None], **fields: Any) -> list[list[str]]:
    """The names of the leaves of each gather of an evaluation, in a world that isn't there."""
    seen: list[list[str]] = []
    with fake_ranks(4), pytest.MonkeyPatch.context() as patch:
        engine = fzero.Engine(build(Normed), SGD(), fzero.Config(bucket_mb=1e-4, **fields))
        for _ in range(2):  # in the first one the order is learned
            seen.clear()
            gather = Transport.gather

            def told(self: Transport, shards: Any, leaves: Any, gather: Any = gather) -> Any:
                seen.append([leaf.name for leaf in leaves])
                return gather(self, shards, leaves)

            with patch.context() as inner:
                inner.setattr(Transport, "gather", told)
                evaluate(engine, torch.ones(2, 6, dtype=torch.float64))
        units = engine._driver.units
        assert units is not None
        assert not units.here, "full parameters are left over"
        assert not units.handles, "a gather is left over"
    return seen


def no_grad(engine: fzero.Engine, x: Tensor) -> None:
    with torch.no_grad():
        engine(x)


def raises(engine: fzero.Engine, x: Tensor) -> None:
    handle = engine.module.down.register_forward_pre_hook(_lose)  # pyright: ignore
    for call in (engine, engine.module):
        with pytest.raises(Lost), torch.no_grad():
            call(x)
    handle.remove()


def _lose(module: nn.Module, args: Any) -> None:
    raise Lost


def local(engine: fzero.Engine, x: Tensor) -> None:
    with engine.local_forward():
        with engine.local_forward(), torch.no_grad():
            engine(x)
        with torch.no_grad():
            engine.module(x)


@pytest.mark.parametrize("keep", [False, True])
def test_every_unit_is_gathered_and_freed(keep: bool) -> None:
    fields = {"reshard_after_forward": not keep}
    plain = gathers(no_grad, **fields)
    assert len(plain) > 4
    assert gathers(no_grad, prefetch=2, **fields) == plain  # the same ones, earlier
    assert len(gathers(raises, prefetch=2, **fields)) > len(plain)
    names = [name for gather in gathers(local, **fields) for name in gather]
    assert sorted(names) == sorted(name for name, _ in build(Normed).named_parameters())


def test_units_are_gathered_ahead_from_the_second_evaluation_on() -> None:
    with fake_ranks(4):
        engine = fzero.Engine(build(Normed), SGD(), fzero.Config(bucket_mb=1e-4, prefetch=1))
        units: Any = engine._driver.units
        ahead: list[int] = []
        for block in engine.module.blocks:  # pyright: ignore
            block.register_forward_pre_hook(lambda *_: ahead.append(len(units.handles)))
        x = torch.ones(2, 6, dtype=torch.float64)
        for turn in range(3):
            ahead.clear()
            no_grad(engine, x)
            assert ahead == [0, 0, 0] if turn == 0 else sum(ahead) == 3
            engine(x).sum().backward()  # in between: its order is another
            engine.step()


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


def one_rank_looks_by_itself() -> None:
    rank, _ = here()
    torch.manual_seed(0)
    plain = Ordered().double()
    engine = fzero.Engine(Ordered().double(), SGD(), fzero.Config(bucket_mb=1e-4))
    engine.load_state_dict(plain.state_dict())
    x = torch.full((2, 4), 0.5 + rank, dtype=torch.float64)
    with torch.no_grad():
        for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 1], [0, 1, 2, 3], [1, 0]):
            assert torch.equal(engine(x, order), plain(x, order))
            with engine.local_forward():
                if rank == 0:
                    assert torch.equal(engine(x, order), plain(x, order))


def test_what_one_rank_runs_locally_changes_no_guess_of_what_comes_next() -> None:
    run_ranks(2, one_rank_looks_by_itself, timeout=60)


WIDTH = 640  # blocks that are large enough for a collective of their own


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(16)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fields", [{}, {"reshard_after_forward": False}, {"prefetch": 1}])
@pytest.mark.quick("fields0-no_grad", "fields1-inference_mode")
def test_an_evaluation_holds_shards_and_the_units_in_flight(
    fields: dict[str, Any], mode: Context
) -> None:
    def make() -> Callable[[], object]:
        engine = fzero.Engine(Deep(), SGD(), fzero.Config(**fields))
        x = torch.ones(1, WIDTH)

        def step() -> None:
            with mode():
                for _ in range(2):
                    engine(x)
                    engine.module(x)

        return step

    with fake_ranks(8):
        used, _ = measure(make)
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    ahead = fields.get("prefetch", 0)
    # what is sent, the buffer that it comes in, and what is unpacked from it
    assert used.peak - used.between <= (1 / 8 + 2 + ahead) * unit * 1.02


def test_a_state_written_between_two_direct_calls_counts() -> None:
    run_ranks(2, _written_between)


def _written_between() -> None:
    engine = fzero.Engine(build(lambda: nn.Linear(2, 1, bias=False)), SGD(), fzero.Config(stage=3))
    x = torch.ones(1, 2, dtype=torch.float64)
    before = engine.module(x).detach()
    (shard,) = engine.state[0].values()
    shard.to_local().mul_(2)
    assert torch.equal(engine.module(x), 2 * before)
