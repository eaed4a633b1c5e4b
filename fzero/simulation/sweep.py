"""The fastest way to run a step that fits the memory: many configs, simulated side by side."""

import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from fzero.config import Config
from fzero.errors import FzeroError
from fzero.optim import adamw
from fzero.program.hardware import Hardware
from fzero.program.text import count, seconds, size, table
from fzero.simulation.layers import simulate_layers
from fzero.simulation.models import REMAT, Shape, build
from fzero.simulation.report import ROOM, Report
from fzero.simulation.simulation import simulate


@dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Args:
        stage: of ZeRO.
        replicate: copies of the sharded model, for HSDP; 1: none.
        accum: micro-batches of a step.
        remat: what is recomputed: see `fzero.simulation.models.REMAT`.
        offload: whether masters and optimizer state are in the host's memory.
    """

    stage: int = 3
    replicate: int = 1
    accum: int = 1
    remat: str = "none"
    offload: bool = False

    def __str__(self) -> str:
        copies = f", {self.replicate} replicas" if self.replicate > 1 else ""
        offload = ", offload" if self.offload else ""
        return f"stage {self.stage}{copies}, accum {self.accum}, remat {self.remat}{offload}"


@dataclass(frozen=True)
class Job:
    """What all candidates have in common.

    Args:
        shape: of the model.
        rows: sequences in a rank's batch of a whole step.
        sequence: tokens in each.
        world: ranks.
        hardware: that they are.
        precision: as `Config.precision`.
        exact: record all layers instead of few.
    """

    shape: Shape
    rows: int
    sequence: int
    world: int
    hardware: Hardware
    precision: Any = "bf16"
    exact: bool = False

    def run(self, candidate: Candidate) -> Report:
        """What a candidate costs."""
        cfg = Config(
            stage=candidate.stage,
            accum_steps=candidate.accum,
            precision=self.precision,
            clip_norm=1.0,
            offload="cpu" if candidate.offload else None,
        )
        opt, layers = adamw(1e-4), self.shape.layers

        def make(depth: int) -> Any:
            return build(
                self.shape,
                self.rows,
                layers=depth,
                sequence=self.sequence,
                policy=REMAT[candidate.remat],
                again=candidate.remat != "none",
            )

        ranks = self.world // candidate.replicate
        mesh = (candidate.replicate, ranks) if candidate.replicate > 1 else self.world
        if self.exact:
            model_fn, params, batch = make(layers)
            return simulate(model_fn, opt, cfg, params, batch, mesh, self.hardware)
        return simulate_layers(make, layers, opt, cfg, mesh, self.hardware)

    @functools.cached_property
    def parameters(self) -> int:
        """Numbers that the model has."""
        few = [
            sum(x.numel() for x in build(self.shape, 1, layers=n, sequence=1)[1].values())
            for n in (1, 2)
        ]
        return few[0] + (few[1] - few[0]) * (self.shape.layers - 1)

    def least_bytes(self, candidate: Candidate) -> int:
        """Bytes of parameters and optimizer state, which no candidate does without.

        A bound from below, for less than a recording costs.
        """
        params = self.parameters
        ranks = self.world // candidate.replicate
        low = self.precision is not None
        part = [ranks if candidate.stage >= stage else 1 for stage in (3, 1)]
        # stage 3 keeps its masters as parameters; others keep both
        whole = params * (4 if candidate.stage == 3 or not low else 2) // part[0]
        masters = 4 * params // part[1] if low and candidate.stage < 3 else 0
        state = 0 if candidate.offload else masters + 8 * params // part[1]
        return whole + state


def candidates(job: Job, limit: int = 30) -> list[Candidate]:
    """Candidates for a job, the simplest first; those that can't fit are left out unrecorded."""
    has = job.hardware.memory or float("inf")
    near = job.hardware.devices_per_node or job.world
    copies = [1]
    if job.world > near and job.world % near == 0:  # sharded inside a node, copied between
        copies.append(job.world // near)
        if job.world % (8 * near) == 0 and job.world // (8 * near) > 1:
            copies.append(job.world // (8 * near))
    accums = [k for k in (1, 2, 4, 8) if job.rows % k == 0]
    ways = itertools.product((False, True), (3, 2, 1, 0), copies, accums, REMAT)
    found = [
        Candidate(stage, replicate, accum, remat, offload)
        for offload, stage, replicate, accum, remat in ways
        if stage or replicate == 1
    ]
    fitting = [one for one in found if job.least_bytes(one) <= ROOM * has]
    return fitting[:limit]


def sweep(
    job: Job,
    those: Iterable[Candidate],
    *,
    workers: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[tuple[Candidate, Report | FzeroError]]:
    """What each candidate costs: what fits comes first, the fastest before others.

    Args:
        job: what they have in common.
        those: to simulate.
        workers: processes that simulate side by side; None: one for each core.
        tell: called with a line when one is done.
    """
    those = list(those)
    workers = min(workers or os.cpu_count() or 1, len(those))
    done = list(_told(_results(job, those, workers), len(those), tell))
    return sorted(done, key=_rank)


def _results(
    job: Job, those: Sequence[Candidate], workers: int
) -> Iterator[tuple[Candidate, Report | FzeroError]]:
    if workers <= 1:
        yield from ((one, _run(job, one)) for one in those)
        return
    # fresh processes: a fork would have the caller's threads' locks, and its process groups
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {pool.submit(_run, job, one): one for one in those}
        for future in as_completed(running):
            yield running[future], future.result()


def _run(job: Job, candidate: Candidate) -> Report | FzeroError:
    try:
        return job.run(candidate).without_program()
    except FzeroError as error:
        return error


def _told(
    results: Iterable[tuple[Candidate, Report | FzeroError]],
    total: int,
    tell: Callable[[str], None],
) -> Iterator[tuple[Candidate, Report | FzeroError]]:
    for place, (one, result) in enumerate(results, 1):
        tell(f"[{place}/{total}] {one}: {_short(result)}")
        yield one, result


def _short(result: Report | FzeroError) -> str:
    if isinstance(result, FzeroError):
        return f"refused: {result}"
    fits = {True: "fits", False: "does not fit", None: ""}[result.fits]
    return f"{size(result.peak_bytes)}, {seconds(result.seconds)} {fits}"


def _rank(row: tuple[Candidate, Report | FzeroError]) -> tuple[int, float]:
    _, result = row
    if isinstance(result, FzeroError):
        return 2, 0.0
    if result.fits is False:
        return 1, float(result.peak_bytes)
    return 0, result.seconds


def as_table(rows: Iterable[tuple[Candidate, Report | FzeroError]]) -> str:
    """The results of a sweep as a table."""
    lines = [["", "candidate", "peak", "host", "step", "waits", "tokens/s", "MFU"]]
    for one, result in rows:
        if isinstance(result, FzeroError):
            lines.append(["-", str(one), "refused", "", "", "", "", ""])
            continue
        lines.append(
            [
                {True: "fits", False: "too large", None: ""}[result.fits],
                str(one),
                size(result.peak_bytes),
                size(result.host_bytes) if result.host_bytes else "",
                seconds(result.seconds),
                seconds(result.exposed),
                count(result.tokens_per_second),
                f"{result.mfu:.1%}",
            ]
        )
    return "\n".join(table(lines, "llrrrrrr"))
