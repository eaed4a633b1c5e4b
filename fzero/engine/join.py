"""Loaders of different lengths: ranks whose data is over go along until all others are done.

[Note: along for the ride] Collectives are those of the module's own forward and backward, which no
rank can foresee for another. So a rank without data runs its last batch again, and what that brings
counts for nothing: its gradients are zeros, and those of the others are multiplied such that the
mean is over the ranks that have data.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from fzero.engine import phases
from fzero.engine.driver import Driver
from fzero.engine.parts import Parts
from fzero.errors import RankMismatchError

Batch = TypeVar("Batch")


def join(
    driver: Driver, parts: Parts, loader: Iterable[Batch], *, averages: bool
) -> Iterator[Batch]:
    """See `Engine.join`.

    Args:
        driver, parts: of the engine.
        loader: this rank's batches.
        averages: whether gradients are the mean over ranks, or their sum.
    """
    mesh, transport = parts.stepper.plan.mesh, parts.transport
    if mesh.world_size == 1:
        yield from loader
        return
    batches, last, is_over = iter(loader), [], False
    try:
        while True:
            if not is_over:
                try:
                    last = [next(batches)]
                except StopIteration:
                    is_over = True
            driver.recover()
            phases.refuse_inside(driver.state, "join()")
            flags = torch.tensor([not is_over, not last], dtype=torch.float32)
            driver.journal.enter("join")
            with transport.circle.at("engine.join, the next batch", driver.cfg.timeout):
                going, without = map(int, transport.sum(flags.to(parts.reducer.device)).tolist())
            if not going:
                return
            if without:
                raise RankMismatchError(
                    f"engine.join: {without} of {mesh.world_size} ranks have not one batch"
                    f"{', this one among them' if not last else ''}, and {going} have some. A rank "
                    "whose data is over runs its last batch again, so each needs at least one: "
                    "deal out samples such that every rank gets some."
                )
            driver.weight = 0.0 if is_over else mesh.world_size / going if averages else 1.0
            yield last[0]
    finally:
        driver.weight = 1.0
