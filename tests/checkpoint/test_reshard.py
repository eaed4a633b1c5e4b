"""Any world, stage and mesh to any other, on real ranks, bit for bit."""

import functools
from pathlib import Path

import pytest
import torch

import fzero
from fzero.checkpoint.format import reader
from fzero.checkpoint.format.pieces import pieces
from fzero.distributed.ragged import is_supported
from tests.checkpoint.cases import SHAPES, Job, differing, read, write
from tests.ranks import run_ranks

JOBS = [
    Job(1, 0),
    Job(1, 3, "bf16"),
    Job(2, 1, "bf16"),
    Job(2, 3, accum=2),
    Job(3, 3),
    Job(3, 2, "bf16", accum=3),
    Job(4, 3, replicas=2),
    Job(4, 2, "bf16", replicas=2),
    Job(4, 0),
    *([Job(2, 3, layout="flat"), Job(4, 3, "bf16", replicas=2, layout="flat")] * is_supported()),
]


def _write_all(jobs: list[tuple[int, Job]], run: Path) -> list[dict]:
    return [write(job, run / str(seed), seed) for seed, job in jobs]


def _read_all(jobs: list[Job], run: Path) -> list[list[dict]]:
    return [[read(job, run / str(seed)) for seed in range(len(JOBS))] for job in jobs]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Every job's checkpoint, each with values of its own, and those values."""
    run = tmp_path_factory.mktemp("run")
    values: list[dict] = [{} for _ in JOBS]
    for world in {job.world for job in JOBS}:
        jobs = [(seed, job) for seed, job in enumerate(JOBS) if job.world == world]
        by_rank = run_ranks(world, _write_all, jobs, run)
        for rank in by_rank:
            for (seed, _), found in zip(jobs, rank, strict=True):
                values[seed] = values[seed] or found
                assert not differing(values[seed], found)
    return run, values


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.quick("2", "3")
def test_every_job_reads_what_every_other_wrote(
    world: int, written: tuple[Path, list[dict]]
) -> None:
    run, values = written
    jobs = [job for job in JOBS if job.world == world]
    for rank in run_ranks(world, _read_all, jobs, run):
        for job, by_seed in zip(jobs, rank, strict=True):
            for writer, expected, found in zip(JOBS, values, by_seed, strict=True):
                assert not differing(expected, found), (writer, job)


@pytest.mark.parametrize("seed", range(len(JOBS)))
def test_every_value_is_stored_once_and_the_work_is_shared(
    seed: int, written: tuple[Path, list[dict]]
) -> None:
    run, values = written
    (step,) = (run / str(seed)).iterdir()
    sizes = [file.stat().st_size for file in step.glob("*.safetensors")]
    stored = sum(x.nbytes for x in values[seed].values())
    assert len(sizes) == JOBS[seed].world
    assert stored < sum(sizes) < stored + 4096 * len(sizes)  # the headers
    assert max(sizes) - min(sizes) < 2048


def test_leaves_that_lie_otherwise_are_read_alike(
    written: tuple[Path, list[dict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, values = written
    # as large leaves are: a few rows at a time
    monkeypatch.setattr(reader, "pieces", functools.partial(pieces, limit=64))
    for seed, expected in enumerate(values):
        like = {}
        for name in SHAPES:
            x = expected[f"[{name!r}]"]
            # the last dim first in memory: no box of the file follows the leaf's order
            dims = list(reversed(range(x.dim())))
            like[name] = torch.zeros_like(x.permute(dims).contiguous()).permute(dims)
        params, _ = fzero.checkpoint.load(run / str(seed), like)
        for name, x in params.items():
            assert torch.equal(x, expected[f"[{name!r}]"]), (seed, name)
            assert x is like[name]
