"""`local_forward` and `gathered`: what is held, what is written, and what is as it was."""

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import tree
from tests.engine.models import Experts, Lost, Net
from tests.engine.parity import SGD, STAGES, build, data, here
from tests.ranks import run_ranks


def bits(state: Any) -> list[Tensor]:
    """Copies of every tensor of a state, this rank's parts."""
    found = [x for x in tree.leaves(state) if isinstance(x, Tensor)]
    return [copy.deepcopy(x.to_local() if hasattr(x, "to_local") else x) for x in found]  # pyright: ignore


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


# ---- one rank writes
def written_by_one(stage: int, precision: str | None) -> None:
    rank, world = here()
    low = torch.bfloat16 if precision else torch.float64
    for chosen in range(world):
        module = build(Net) if precision is None else build(Net).float()
        cfg = fzero.Config(stage=stage, precision=precision)
        engine = fzero.Engine(module, fzero.optim.sgd(2.0**-10), cfg)
        before = engine.state_dict()
        names = ["up.weight", "gain", "frozen.weight"]
        with engine.gathered(names, modifier_rank=chosen) as params, torch.no_grad():
            assert [params[n] is module.get_parameter(n) for n in names] == [True] * 3
            if rank == chosen:
                nn.init.ones_(module.up.weight[:2])  # a view, in place
                module.tied.weight.data[2:3].mul_(-0.0)  # through .data, and another name
                params["gain"].fill_(1.5)
                module.gain.data += 2.5  # assigns .data what it has written to
                params["frozen.weight"][1] = torch.arange(5.0)
            else:
                params["gain"].fill_(rank + 50.0)  # counts for nothing
        assert module.gain.detach().clone().item() == 4.0  # at once
        now = engine.state_dict()
        want = {name: x.clone() for name, x in before.items()}
        want["up.weight"][:2] = 1.0
        # a compute dtype has fewer digits: what was not written keeps its own
        want["up.weight"][2:3] = want["up.weight"][2:3].to(low) * -0.0
        want["tied.weight"] = want["up.weight"]
        want["gain"].fill_(4.0)
        want["frozen.weight"][1] = torch.arange(5.0)
        for name, x in want.items():
            assert torch.equal(now[name], x), (stage, chosen, name)
            assert torch.equal(now[name].signbit(), x.signbit()), (stage, chosen, name)
        # the next step goes on from there, with all digits
        (
            engine(data(rank).to(before["gain"].dtype)).float().sum() * 0
            + module.gain.float() * 1.0
        ).backward()
        engine.step()
        assert engine.state_dict()["gain"].item() == 4.0 - 2.0**-10


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.quick("2-bf16", "1-None")
def test_what_one_rank_writes_is_what_every_rank_has(world: int, precision: str | None) -> None:
    for stage in STAGES:
        if world == 1:
            written_by_one(stage, precision)
        else:
            run_ranks(world, written_by_one, stage, precision)


def undone(stage: int) -> None:
    rank, _ = here()
    engine = fzero.Engine(build(Net), SGD(), fzero.Config(stage=stage))
    engine(data(rank)).square().mean().backward()
    grad = engine.full_grad("up.weight")
    before = bits(engine.state)
    with suppress(Lost), torch.no_grad(), engine.gathered("up.weight", 0) as params:
        params["up.weight"].zero_()
        with engine.gathered(["gain", "up.weight"]) as inner:
            assert inner["up.weight"].count_nonzero() == 0  # the same memory
            with pytest.raises(fzero.BackwardError, match=r"step\(\) was called inside .*gathered"):
                engine.step()
            raise Lost
    assert same(bits(engine.state), before)
    assert torch.equal(engine.full_grad("up.weight"), grad)  # pyright: ignore
    with suppress(Lost), engine.local_forward():
        engine(data(rank))
        raise Lost
    assert same(bits(engine.state), before)
    units = engine._driver.units
    assert units is None or not (units.here or units.blocks)
    assert not engine._driver.state.blocks
    engine.step()
    assert not same(bits(engine.state), before)


@pytest.mark.parametrize("stage", STAGES)
def test_after_an_exception_all_is_as_before(stage: int) -> None:
    undone(stage)
    run_ranks(2, undone, stage)


def nested_writes() -> None:
    rank, _ = here()
    for stage in STAGES:
        engine = fzero.Engine(build(Net), SGD(), fzero.Config(stage=stage))
        with torch.no_grad(), engine.gathered(["gain", "up.bias"], 0) as outer:
            if rank == 0:
                outer["gain"].fill_(2.0)
            with engine.gathered("up.bias", 1) as inner:
                inner["up.bias"].fill_(3.0 + rank)
            assert outer["up.bias"].unique().item() == 4.0
            outer["up.bias"][0] = 5.0
        full = engine.full_params()
        assert full["gain"].item() == 2.0
        assert full["up.bias"].tolist() == [5.0, 4.0, 4.0, 4.0, 4.0]


def test_blocks_nest() -> None:
    run_ranks(2, nested_writes)


def test_writing_without_saying_who_is_refused_at_stage_3() -> None:
    run_ranks(2, _writes_alone)


def _writes_alone() -> None:
    engine = fzero.Engine(build(Net), SGD(), fzero.Config(stage=3))
    with torch.no_grad():
        for block in (engine.gathered("gain"), engine.gathered("up.bias", modifier_rank=0)):
            with block, pytest.raises(fzero.FzeroError, match=r"gathered\(\['gain'\], modifier"):
                engine.module.gain.zero_()
    assert engine.full_params()["gain"].item() == build(Net).gain.item()


def misuse(stage: int) -> None:
    engine = fzero.Engine(build(Net), SGD(), fzero.Config(stage=stage))
    with pytest.raises(fzero.ShardError, match=r"gathered\('gian'\).*Near ones: 'gain'"):
        engine.gathered(["up.weight", "gian"])
    with pytest.raises(fzero.ShardError, match="no such rank"), engine.gathered("gain", 7):
        pass
    with engine.local_forward():
        for what in (
            lambda: engine.gathered("gain", 0).__enter__(),
            lambda: engine.load_state_dict({}),
            lambda: setattr(engine, "state", engine.state),
            engine.step,
        ):
            with pytest.raises(fzero.BackwardError, match="local_forward"):
                what()
        x = data(0).requires_grad_()  # a rank's own business: nothing is reduced
        (slope,) = torch.autograd.grad(engine(x).sum(), x)
        assert slope.count_nonzero()
    assert engine.full_grad("gain") is None
    hook = engine.module.up.register_forward_hook(lambda *_: engine.local_forward().__enter__())
    with pytest.raises(fzero.BackwardError, match="inside a forward"):
        engine(data(0))
    hook.remove()


@pytest.mark.parametrize("stage", STAGES)
def test_what_does_not_go_inside_is_refused(stage: int) -> None:
    misuse(stage)
    run_ranks(2, misuse, stage)


def alone_in_a_block() -> None:
    """Ranks run other modules, other counts, and come back to a step that all take."""
    rank, _ = here()
    engine = fzero.Engine(build(Experts), SGD(), fzero.Config(stage=3, bucket_mb=1e-4))
    plain = build(Experts)
    for turn in range(2):
        out = engine(data(rank, turn), [0, 1])
        with engine.local_forward(), torch.no_grad():
            for i in range(3 * rank):
                found = engine.module(data(rank, i), [i % 3, 2])
                assert torch.equal(found, plain(data(rank, i), [i % 3, 2]))
        out.square().mean().backward()
        engine.step()
        plain.load_state_dict(engine.state_dict())


def test_in_a_local_block_ranks_go_their_own_ways() -> None:
    run_ranks(2, alone_in_a_block)
