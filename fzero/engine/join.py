"""Loaders of different lengths: ranks whose data is over go along until all others are done.

[Note: along for the ride] Collectives are those of the module's own forward and backward, which no
rank can foresee for another. So a rank without data runs its last batch again, and what that brings
counts for nothing: its gradients are zeros, and those of the others are multiplied such that the
mean is over the ranks that have data.
"""

from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

import torch

from fzero.distributed.mesh import Mesh
from fzero.engine import phases
from fzero.engine.driver import Driver
from fzero.engine.parts import Parts
from fzero.errors import BackwardError, RankMismatchError

Batch = TypeVar("Batch")


class Rounds(Iterator[Batch]):
    """What `Engine.join` gives; a second engine's that loops over it goes by its rounds.

    Args:
        mesh: whose ranks take part.
        rounds: batches, and by how many ranks a gradient of this one is divided: those that have
            data, 0 where it is over here.
    """

    def __init__(self, mesh: Mesh, rounds: Generator[tuple[Batch, int]]) -> None:
        self.mesh, self._rounds, self.share = mesh, rounds, 0

    def __next__(self) -> Batch:
        batch, self.share = next(self._rounds)
        return batch

    def close(self) -> None:
        """Leave the loop, as a `break` does: from now on all that this rank brings counts."""
        self._rounds.close()


def join(
    driver: Driver, parts: Parts, loader: Iterable[Batch], *, averages: bool
) -> Iterator[Batch]:
    """See `Engine.join`.

    Args:
        driver, parts: of the engine.
        loader: this rank's batches.
        averages: whether gradients are the mean over ranks, or their sum.
    """
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise BackwardError(
            "engine.join takes what gives this rank's batches, such as a DataLoader, and was given "
            f"a {type(loader).__name__}. Loop over it: for batch in engine.join(loader)."
        )
    mesh = parts.stepper.plan.mesh

    def rounds() -> Generator[tuple[Batch, int]]:
        try:
            # another engine's batches go on after a rank's data is over: its rounds tell of that
            if isinstance(loader, Rounds) and loader.mesh == mesh:
                found = ((batch, loader.share) for batch in loader)
            elif mesh.world_size == 1:
                found = ((batch, 1) for batch in loader)
            else:
                found = _asked(driver, parts, loader)
            for batch, share in found:
                driver.weight = (mesh.world_size / share if averages else 1.0) if share else 0.0
                yield batch, share
        finally:
            driver.weight = 1.0

    return Rounds(mesh, rounds())


def _asked(driver: Driver, parts: Parts, loader: Iterable[Batch]) -> Iterator[tuple[Batch, int]]:
    """Batches and shares, by an exchange with all ranks in each round."""
    mesh, transport = parts.stepper.plan.mesh, parts.transport
    batches, last, is_over = iter(loader), [], False
    while True:
        if not is_over:
            try:
                last = [next(batches)]
            except StopIteration:
                is_over = True
        driver.recover("engine.join() was called")
        phases.refuse_inside(driver.state, "join()")
        flags = torch.tensor([not is_over, not last], dtype=torch.float32, device="cpu")
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
        yield last[0], 0 if is_over else going
