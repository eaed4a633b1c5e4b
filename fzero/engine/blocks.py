"""Blocks in which full parameters are there: `local_forward` and `gathered`."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fzero.distributed.agree import agree
from fzero.engine import events, phases
from fzero.engine.backward_state import GATHERED, LOCAL
from fzero.engine.driver import Driver
from fzero.errors import ShardError
from fzero.state.follow import follow_

Params = dict[str, Tensor]


@contextlib.contextmanager
def local_forward(driver: Driver) -> Iterator[None]:
    """All parameters are there, and no collective runs; see `Engine.local_forward`."""
    driver.recover("engine.local_forward() was called")
    phases.refuse_inside(driver.state, "local_forward()")
    with contextlib.ExitStack() as block:
        if not driver.state.is_local:  # else all is there, and other ranks may not come
            driver.journal.enter(LOCAL)
            if driver.units is not None:
                driver.units.reshard()
                block.enter_context(driver.units.block(driver.units.everything()))
        block.enter_context(_open(driver, LOCAL))
        yield


@contextlib.contextmanager
def gathered(driver: Driver, indices: Sequence[int]) -> Iterator[Params]:
    """Some parameters are there; see `Engine.gathered`."""
    driver.recover("engine.gathered() was called")
    with contextlib.ExitStack() as block:
        if driver.units is not None and not driver.state.is_local:
            _agree(driver, indices, None)
            block.enter_context(driver.units.block(_full(driver, indices)))
        block.enter_context(_open(driver, GATHERED))
        yield _params(driver, indices)


@contextlib.contextmanager
def gathered_for(driver: Driver, indices: Sequence[int], modifier_rank: int) -> Iterator[Params]:
    """The same, and what one rank writes counts.

    [Note: one rank writes] At stage 3 it writes into copies, of which every rank then takes its
    part: in a compute dtype, so elements that still are the cast of their shard keep its digits, as
    [Note: masters follow] has it. Below stage 3 it writes into the parameters, and an exception
    puts their values back.
    """
    driver.settle("engine.gathered(modifier_rank=...) was called")
    phases.refuse_inside(driver.state, "gathered(modifier_rank=...)")
    if driver.state.is_local:
        phases.refuse_in_block(driver.state, "gathered(modifier_rank=...)")
    _agree(driver, indices, modifier_rank)
    units, locals_ = driver.units, driver.stepper.locals
    try:
        with contextlib.ExitStack() as block:
            if units is not None:
                # copies: the memory of what is not split may be the parameter's own
                written = {i: full.clone() for i, full in _full(driver, indices).items()}
                block.enter_context(units.block(written, written=True))
            else:
                written = {i: locals_[i] for i in indices}
                block.enter_context(_restored(list(written.values())))
            block.enter_context(_open(driver, GATHERED))
            yield _params(driver, indices)
    except BaseException:
        driver.journal.raised(sent=True)  # the others wait for what this rank has written
        raise
    _keep(driver, written, modifier_rank)


def _params(driver: Driver, indices: Sequence[int]) -> Params:
    return {driver.reducer.leaves[i].name: driver.params[i] for i in indices}


@contextlib.contextmanager
def _open(driver: Driver, name: str) -> Iterator[None]:
    driver.on(events.BlockEntered(name))
    try:
        yield
    finally:
        driver.on(events.BlockLeft(name))


@contextlib.contextmanager
def _restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """After an exception these have the values from before."""
    before = [x.detach().clone() for x in tensors]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for x, old in zip(tensors, before, strict=True):
                x.copy_(old)
        raise


def _agree(driver: Driver, indices: Sequence[int], modifier_rank: int | None) -> None:
    """All ranks are here, with the same names and the same rank that may write."""
    mesh = driver.stepper.plan.mesh
    driver.journal.enter(GATHERED)
    names = ", ".join(driver.reducer.leaves[i].name for i in indices)
    items = [("names", names), ("modifier_rank", str(modifier_rank))]
    hint = "Call it on every rank, with the same arguments."
    agree("engine.gathered", items, mesh, driver.cfg.timeout, hint)
    if modifier_rank is not None and modifier_rank not in mesh.ranks:
        raise ShardError(
            f"engine.gathered(modifier_rank={modifier_rank!r}): there is no such rank; the "
            f"engine's are {list(mesh.ranks)}. Name the rank whose writes are to count, by its "
            "global number, or leave it out to read."
        )


def _full(driver: Driver, indices: Sequence[int]) -> dict[int, Tensor]:
    """Full parameters as the module sees them; a collective, but for what is there already."""
    units = driver.units
    assert units is not None
    there = units.in_blocks
    missing = [i for i in indices if i not in there]
    shards, leaves = [units.shards[i] for i in missing], [units.leaves[i] for i in missing]
    new = dict(zip(missing, driver.transport.gather(shards, leaves).wait(), strict=True))
    return {i: new[i] if i in new else there[i] for i in indices}


@torch.no_grad()
def _keep(driver: Driver, written: Mapping[int, Tensor], modifier_rank: int) -> None:
    """What the one rank has written is what every rank has from now on."""
    mesh, sharding = driver.stepper.plan.mesh, driver.stepper.plan.sharding
    driver.journal.enter(GATHERED)
    mine = mesh.ranks[mesh.rank] == modifier_rank
    there = driver.units.in_blocks if driver.units is not None else {}
    for index, full in written.items():
        new = driver.transport.chosen(full, mine=mine)
        leaf, own = sharding.layout.leaves[index], driver.stepper.locals[index]
        if index in there:  # by a block around this one
            there[index].copy_(new)
        if sharding.dtensors[index] is not None:
            new = leaf.split(new, mesh.shard_rank)
        if new.dtype == own.dtype:
            own.copy_(new)
        else:  # see [Note: one rank writes]
            follow_([own], [new])
    torch.autograd.graph.increment_version([driver.params[i] for i in written])
