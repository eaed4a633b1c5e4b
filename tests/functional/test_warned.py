"""Warnings of a thread are its own, whatever happens to the filters meanwhile."""

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fzero
from fzero.functional.warned import warned_here


def _in_a_thread(fn: Callable[[], object]) -> None:
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()


def _raises() -> bool:
    try:
        warnings.warn("old: call the other one", stacklevel=1)
    except UserWarning:
        return True
    return False


@pytest.mark.filterwarnings("ignore")
def test_it_is_so_in_this_thread_alone() -> None:
    found: list[bool] = []
    with warned_here("error"):
        assert _raises()
        with warned_here("ignore", "old"), warned_here("ignore", "new"):
            assert not _raises()
        with warned_here("ignore", "new"):
            assert _raises()
        _in_a_thread(lambda: found.append(_raises()))
    assert found == [False]
    assert not _raises()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("theirs_first", [False, True])
def test_filters_that_others_copy_and_put_back_forget_it(theirs_first: bool) -> None:
    before, mine, theirs = warnings.filters, warned_here("error"), warnings.catch_warnings()
    kept = [*before]
    first, second = (theirs, mine) if theirs_first else (mine, theirs)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert not _raises()
    warnings.filters = before  # pyright: ignore
    assert [*warnings.filters] == kept
    assert not _raises()


def _stages(turns: int) -> None:
    for _ in range(turns):
        step_fn = fzero.make_train_step(_loss, fzero.optim.sgd(0.1), fzero.Config())
        step_fn(*step_fn.init(lambda: {"w": torch.ones(3, 2)}), torch.ones(2, 3))


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


@pytest.mark.filterwarnings("ignore")
def test_recording_a_step_leaves_the_filters_of_others_alone() -> None:
    """Neither in the midst of it, nor when steps that are recorded in two threads have come to an
    end in the order in which they began."""
    raised, filters, stop = list[bool](), warnings.filters, threading.Event()
    kept = [*filters]

    def warns() -> None:
        while not stop.is_set():
            raised.append(_raises())
            stop.wait(1e-4)

    threads = [threading.Thread(target=_stages, args=(3,)) for _ in range(2)]
    neighbour = threading.Thread(target=warns)
    for thread in (neighbour, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    neighbour.join()
    assert raised
    assert not any(raised)
    assert warnings.filters is filters
    assert [*filters] == kept
