"""Late is waited for; elsewhere, raised, left and dead are told to every rank, whoever lives on."""

import atexit
import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero.distributed import whereabouts, works
from fzero.distributed.mesh import resolve_mesh
from fzero.distributed.stations import Station
from fzero.distributed.whereabouts import Circle, circle_for, circle_of
from tests.ranks import Ranks, run_fresh, run_ranks

SOON = 15.0  # seconds: whoever was told stays so long, till others were


def _step(how: str, timeout: float | None) -> tuple[Callable[[Tensor], Any], Callable[[], Any]]:
    """One step on a batch of row numbers, and another thing that ranks do together."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Embedding(8, 8), nn.Linear(8, 8))
    kind, stage = how.split()
    cfg: dict[str, Any] = {"stage": int(stage), "timeout": timeout}

    def loss_of(call: Callable[..., Tensor], rows: Tensor) -> Tensor:
        return call(rows).square().mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, rows: Tensor) -> Tensor:
            first, act, rows_of, last = self.parts
            h = act(first(torch.ones(3)))
            return last(rows_of(rows) * h)  # an IndexError for a row that there isn't

    if kind == "engine":
        engine = fzero.Engine(Model(), fzero.optim.adamw(0.1), fzero.Config(**cfg))

        def train(rows: Tensor) -> Any:
            loss_of(engine, rows).backward()
            engine.step()
            return engine.state[1].metrics["loss"].item()

        return (
            train,
            lambda: (
                fzero.unshard(engine.state[0]) if stage == "3" else engine.full_grad("parts.0.bias")
            ),
        )
    apply, params = fzero.functionalize(Model())
    cfg["executor"] = kind
    step_fn = fzero.make_train_step(
        lambda p, rows: loss_of(lambda x: apply(p, x), rows),
        fzero.optim.adamw(0.1),
        fzero.Config(**cfg),
    )
    held = list(step_fn.init(params))

    def train_step(rows: Tensor) -> Any:
        held[:] = step_fn(*held, rows)
        return held[1].metrics["loss"].item()

    def other() -> Any:
        return fzero.checkpoint.save("unused", held[0], held[1])

    if stage == "3":
        return train_step, lambda: fzero.unshard(held[0])
    return train_step, other


def _play(out: Path, how: str, what: str, odd: int, timeout: float | None) -> None:
    """Two steps on all ranks; then `odd` does otherwise; what each rank is told goes to `out`."""
    whereabouts.PATIENCE, whereabouts.PAUSE = 0.5, 0.2
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    rank, rows = dist.get_rank(), torch.arange(4)
    train, other = _step(how, timeout)
    for _ in range(2):
        train(rows)
    told = ""
    try:
        if rank == odd:
            match what:
                case "late":
                    time.sleep(3)
                case "elsewhere":
                    other()
                case "raised":
                    with contextlib.suppress(IndexError):
                        train(rows + 7)
                case "dead":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "left":
                    atexit._run_exitfuncs()  # as the interpreter does; the process ends later
        if rank != odd or what not in ("raised", "left"):
            train(rows)
            train(rows)
        told = "trained"
    except fzero.FzeroError as error:
        told = f"{type(error).__name__} {error}"
    (out / str(rank)).write_text(told)
    until = time.monotonic() + SOON  # whoever was told lives on, till all the others were
    while time.monotonic() < until and len(list(out.iterdir())) < dist.get_world_size() - (
        what == "dead"
    ):
        time.sleep(0.05)


def _told(tmp_path: Path, world: int, *args: Any) -> dict[int, str]:
    ranks = Ranks.start(world, {}, joined=False)
    try:
        died = (AssertionError,) if "dead" in args else ()
        with contextlib.suppress(*died):
            ranks.call(_play, (tmp_path, *args), 4 * SOON)
    finally:
        ranks.kill()
    return {int(path.name): path.read_text() for path in tmp_path.iterdir()}


HOWS = ["traced 3", "eager 3", "engine 3", "traced 1", "eager 2", "engine 2"]
CASES = [
    (world, how, what)
    for world in (2, 3)
    for how in HOWS
    for what in ("late", "elsewhere", "raised", "dead", "left")
    if what != "raised" or how.endswith("3")  # elsewhere nothing was sent: it may try again
    if what != "late" or world == 3  # of two, one waits as of three
]
# one of each kind by default; all of them take minutes
QUICK = [
    (3, "traced 3", "late"),
    (3, "engine 3", "elsewhere"),
    (2, "eager 3", "raised"),
    (3, "traced 1", "dead"),
    (3, "engine 2", "left"),
]


@pytest.mark.parametrize(
    ("world", "how", "what"),
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES],
)
def test_each_rank_learns_what_became_of_another(
    world: int, how: str, what: str, tmp_path: Path
) -> None:
    odd = world - 1
    told = _told(tmp_path, world, how, what, odd, None)
    if what == "late":
        assert list(told.values()) == ["trained"] * world
        return
    ended = {"dead": {odd}, "left": {odd}, "raised": {odd}, "elsewhere": set()}[what]
    assert told.keys() == set(range(world)) - (ended if what == "dead" else set())
    for rank in set(range(world)) - ended:
        text = told[rank]
        assert text.startswith(("RankMismatchError", "CheckpointError")), text
        assert f"rank {odd}" in text
        assert {
            "elsewhere": "their collectives would not match" in text,
            "raised": "(raised)" in text,
            "dead": "ended" in text,
            "left": "has left" in text,
        }[what], text


@pytest.mark.parametrize(
    "how", [pytest.param(h, marks=[] if h == "traced 3" else pytest.mark.slow) for h in HOWS]
)
def test_config_timeout_is_how_late_a_rank_may_be(how: str, tmp_path: Path) -> None:
    told = _told(tmp_path, 2, how, "late", 1, 1.0)
    for text in told.values():
        assert "rank 1 did not come" in text
        assert "Config(timeout=" in text


def _come_late(out: Path, order: list[int]) -> None:
    """Rank 0 launches two collectives and waits for them in this order; rank 1 comes too late."""
    whereabouts.PATIENCE, whereabouts.PAUSE = 0.5, 0.2
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    mesh = resolve_mesh(None, "cpu")
    circle = circle_of(mesh)
    circle.limit = 1.0
    circle.announce("two collectives")
    if dist.get_rank() == 1:
        until = time.monotonic() + SOON
        while time.monotonic() < until and not list(out.iterdir()):
            time.sleep(0.05)
        return
    group = dist.group.WORLD
    assert group is not None
    flying = []
    for _ in order:
        parts = torch.zeros(2, 4)
        flying.append(works.exchange_into(parts, torch.zeros(2, 4), group, circle))
        time.sleep(0.2)
    with pytest.raises(fzero.RankMismatchError) as told:
        works.finish(flying[order[0]], circle)
    (out / "told").write_text(str(told.value))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_the_one_that_is_late_is_named_by_whichever_collective_fails(
    order: list[int], tmp_path: Path
) -> None:
    ranks = Ranks.start(2, {}, joined=False)
    try:
        ranks.call(_come_late, (tmp_path, order), 4 * SOON)
    finally:
        ranks.kill()
    text = (tmp_path / "told").read_text()
    assert "waited 1 s at 'two collectives', and rank 1 did not come" in text


def _late_on_a_mesh(out: Path) -> None:
    """Rank 1 stays away from the second step, on groups that `init_process_group` has not made."""
    whereabouts.PATIENCE, whereabouts.PAUSE = 0.5, 0.2
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    # torch makes a group of a mesh's axis like this: with half an hour
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    cfg = fzero.Config(stage=3, mesh=mesh)
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(0.1), cfg)
    state = step_fn.init({"w": torch.ones(4)})
    state = step_fn(*state, torch.ones(4))
    if dist.get_rank() == 1:
        until = time.monotonic() + 3 * SOON
        while time.monotonic() < until and not list(out.iterdir()):
            time.sleep(0.05)
        return
    with pytest.raises(fzero.RankMismatchError) as told:
        step_fn(*state, torch.ones(4))
    (out / "told").write_text(str(told.value))


def test_groups_of_a_mesh_have_the_time_limit_of_init_process_group(tmp_path: Path) -> None:
    ranks = Ranks.start(2, {}, joined=False)
    try:
        ranks.call(_late_on_a_mesh, (tmp_path,), 5 * SOON)
    finally:
        ranks.kill()
    assert "rank 0 waited 5 s at 'step function 1, call 2'" in (tmp_path / "told").read_text()


def _groups_of_one_circle() -> None:
    world: Any = dist.group.WORLD
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    first = circle_of(mesh)
    assert set(first._groups) == {mesh.get_group("shard")}
    assert circle_for((0, 1), [world]) is first
    assert set(first._groups) == {mesh.get_group("shard"), world}


def test_a_circle_has_the_groups_of_all_who_ask_for_it() -> None:
    run_ranks(2, _groups_of_one_circle)


def _parts_of_sums() -> list[tuple[Tensor, Tensor]]:
    """A reduce-scatter's part, and what it should be, of rows that lie dense and that don't."""
    mesh = resolve_mesh(None, "cpu").device_mesh
    circle, group, rank, world = (
        circle_of(mesh),
        mesh.get_group(),
        dist.get_rank(),
        dist.get_world_size(),
    )
    found = []
    for transposed in (False, True):
        whole = [torch.arange(4.0 * world).reshape(2 * world, 2) * (i + 1) for i in range(world)]
        mine = whole[rank].t().contiguous().t() if transposed else whole[rank]
        before = mine.clone()
        flying = works.reduce_scatter_tensor(mine, "sum", world, group.group_name, circle)
        expected = torch.stack(whole).sum(0)[2 * rank : 2 * rank + 2]
        found.append((works.wait(flying), expected))
        assert torch.equal(mine, before)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_reduce_scatter_over_gloo_is_a_part_of_the_sum(world: int) -> None:
    for rows in run_ranks(world, _parts_of_sums):
        for part, expected in rows:
            assert torch.equal(part, expected)


# ---- the bookkeeping of one rank, without others
def _alone() -> Circle:
    circle = Circle((0,), 0)
    circle.alone = False
    return circle


def test_an_exception_before_the_first_collective_leaves_a_rank_where_it_was() -> None:
    circle = _alone()
    circle._said = SimpleNamespace(names={0: {}})  # pyright: ignore
    with circle.at("one"):
        pass
    before = circle.here
    with pytest.raises(ValueError, match="mine"), circle.at("two"):
        raise ValueError("mine")
    assert circle.here == before
    assert circle._past[-1] == before


def test_a_rank_that_was_told_goes_to_no_other_station() -> None:
    circle = _alone()
    circle.announce("one")
    circle.verdict = "rank 1 went another way"
    with pytest.raises(fzero.RankMismatchError, match="rank 1 went another way"):
        circle.announce("two")
    assert circle.here.text == "one"


@pytest.mark.parametrize("limit", [0.2, None])
def test_a_rank_waits_for_words_of_others_to_its_limit(
    limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whereabouts, "group_limit", lambda: 0.4)
    circle = _alone()
    circle.limit = limit
    started, words = time.monotonic(), {"verdict": ""}

    def has(keys: list[str]) -> bool:
        assert time.monotonic() - started < 10, "it waits on"
        return False

    def first(key: str, text: str) -> str:
        words[key] = words[key] or text
        return words[key]

    circle._said = SimpleNamespace(  # pyright: ignore
        names={},
        has=has,
        first=first,
        say=lambda here, hint: None,
        read=lambda: ({1: Station(0, 0, "the start")}, {1: ""}),
    )
    with pytest.raises(fzero.RankMismatchError, match=r"rank 1 did not come.*after 'the start'"):
        circle.get("a word of rank 1")
    assert (limit or 0.4) < time.monotonic() - started
    assert words["verdict"] == circle.verdict


@pytest.mark.parametrize("texts", [["a", "b"], ["ab"], ["b", "a"], ["a", "b", ""]])
def test_other_stations_have_another_checksum(texts: list[str]) -> None:
    circle, same = _alone(), _alone()
    for text in texts:
        circle.announce(text)
    for text in ["a", "c"]:
        same.announce(text)
    assert circle.here.chain != same.here.chain
    assert circle._passed(0) == Station(0, 0, "the start")
    assert circle._passed(len(texts) + 1) is None


def _wait_long(how: str) -> list[str]:
    """Rank 1 is in a sleep of its own while the others are in the next step; what each warns of."""
    whereabouts.PATIENCE, whereabouts.PAUSE, whereabouts.TELLS = 0.5, 0.2, 1.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    train, _ = _step(how, None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            train(torch.arange(4))
        told.clear()  # a loaded machine may have had them wait for each other before
        if dist.get_rank() == 1:
            time.sleep(4)
        train(torch.arange(4))
    return [str(x.message) for x in told if "for rank 1, which last" in str(x.message)]


@pytest.mark.parametrize("how", ["traced 3", "engine 3"])
@pytest.mark.quick("engine 3")
def test_who_is_waited_for_long_is_told_while_there_is_time(how: str) -> None:
    ranks = Ranks.start(3, {}, joined=False)
    try:
        first, second, third = ranks.call(_wait_long, (how,), 4 * SOON)
    finally:
        ranks.kill()
    assert second == third == []  # of those that wait one speaks
    said = first[0]
    assert said.startswith("rank 0 has waited ")
    assert "for rank 1, which last said where they are: rank 1 after" in said
    assert "dist.barrier" in said
    assert "After 50 s this is an error" in said


# ---- a call that raises between two of its collectives
class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().sum() > 1e5:
            raise ValueError("a bad sample")
        return torch.tanh(x)


class Between(nn.Module):
    """Something that may raise, with parameters before it and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.part, self.b = nn.Linear(8, 16), fzero.opaque(Refuses()), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.part(self.a(x)))


def _calls(kind: str) -> Callable[[Tensor], float]:
    """What trains with a batch, or evaluates it, and tells the loss."""
    torch.manual_seed(0)
    module, sgd = Between(), fzero.optim.sgd(0.1)
    cfg = fzero.Config(stage=3, donate=False, bucket_mb=0.0005, layout="rows")
    if kind == "engine":
        engine = fzero.Engine(module, sgd, cfg.replace(donate=True))

        def train(x: Tensor) -> float:
            engine.zero_grad()
            loss = engine(x).square().mean()
            loss.backward()
            engine.step()
            return float(engine.state[1].metrics["loss"])

        return train
    apply, params = fzero.functionalize(module)

    def loss_of(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    if kind == "function":
        function, shards = fzero.sharded(loss_of, cfg, reduce="mean"), fzero.shard(params, cfg)
        return lambda x: float(function(shards, x))
    step_fn = fzero.make_train_step(loss_of, sgd, cfg.replace(executor=kind))
    held = list(step_fn.init(params))

    def train_step(x: Tensor) -> float:
        held[:] = step_fn(*held, x)
        return float(held[1].metrics["loss"])

    return train_step


def _call_on(kind: str, bad: Callable[[int], float]) -> list[str | float]:
    """Calls with good batches, one that is `bad` for this rank, and good ones again."""
    whereabouts.PATIENCE, whereabouts.PAUSE = 0.5, 0.2
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    call, told = _calls(kind), []
    for i in range(5):
        x = torch.full((4, 8), 0.1 * (i + 1))
        try:
            told.append(call(x * bad(dist.get_rank()) if i == 2 else x))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def _bad_on_1(rank: int) -> float:
    return 1e9 if rank == 1 else 1.0


def _bad_on_all(rank: int) -> float:
    return 1e9 + rank


KINDS = [
    "traced",
    "function",
    pytest.param("eager", marks=pytest.mark.slow),
    pytest.param("engine", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_raised_alone_and_calls_again_is_found_out(kind: str) -> None:
    """What it would send next is no longer what the others wait for: gloo would abort them."""
    for rank, told in enumerate(run_fresh(2, _call_on, kind, _bad_on_1)):
        assert all(isinstance(x, float) for x in told[:2]), told
        assert str(told[2]).startswith("ValueError" if rank == 1 else "RankMismatchError"), told
        for text in map(str, told[3:]):
            assert text.startswith("RankMismatchError"), told
            assert "(raised)" in text


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_raised_alike_go_on(kind: str) -> None:
    for told in run_fresh(2, _call_on, kind, _bad_on_all):
        assert str(told[2]).startswith("ValueError"), told
        assert all(isinstance(x, float) for x in told[:2] + told[3:]), told


def _meetings(kind: str) -> tuple[list[str], list[str]]:
    """The meetings of four calls, one of which raises before it has sent anything; of one more."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    call, x, met = _calls(kind), torch.full((4, 8), 0.1), []
    meet = Circle.meet

    def noted(self: Circle, key: str, text: str, hint: str = "") -> list[str]:
        met.append(key)
        return meet(self, key, text, hint)

    call(x)
    with mock.patch.object(Circle, "meet", noted):
        call(x)
        with pytest.raises(fzero.FzeroError):
            call(x.new_zeros(4, 7))
        call(x)
        call(x)
        before = list(met)
        with pytest.raises(ValueError, match="a bad sample"):
            call(x * 1e9)
        call(x)
        call(x)
    return before, met[len(before) :]


@pytest.mark.parametrize("kind", ["traced", "function"])
def test_ranks_meet_once_and_only_after_something_was_sent(kind: str) -> None:
    for before, after in run_fresh(2, _meetings, kind):
        assert before == []
        assert len(after) == 1
        assert after[0].startswith("after an exception at")


def _meet_again(counts: list[int]) -> tuple[list[str], str]:
    """All ranks leave a station by an exception; rank 0 is interrupted as it waits for the rest."""
    whereabouts.PATIENCE, whereabouts.PAUSE = 0.5, 0.2
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    circle, rank = circle_of(resolve_mesh(None, "cpu")), dist.get_rank()
    told, numbers = [], []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyError), circle.at("a call"):
        circle.sent += counts[rank]
        raise KeyError
    if rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(1.0)
    for _ in range(2):
        try:
            with circle.at("the next call"):
                numbers.append(circle.here.number)
            told.append("came")
        except (KeyboardInterrupt, fzero.RankMismatchError) as error:
            told.append(type(error).__name__)
    return told, f"{numbers} {circle.verdict}"


def test_an_interrupted_meeting_is_come_to_again() -> None:
    (first, at_first), (second, at_second) = run_fresh(2, _meet_again, [2, 2])
    assert first == ["KeyboardInterrupt", "came"]
    assert second == ["came", "came"]
    assert at_first.startswith("[3]")
    assert at_second.startswith("[3, 4]")


def test_ranks_that_raised_at_different_places_are_told_both() -> None:
    for told, verdict in run_fresh(2, _meet_again, [2, 3]):
        assert "RankMismatchError" in told
        assert "rank 0" in verdict
        assert "after an exception at" in verdict or "2 collectives sent" in verdict
