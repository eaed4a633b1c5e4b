"""`load_partial`: what is read, what it is called, what stays, and what the report says of it."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fzero
from fzero.checkpoint import LoadReport, export_safetensors, load_partial, save
from tests.checkpoint.cases import Job, differing, full, make
from tests.ranks import run_ranks

# Uneven over 2 and 3 ranks, too small to split, 0-d.
OLD = {
    "backbone.0.weight": (13, 6),
    "backbone.0.bias": (3,),
    "words": (7, 5),
    "head.w": (2, 3),
    "scale": (),
}
# The vocabulary has more rows and fewer columns; the head is another one.
NEW = {
    "encoder.0.weight": (13, 6),
    "encoder.0.bias": (3,),
    "words": (9, 4),
    "out.w": (4, 3),
    "scale": (),
}
WRITERS = [Job(1, 0), Job(2, 3), Job(2, 2, "bf16"), Job(3, 1)]
READERS = [Job(1, 3), Job(2, 0), Job(2, 1, "bf16"), Job(2, 2, "bf16"), Job(2, 3), Job(3, 3, "bf16")]
HOW: dict[str, Any] = {"rename": {"backbone.*": "encoder.*"}, "overlap": "wor*"}


def _write(jobs: list[tuple[int, Job]], run: Path) -> list[dict[str, Tensor]]:
    found = []
    for i, job in jobs:
        params, opt_state, _ = make(job, 3, OLD)
        save(run / str(i), params, opt_state, step=i)
        found.append(full(params, opt_state))
    return found


def _read(jobs: list[Job], run: Path, state: bool) -> list[Any]:
    found = []
    for job in jobs:
        for i in range(len(WRITERS)):
            before = full(*make(job, 1, NEW)[:2])
            loaded = load_partial(run / str(i), *make(job, 1, NEW)[:2], state=state, **HOW)
            found.append((job, i, before, full(*loaded[:2]), loaded.report))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    run = tmp_path_factory.mktemp("run")
    values: dict[int, dict[str, Tensor]] = {}
    for world in {job.world for job in WRITERS}:
        jobs = [(i, job) for i, job in enumerate(WRITERS) if job.world == world]
        for (i, _), found in zip(jobs, run_ranks(world, _write, jobs, run)[0], strict=True):
            values[i] = found
    return run, [values[i] for i in range(len(WRITERS))]


def _expected(
    old: dict[str, Tensor], before: dict[str, Tensor], *, state: bool
) -> dict[str, Tensor]:
    """By hand, on full tensors."""
    after = {path: x.clone() for path, x in before.items()}
    for path, x in old.items():
        inner = path.startswith((".inner", ".step"))
        to = path.replace("backbone.", "encoder.")
        if to in after and (state or not inner):
            rows = tuple(slice(0, min(n, m)) for n, m in zip(x.shape, after[to].shape, strict=True))
            after[to][rows] = x[rows]
    return after


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_both_have_is_read_and_the_rest_stays_in_every_sharding(
    world: int, state: bool, written: tuple[Path, list[dict[str, Tensor]]]
) -> None:
    run, values = written
    jobs = [job for job in READERS if job.world == world]
    reports = set()
    for rank in run_ranks(world, _read, jobs, run, state):
        for job, i, before, after, report in rank:
            expected = _expected(values[i], before, state=state)
            assert not differing(after, expected), (WRITERS[i], job)
            assert differing(after, before)
            reports.add(str(report))
    (said,) = reports
    assert "renamed" in said
    moments = 2 * state  # of Adam, for each parameter
    assert f"cut {1 + moments}: " in said
    assert f"missing {1 + moments}: params.out.w" in said
    assert f"unexpected {1 + moments}: params.head.w" in said


class _Model(nn.Module):
    def __init__(self, *, words: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.words = nn.Embedding(words, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.words(x).mean(1)).square().mean()


def _engine(words: int, stage: int, seed: int) -> fzero.Engine:
    torch.manual_seed(seed)
    return fzero.Engine(_Model(words=words), fzero.optim.adamw(0.1), fzero.Config(stage))


def _engines(run: Path, stage: int) -> None:
    old = _engine(5, 3, 0)
    old(torch.tensor([[0, 1], [2, 4]])).backward()
    old.step()
    save(run, *old.state)
    new = _engine(6, stage, 1)
    x = torch.tensor([[5, 1], [2, 3]])
    new(x).backward()  # what it gathered is not what it reads next
    new.zero_grad()
    row = new.full_param("words.weight")[5].clone()
    params, opt_state, report = load_partial(run, *new.state, overlap="words.weight")
    new.state = params, opt_state
    theirs = old.state_dict()
    theirs["words.weight"] = torch.cat([theirs["words.weight"], row[None]])
    ours = new.state_dict()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    assert new.global_steps == 0
    assert report.cut == {"params.words.weight": ((5, 4), (6, 4))}
    assert report.missing == report.unexpected == ()
    plain = _Model(words=6)
    plain.load_state_dict(theirs)
    assert torch.equal(new.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_reads_parameters_and_buffers(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _engines, tmp_path, stage)


def test_patterns_name_what_the_checkpoint_has(tmp_path: Path) -> None:
    theirs = {f"model.{name}": torch.full((2,), float(i)) for i, name in enumerate(["a", "b", "c"])}
    export_safetensors(tmp_path, theirs | {"lm_head": torch.ones(2)})
    here = {name: torch.zeros(2) for name in ("a", "b", "tail.c")}
    # the others lose the prefix that they share; what is named is final
    params, _, report = load_partial(
        tmp_path, here, rename={"model.c": "tail.c"}, only=["*.c", "b"]
    )
    assert [x[0].item() for x in params.values()] == [0.0, 1.0, 2.0]
    assert report == LoadReport(
        loaded=("params.b", "params.tail.c"),
        renamed={"params.tail.c": "model.c"},
        unexpected=("params.lm_head",),
        left=("params.a",),
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"only": "boddy.*"}, r"only=.*'boddy\.\*' matches no name here.*body\.w"),
        ({"overlap": ["nothing"]}, r"overlap=.*'nothing' matches no name here"),
        ({"rename": {"bodies.*": "x.*"}}, r"rename=.*matches no name in the checkpoint"),
        ({"rename": {"body.w": "words"}}, r"params\.body\.w and params\.words .*both be"),
        ({"rename": {"body.w": "*"}}, r"more '\*'"),
        ({"rename": {"body.w": None}}, "maps names to names"),
        ({"only": [3]}, "globs over names"),
        ({}, r"words \(\(2, 3\) in the checkpoint, \(4, 3\) asked for\)\. Name them in overlap"),
        ({"overlap": "*"}, r"flat \(\(4,\) in the checkpoint, \(2, 2\) asked for\)"),
        ({"overlap": "words", "only": ["words", "low"]}, "cast=True"),
        ({"only": "new"}, "nothing that is asked for"),
        ({"state": True}, "opt_state_like is None"),
    ],
)
def test_what_cannot_come_true_is_refused_before_anything_is_read(
    how: dict[str, Any], said: str, tmp_path: Path
) -> None:
    there = {"body.w": torch.ones(2), "words": torch.ones(2, 3), "flat": torch.ones(4)}
    save(tmp_path, there | {"low": torch.ones(2)})
    here = {"body.w": torch.zeros(2), "words": torch.zeros(4, 3), "flat": torch.zeros(2, 2)}
    here |= {"low": torch.zeros(2, dtype=torch.bfloat16), "new": torch.zeros(1)}
    with pytest.raises(fzero.CheckpointError, match=said):
        load_partial(tmp_path, here, **how)
    assert not any(x.any() for x in here.values())


def _differently(run: Path) -> None:
    rank = torch.distributed.get_rank()
    with pytest.raises(fzero.CheckpointError, match=r"ranks differ in what they load.*only"):
        load_partial(run, {"a": torch.zeros(1), "b": torch.zeros(1)}, only="ab"[rank])


def test_ranks_ask_for_the_same(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "m.safetensors"
    )
    run_ranks(2, _differently, tmp_path / "m.safetensors")
