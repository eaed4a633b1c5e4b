"""Steps and threads beside them do not see each other's random numbers."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import fzero
from tests.ranks import run_ranks
from tests.step.test_eager import OwnCheckpoint

Params = dict[str, Tensor]


def _own(params: Params, x: Tensor) -> Tensor:
    out: Any = OwnCheckpoint.apply(lambda w: F.dropout(x @ w), params["w"])
    return F.dropout(out).square().mean()


def _checkpointed(use_reentrant: bool) -> Callable[[Params, Tensor], Tensor]:
    def model_fn(params: Params, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return F.dropout(x @ params["w"])

        for _ in range(2):
            y: Any = checkpoint(block, x, use_reentrant=use_reentrant)
            x = y
        return F.dropout(x).square().mean()

    return model_fn


@fzero.stage
def _block(params: Params, x: Tensor) -> Tensor:
    return F.dropout(x @ params["w"])


MODELS: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "dropout": lambda p, x: F.dropout(F.dropout(x @ p["w"]) @ p["w"]).square().mean(),
    "a checkpoint of the user's": _own,
    "torch's, re-entrant": _checkpointed(True),
    "torch's, not re-entrant": _checkpointed(False),
    "staged": lambda p, x: _block(p, _block(p, x)).square().mean(),
}
Run = tuple[str, int, int]  # model, stage, accumulation
_runs = st.lists(
    st.tuples(st.sampled_from(sorted(MODELS)), st.sampled_from([0, 3]), st.sampled_from([1, 2])),
    min_size=1,
    max_size=3,
)


def _trained(run: Run, steps: int = 4) -> list[Tensor]:
    model, stage, accum = run
    cfg = fzero.Config(executor="eager", stage=stage, accum_steps=accum, seed=3)
    step_fn = fzero.make_train_step(MODELS[model], fzero.optim.sgd(1e-3), cfg)
    w = torch.linspace(-1, 1, 36).reshape(6, 6)
    params, opt_state = step_fn.init({"w": w})
    losses = []
    for _ in range(steps):
        params, opt_state = step_fn(params, opt_state, torch.ones(4, 6))
        losses.append(opt_state.metrics["loss"])
    return [*losses, fzero.unshard(params)["w"]]


def _bits(results: list[Tensor]) -> list[list[Any]]:
    return [x.tolist() for x in results]


SIZE = 3  # of what a neighbour draws at once


@contextlib.contextmanager
def _neighbours(threads: int, seed: int) -> Iterator[list[list[float]]]:
    """Threads that draw from torch's global generator; what they have drawn."""
    drawn: list[list[float]] = []
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            drawn.append(torch.rand(SIZE).tolist())
            stop.wait(1e-4)

    running = [threading.Thread(target=draw) for _ in range(threads)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for thread in running:
            thread.start()
        try:
            yield drawn
        finally:
            stop.set()
            for thread in running:
                thread.join()


def _broken(runs: list[Run], threads: int, seed: int) -> list[str]:
    """The laws that do not hold."""
    alone = [_bits(_trained(run)) for run in runs]
    with _neighbours(threads, seed) as drawn:
        beside = [_bits(_trained(run)) for run in runs]
    generator = torch.Generator().manual_seed(seed)
    wanted = [torch.rand(SIZE, generator=generator).tolist() for _ in drawn]
    if threads > 1:  # who drew what is chance
        drawn, wanted = sorted(drawn), sorted(wanted)
    laws = {
        "steps are what they are alone": beside == alone,
        "neighbours see what they see alone": drawn == wanted,
        "there were neighbours": len(drawn) >= threads,
    }
    return [law for law, holds in laws.items() if not holds]


@settings(max_examples=10)
@given(_runs, st.integers(1, 3), st.integers(0, 2**31))
def test_steps_and_neighbours_do_not_see_each_other(
    runs: list[Run], threads: int, seed: int
) -> None:
    assert _broken(runs, threads, seed) == []


@settings(max_examples=3)
@given(_runs, st.integers(1, 3), st.integers(0, 2**31))
def test_nor_do_they_on_two_ranks(runs: list[Run], threads: int, seed: int) -> None:
    assert run_ranks(2, _broken, runs, threads, seed, timeout=120) == [[]] * 2


@pytest.mark.parametrize("model", MODELS)
def test_steps_of_two_threads_do_not_see_each_other(model: str) -> None:
    assert not dist.is_initialized()
    runs: list[Run] = [(model, 3, 1), (model, 0, 2)]
    alone = [_bits(_trained(run, 12)) for run in runs]
    found: list[Any] = [None, None]
    together = threading.Barrier(2)

    def train(i: int) -> None:
        together.wait(30)
        found[i] = _bits(_trained(runs[i], 12))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_a_loader_in_a_thread_gives_the_order_that_it_gives_alone() -> None:
    def orders() -> list[list[int]]:
        loader = DataLoader(range(20), batch_size=None, shuffle=True)  # pyright: ignore
        return [[int(x) for x in loader] for _ in range(20)]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        alone = orders()
    found: list[Any] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        thread = threading.Thread(target=lambda: found.extend(orders()))
        thread.start()
        while thread.is_alive():
            _trained(("dropout", 3, 1))
        thread.join()
    assert found == alone


def test_functions_that_run_eagerly_have_no_neighbours() -> None:
    cfg = fzero.Config(executor="eager")
    params = fzero.shard({"w": torch.ones(6, 6)}, cfg)
    grad = fzero.value_and_grad(MODELS["dropout"], cfg)

    def found() -> list[Any]:
        results = [grad(params, torch.ones(4, 6), rng=i) for i in range(20)]
        return [(loss.tolist(), fzero.unshard(grads)["w"].tolist()) for loss, grads in results]

    alone = found()
    with _neighbours(1, 5) as drawn:
        assert found() == alone
    generator = torch.Generator().manual_seed(5)
    assert drawn == [torch.rand(SIZE, generator=generator).tolist() for _ in drawn]
