"""The fastest way to run a step that fits the memory: many configs, simulated side by side."""

import functools
import itertools
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any

from fzero.config import Config
from fzero.errors import FzeroError
from fzero.optim import adamw
from fzero.program import Program
from fzero.program.hardware import Hardware
from fzero.program.passes.offload import offload
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
        activations: whether all of forward's values that may wait for backward there do.
    """

    stage: int = 3
    replicate: int = 1
    accum: int = 1
    remat: str = "none"
    offload: bool = False
    activations: bool = False

    def __str__(self) -> str:
        copies = f", {self.replicate} replicas" if self.replicate > 1 else ""
        offload = ", offload" if self.offload else ""
        offload += ", activations on the host" if self.activations else ""
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
            passes=(partial(send_all, hardware=self.hardware),) if candidate.activations else (),
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
        """Bytes of parameters, optimizer state, and what forward keeps of each layer.

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
        if candidate.activations:  # what forward keeps is on the host
            return whole + state
        logits = 4 * self._tokens(candidate) * self.shape.vocab  # normalised, in float32
        return whole + state + self._kept_bytes(candidate) + logits

    def _kept_bytes(self, candidate: Candidate) -> int:
        """What forward keeps for backward: of each layer its input, if not all is recomputed what
        its products make too, and if nothing is what stands between them."""
        shape, dim = self.shape, self._head_dim
        row = shape.width
        if candidate.remat != "full" and not shape.experts:
            row += (shape.heads + 2 * shape.kv_heads) * dim
            row += shape.hidden * (1 if shape.gpt2 else 2)
        if candidate.remat == "none" and not shape.experts:
            # both norms' results, the sum between the halves, attention's result
            row += 3 * shape.width + shape.heads * dim
            row += shape.hidden * (1 if shape.gpt2 else 2)
        tokens = self._tokens(candidate)
        return shape.layers * tokens * row * (4 if self.precision is None else 2)

    def _tokens(self, candidate: Candidate) -> int:
        """Of a rank's micro-batch."""
        return self.rows // candidate.accum * self.sequence

    def least_seconds(self, candidate: Candidate) -> float:
        """Seconds that a step's matrix products take at the rate that products reach, or that the
        way to the host takes, if it is longer.

        A bound from below: all else, and waiting, comes on top.
        """
        shape, hardware = self.shape, self.hardware
        attention = 2 * shape.width * (shape.heads + shape.kv_heads) * self._head_dim
        down = shape.width * shape.hidden * (shape.active if shape.experts else 1)
        layer = attention + down * (2 if shape.gpt2 else 3)
        products = 3 * (shape.layers * layer + shape.width * shape.vocab)
        if candidate.remat == "full":  # of a layer's last product nothing is read in backward
            products += shape.layers * (layer - down)
        rate = (hardware.low_flops if self.precision is not None else None) or hardware.flops
        computing = 2 * self.rows * self.sequence * products / rate
        if not candidate.activations:
            return computing
        crossing = candidate.accum * self._kept_bytes(candidate) / hardware.host_bandwidth
        return max(computing, crossing)

    @property
    def _head_dim(self) -> int:
        return self.shape.head_dim or self.shape.width // self.shape.heads


class LeftOut(FzeroError):
    """A candidate that a bound rules out: it can't be the fastest that fits."""


def send_all(program: Program, hardware: Hardware) -> Program:
    """The pass of `Candidate.activations`: all that may travel to the host does."""
    return offload(program, [node.name for node in program.graph.nodes], hardware)


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
    there = [(remat, False) for remat in REMAT]
    if not job.hardware.shares_memory:
        there += [("full", True), ("none", True)]
    ways = itertools.product((False, True), (3, 2, 1, 0), copies, accums, there)
    found = [
        Candidate(stage, replicate, accum, remat, offload, away)
        for offload, stage, replicate, accum, (remat, away) in ways
        if (stage or replicate == 1) and not (stage == 1 and accum == 1)  # that is stage 2
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

    Those whose products alone, or whose way to the host, take longer than a step that fits are left
    out, and said to be: a `LeftOut` stands for their report.

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
    # what may be fastest first: it rules out most of the others
    waiting = deque(sorted(those, key=job.least_seconds))
    best = float("inf")

    def ruled_out() -> Iterator[tuple[Candidate, FzeroError]]:
        while waiting and (least := job.least_seconds(waiting[0])) > best:
            text = f"it takes at least {seconds(least)}, and a step that fits {seconds(best)}"
            yield waiting.popleft(), LeftOut(text)

    def better(result: Report | FzeroError) -> float:
        if isinstance(result, Report) and result.fits is not False:
            return min(best, result.seconds)
        return best

    if workers <= 1:
        while waiting:
            one = waiting.popleft()
            result = _run(job, one)
            best = better(result)
            yield one, result
            yield from ruled_out()
        return
    # fresh processes: a fork would have the caller's threads' locks, and its process groups
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_end_with_parent) as pool:
        running: dict[Future[Report | FzeroError], Candidate] = {}
        while waiting or running:
            while waiting and len(running) < workers:
                one = waiting.popleft()
                running[pool.submit(_run, job, one)] = one
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                best = better(future.result())
                yield running.pop(future), future.result()
            yield from ruled_out()


def _end_with_parent() -> None:
    """Have this process end when the one that started it is gone.

    A pool tells its workers when to end; one that is killed does not, and they would go on.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
    if isinstance(result, LeftOut):
        return f"left out: {result}"
    if isinstance(result, FzeroError):
        return f"refused: {result}"
    fits = {True: "fits", False: "does not fit", None: ""}[result.fits]
    return f"{size(result.peak_bytes)}, {seconds(result.seconds)} {fits}"


def _rank(row: tuple[Candidate, Report | FzeroError]) -> tuple[int, float]:
    _, result = row
    if isinstance(result, FzeroError):
        return 3 if isinstance(result, LeftOut) else 2, 0.0
    if result.fits is False:
        return 1, float(result.peak_bytes)
    return 0, result.seconds


def as_table(rows: Iterable[tuple[Candidate, Report | FzeroError]]) -> str:
    """The results of a sweep as a table."""
    lines = [["", "candidate", "peak", "host", "step", "waits", "tokens/s", "MFU"]]
    for one, result in rows:
        if isinstance(result, FzeroError):
            why = "left out" if isinstance(result, LeftOut) else "refused"
            lines.append(["-", str(one), why, "", "", "", "", ""])
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
